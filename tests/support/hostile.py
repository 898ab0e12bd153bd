"""Files that may stand where a segment or a lock is looked for; each kind makes one at a path."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.machine import process
from gadei_ps.memory import build, layout
from gadei_ps.memory.layout import CONTROL, HEADER

NOBODY = 65534
SIZE = layout.rounded(CONTROL.itemsize, layout.PAGE)
Kind = Callable[[Path], object]


def control(job: str, **words: object) -> bytes:
    """A whole control segment of this build, of a dead watchdog; `words` are written over it.

    header_X is a word of the header.
    """
    raw = bytearray(SIZE)
    made = np.frombuffer(raw, CONTROL, 1)[0]
    header = made["header"]
    header["magic"], header["layout_version"] = layout.MAGIC, layout.LAYOUT_VERSION
    header["kind"], header["bytes"] = layout.SegmentKind.CONTROL, SIZE
    header["owner_pid"], header["owner_start"] = 2**22 + 1, 1  # above any pid
    header["owner_namespace"] = process.namespace()
    header["job_name"] = job.encode()
    made["build"], made["server_build"] = _native.BUILD, build.of_server()
    made["phase"], made["model_ready"] = layout.Phase.SERVING, 1
    for name, value in words.items():
        where = header if name.startswith("header_") else made
        where[name.removeprefix("header_")] = value
    return bytes(raw)


def naming(job: str, victim: int) -> bytes:
    """A control segment that names a process as watchdog, server and learner."""
    start = process.start_ticks(victim)
    raw = bytearray(control(job, lease_pid=victim, lease_start=start))
    made = np.frombuffer(raw, CONTROL, 1)[0]
    for lines, field in ((made["server"], "start"), (made["roster"], "pid_start")):
        lines["pid"], lines[field] = victim, start
    return bytes(raw)


def file(data: bytes, mode: int = 0o600, owner: int | None = None) -> Kind:
    def make(path: Path) -> None:
        path.write_bytes(data)
        path.chmod(mode)
        if owner is not None:
            os.chown(path, owner, owner)
        os.utime(path, (1e9, 1e9))  # not one that is being made just now

    return make


def sparse(size: int) -> Kind:
    def make(path: Path) -> None:
        file(b"")(path)
        os.truncate(path, size)
        os.utime(path, (1e9, 1e9))

    return make


def link(target: str) -> Kind:
    return lambda path: path.symlink_to(target)


def second_name(path: Path) -> None:
    """A hard link to a whole segment."""
    other = path.with_name(f"{path.name}.other")
    file(control("other"))(other)
    os.link(other, path)


def bound(path: Path) -> None:
    """A socket. Bound under a short name: an address has 107 bytes."""
    short = path.with_name(f"s{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short))
    short.rename(path)


def linked_segment(path: Path) -> None:
    """A symbolic link to a whole segment of this user."""
    other = path.with_name(f"{path.name}.other")
    file(control("other"))(other)
    path.symlink_to(other)


def linked_fifo(path: Path) -> None:
    other = path.with_name(f"{path.name}.other")
    os.mkfifo(other, 0o600)
    path.symlink_to(other)


# Of this user or not, these are not files that only this user can open.
FOREIGN: dict[str, Kind] = {
    "directory": lambda path: path.mkdir(),
    "directory, 0600": lambda path: path.mkdir(0o600),
    "FIFO": lambda path: os.mkfifo(path, 0o600),
    "FIFO, 0666": lambda path: (os.mkfifo(path), path.chmod(0o666)),
    "socket": bound,
    "link to nothing": link("nothing-here"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a directory": link("/tmp"),
    "link to an endless device": link("/dev/zero"),
    "link to a segment": linked_segment,
    "link to a FIFO": linked_fifo,
    "link to /proc/self/mem": link("/proc/self/mem"),
    "second name of a segment": second_name,
    "empty, 0644": file(b"", 0o644),
    "whole, 0666": file(control("x"), 0o666),
    "whole, 0640": file(control("x"), 0o640),
    "whole, 0604": file(control("x"), 0o604),
    "whole, 0601": file(control("x"), 0o601),
    "garbage, 0777": file(b"\xff" * SIZE, 0o777),
    "one byte, 0644": file(b"x", 0o644),
}
# Only root can make these.
OF_OTHERS: dict[str, Kind] = {
    "another's, empty": file(b"", owner=NOBODY),
    "another's, empty, 0666": file(b"", 0o666, NOBODY),
    "another's, one byte": file(b"x", owner=NOBODY),
    "another's, whole": file(control("x"), owner=NOBODY),
    "another's, whole, 0666": file(control("x"), 0o666, NOBODY),
    "another's, whole, 0644": file(control("x"), 0o644, NOBODY),
    "another's, temporary": file(control("x", temporary=1), 0o666, NOBODY),
    "another's, stopped": file(control("x", phase=4), 0o666, NOBODY),
    "another's directory": lambda path: (path.mkdir(), os.chown(path, NOBODY, NOBODY)),
    "another's FIFO": lambda path: (os.mkfifo(path, 0o666), os.chown(path, NOBODY, NOBODY)),
}
# Of this user alone, but no segments, or damaged ones.
DAMAGED: dict[str, Kind] = {
    "empty": file(b""),
    "one byte": file(b"x"),
    "seven bytes": file(b"GADEIPS"),
    "text": file(b"[job]\n" * 1000),
    "a program": file(b"\x7fELF\2\1\1\0" + bytes(5000)),
    "a header less one byte": file(control("x")[: HEADER.itemsize - 1]),
    "a header only": file(control("x")[: HEADER.itemsize]),
    "a header of that size": file(control("x", header_bytes=HEADER.itemsize)[: HEADER.itemsize]),
    "a page of that size": file(control("x", header_bytes=4096)[:4096]),
    "all less a byte": file(control("x")[: CONTROL.itemsize - 1]),
    "all less a page": file(control("x")[: SIZE - 4096]),
    "a page more": file(control("x") + bytes(4096)),
    "zeros": file(bytes(SIZE)),
    "ones": file(b"\xff" * SIZE),
    "noise": file(random.Random(1).randbytes(SIZE)),
    "noise after the magic": file(control("x")[:8] + random.Random(2).randbytes(SIZE - 8)),
    "noise after the header": file(control("x")[:128] + random.Random(3).randbytes(SIZE - 128)),
    "no magic": file(control("x", header_magic=0)),
    "another version": file(control("x", header_layout_version=99)),
    "version 0": file(control("x", header_layout_version=0)),
    "another kind": file(control("x", header_kind=4)),
    "kind 99": file(control("x", header_kind=99)),
    "another build": file(control("x", build=1)),
    "another server's build": file(control("x", server_build=1)),
    "another size": file(control("x", header_bytes=2**63)),
    "another namespace": file(control("x", header_owner_namespace=1, watchdog_pid=1)),
    "owner 0": file(control("x", header_owner_pid=0)),
    "owner -1": file(control("x", header_owner_pid=-1)),
    "phase 99": file(control("x", phase=99)),
    "stop 99": file(control("x", stop=99)),
    "no model": file(control("x", model_ready=0)),
    "a model and no weights": file(control("x")),
    "a terabyte of holes": sparse(1 << 40),
}


@contextmanager
def impostor(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[None]:
    """A program that has the socket of a watchdog and answers each request in its own way."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o666)

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    while peer.recv(1 << 16):
                        answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        path.unlink()


# -- JSON -----------------------------------------------------------------------------------------

MISSING = object()
ESCAPE = "\x1b]0;owned\x07\n\x9b2J"


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a JSON document, from the outside to the inside."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inside, (*at, key))


def put(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at this path; MISSING: with none."""
    changed = copy.deepcopy(document)
    where = changed
    for key in at[:-1]:
        where = where[key]
    if value is MISSING:
        del where[at[-1]]
    else:
        where[at[-1]] = value
    return changed
