"""A job's configuration in its own memory, and what `gadei-ps set` has changed of its optimizer.

So the job can be ended without its job file, the next watchdog knows the changes, and monitors find
the job's history. The text lies in the control segment behind the control record, in two places of
equal size. Each place holds a number, the length of the text, a CRC-32 of all three, and the text
(JSON). The whole place with the higher number counts: a watchdog may die while it writes the other
one, which is not whole then, as its CRC-32 shows.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import Any

from pydantic import ValidationError

from gadei_ps.errors import NotOurs
from gadei_ps.job import changes
from gadei_ps.job.changes import NO_CHANGES, Changes
from gadei_ps.job.config import JobConfig
from gadei_ps.memory import layout, shm
from gadei_ps.memory.segment import Segment

AT = layout.CONTROL.itemsize
HEAD = struct.Struct("<QII")  # number, bytes of the text, CRC-32
MOST_BYTES = 64 << 20  # of a control segment that is read: far more than any job has
SPARE = 16384  # bytes by which the text may grow: what a watchdog that adopts the job may change


def room(config: JobConfig) -> int:
    """Return the size of both places of this job (bytes)."""
    return 2 * layout.rounded(HEAD.size + len(_text(config, NO_CHANGES)) + SPARE, 8)


def write(control: Segment, config: JobConfig, changed: Changes) -> None:
    """Enter the configuration; one that has grown too long leaves no record."""
    text, memory = _text(config, changed), control.memory
    size = _place(len(memory))
    if size < HEAD.size:
        return
    places = AT, AT + size
    numbers = [_read(memory[at : at + size])[0] for at in places]
    if HEAD.size + len(text) > size:
        for at in places:
            memory[at : at + HEAD.size] = bytes(HEAD.size)
        return
    at, number = places[numbers.index(min(numbers))], max(numbers) + 1
    memory[at + HEAD.size : at + HEAD.size + len(text)] = text
    HEAD.pack_into(memory, at, number, len(text), _sum(number, text))


def read(job: str) -> JobConfig | None:
    """The configuration of the job in memory; None if there is none that this program can use."""
    try:
        fd = shm.open_segment(shm.segment_name(job, "control"), writable=False)
    except (FileNotFoundError, NotOurs):
        return None
    try:
        raw = texts(fd, os.fstat(fd).st_size)
    except ValueError:
        return None
    finally:
        os.close(fd)
    try:
        config = JobConfig.model_validate(parsed(raw).get("config"))
    except ValidationError:
        return None
    return config if config.name == job else None


def read_changes(control: Segment) -> Changes:
    """Read the changes by `gadei-ps set`; empty if there is no record."""
    memory = control.memory
    try:
        return changes.read(parsed(memory[AT : AT + 2 * _place(len(memory))]).get("changes", {}))
    except ValueError:
        return NO_CHANGES


def heads(fd: int, size: int) -> bytes:
    """Copy the heads of both places, which differ after each change."""
    return os.pread(fd, HEAD.size, AT) + os.pread(fd, HEAD.size, AT + _place(size))


def texts(fd: int, size: int) -> bytes:
    """Copy both places. fd, size: of the control segment's file. Raises ValueError."""
    if size > MOST_BYTES:
        raise ValueError(f"a control segment of {size} bytes")
    return os.pread(fd, 2 * _place(size), AT)


def parsed(raw: bytes) -> dict[str, Any]:
    """Parse what texts() has returned: `config`, `changes` and `history`, unchecked."""
    size = len(raw) // 2
    try:
        found = json.loads(max(_read(raw[:size]), _read(raw[size:]))[1])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(config: JobConfig, changed: Changes) -> bytes:
    history = str(config.history_file()) if config.history else None
    parts = {
        "config": config.model_dump(mode="json"),
        "changes": changed.model_dump(),
        "history": history,
    }
    return json.dumps(parts, separators=(",", ":")).encode()


def _place(segment_bytes: int) -> int:
    """Return the size of each place (bytes)."""
    return max(0, (segment_bytes - AT) // 2)


def _read(place: bytes) -> tuple[int, bytes]:
    """Number and text of a place; 0 if it is not whole."""
    if len(place) < HEAD.size:
        return 0, b""
    number, length, checksum = HEAD.unpack_from(place)
    text = place[HEAD.size : HEAD.size + length]
    return (number, text) if len(text) == length and checksum == _sum(number, text) else (0, b"")


def _sum(number: int, text: bytes) -> int:
    return zlib.crc32(HEAD.pack(number, len(text), 0) + text)
