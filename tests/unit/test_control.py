"""Messages of the control protocol, and a client that meets something else."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gadei_ps import errors
from gadei_ps.errors import ControlError, JobInUse, JobNotFound
from gadei_ps.job import control, paths
from gadei_ps.job.control import (
    MAX_MESSAGE,
    PROTOCOL,
    Attach,
    Checkpoint,
    Connection,
    Copy,
    Detach,
    Discard,
    FirstBatch,
    Launch,
    LeaveOut,
    Load,
    Measured,
    Offer,
    Own,
    Reload,
    Reported,
    SetOptimizer,
    SetSync,
    SetWork,
    Status,
    StopJob,
    TensorOffer,
    memory_file,
    pack,
    parse_request,
)
from gadei_ps.watchdog.requests import HANDLERS

OFFER = Offer(tensors=[TensorOffer(name="w", shape=[2, 3])])
MESSAGES = [
    Attach(name="one"),
    Checkpoint(),
    Copy(),
    Detach(row=3, generation=7),
    Discard(),
    FirstBatch(digest=3),
    Launch(count=2, command="python train.py", directory="/home"),
    LeaveOut(number=3),
    Load(generation=7, digest=2**63 - 1, done=True),
    Measured(values={"accuracy": 0.5}),
    Offer(tensors=[TensorOffer(name="w", shape=[2, 3]), TensorOffer(name="b", shape=[], role=2)]),
    Own(number=3, ranges=[(0, 1, 2), (1, 0, 2**31 - 1)], take_back=True, passes=1),
    Reload(config={"name": "demo", "optimizer": {"lr": 0.5}}),
    Reported(values={"accuracy": (0.5, 3)}),
    SetOptimizer(values={"lr": 0.5, "step_size": 3, "schedule": "step", "staleness_aware": True}),
    SetSync(sync="ssp:s=3"),
    SetWork(batches=3, epochs=2, seed=2**63 - 1),
    Status(),
    StopJob(drain=True, timeout_s=0.5),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.op)
def test_there_and_back(message: control.Request) -> None:
    data = pack(message.model_dump())
    assert struct.unpack("!I", data[:4])[0] == len(data) - 4
    assert parse_request(data[4:]) == message


def test_a_stop_that_is_not_awaited_has_a_reply_of_its_own() -> None:
    done = b'{"v": 1, "ok": true}'
    assert control._reply(StopJob(wait=False), done).ok
    with pytest.raises(ValidationError):
        control._reply(StopJob(), done)


def test_every_request_is_tested() -> None:
    assert {message.op for message in MESSAGES} == {
        kind.model_fields["op"].default for kind in control.Request.__subclasses__()
    }


def test_every_request_has_a_handler() -> None:
    assert {type(message) for message in MESSAGES} == HANDLERS.keys()


@given(st.binary(max_size=200))
def test_rubbish_is_refused_in_one_line(raw: bytes) -> None:
    with pytest.raises(ControlError) as info:
        parse_request(raw)
    assert "\n" not in str(info.value)


def test_a_line_end_in_a_request_is_not_repeated() -> None:
    with pytest.raises(ControlError) as info:
        parse_request(json.dumps({"op": "a\nb"}).encode())
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.op)
def test_unknown_fields_and_versions_are_refused(message: control.Request) -> None:
    for change in ({"extra": 1}, {"v": PROTOCOL + 1}, {"v": "1"}):
        with pytest.raises(ControlError, match="bad request"):
            parse_request(json.dumps(message.model_dump() | change).encode())


def test_messages_are_bounded() -> None:
    with pytest.raises(ControlError, match="the limit is"):
        pack({"x": "y" * MAX_MESSAGE})


def test_memory_file() -> None:
    fd = memory_file(3000, [(0, memoryview(b"abc")), (2000, memoryview(b"de" * 500))])
    try:
        assert os.pread(fd, 4000, 0) == b"abc" + bytes(1997) + b"de" * 500
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


# -- a client that meets something else -----------------------------------------------------------


@contextmanager
def answering(runtime_dir: Path, *answers: bytes) -> Iterator[str]:
    """A process at a socket that says this, whatever is asked, and then hangs up."""
    path = runtime_dir / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                for answer in answers:
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(path)
        thread.join()


def reply(**message: object) -> bytes:
    return pack({"v": PROTOCOL} | message)


def test_errors_come_back_as_they_were(runtime_dir: Path) -> None:
    answer = reply(ok=False, error="taken", kind="JobInUse")
    with (
        answering(runtime_dir, answer) as path,
        Connection(path) as one,
        pytest.raises(JobInUse, match="taken"),
    ):
        one.request(Status())


def test_notes_come_before_the_reply(runtime_dir: Path) -> None:
    notes = [{"note": "making", "what": "it", "done": done, "total": 9} for done in (3, 7)]
    answers = [reply(ok=True, **note) for note in notes] + [reply(ok=True, made=True)]
    heard: list[dict[str, object]] = []
    with answering(runtime_dir, b"".join(answers)) as path, Connection(path) as one:
        assert one.request(OFFER, on_note=heard.append)["made"] is True
    assert heard == [{"v": PROTOCOL, "ok": True} | note for note in notes]


@pytest.mark.parametrize(
    "kind", ["OSError", "annotations", "", "__doc__", 3, None, [], "OtherVersion"]
)
def test_unknown_kinds_of_error(kind: object, runtime_dir: Path) -> None:
    answer = reply(ok=False, error="x", kind=kind)
    with (
        answering(runtime_dir, answer) as path,
        Connection(path) as one,
        pytest.raises(ControlError, match="x"),
    ):
        one.request(Status())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0",
        struct.pack("!I", 100) + b"{",
        struct.pack("!I", MAX_MESSAGE + 1),
        struct.pack("!I", 2) + b"{]",
        struct.pack("!I", 2) + b"\xff\xff",
        struct.pack("!I", 2) + b"[]",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_somebody_else_answers(answer: bytes, runtime_dir: Path) -> None:
    with answering(runtime_dir, answer) as path, Connection(path) as one:
        with pytest.raises(ControlError) as info:
            one.request(Status())
        assert "other.sock" in str(info.value)
        assert "\n" not in str(info.value)


def test_nobody_answers(runtime_dir: Path) -> None:
    path = runtime_dir / "silent.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with (
            Connection(str(path), timeout_s=0.05) as one,
            pytest.raises(ControlError, match="does not answer"),
        ):
            one.request(Status())
    with pytest.raises(JobNotFound):  # the file is there, the process is not
        Connection(str(path))
    with pytest.raises(JobNotFound, match="gadei-ps ls"):
        Connection("none")
    with pytest.raises(errors.UsageError):
        Connection("no such name")


# -- where sockets lie ----------------------------------------------------------------------------


def test_runtime_directory(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.directory() == runtime_dir
    assert paths.socket_path("x").parent == paths.lock_path("x").parent == runtime_dir
    monkeypatch.delenv("GADEI_PS_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    assert paths.directory() == runtime_dir / "gadei-ps"
    assert paths.directory(make=True).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("spoil", ["writable", "file", "link", "missing parent"])
def test_a_directory_that_others_may_write_is_refused(
    spoil: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runtime_dir / "place"
    if spoil == "writable":
        path.mkdir()
        path.chmod(0o770)
    elif spoil == "file":
        path.touch()
    elif spoil == "link":
        (runtime_dir / "real").mkdir()
        path.symlink_to(runtime_dir / "real")
    else:
        (runtime_dir / "file").touch()
        path = runtime_dir / "file" / "place"
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(path))
    with pytest.raises(ControlError) as info:
        paths.directory()
    assert "\n" not in str(info.value)
