"""Programs of other users that answer at the socket of a watchdog.

Root may look into another user's runtime directory. Whatever answers there, a command prints one
line without terminal escapes and ends in bounded time.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from shell import Cli
from support import PATIENCE_S, daemon
from support.hostile import ESCAPE, MISSING, impostor, places, put

from gadei_ps import metrics
from gadei_ps.cli.exits import print_json
from gadei_ps.commands import jobs
from gadei_ps.errors import ControlError, NoAnswer, invalid
from gadei_ps.job import control, replies
from gadei_ps.job.control import MAX_MESSAGE, Attach, Connection, Status, pack
from gadei_ps.learners.client import Client
from gadei_ps.show import tables, view
from gadei_ps.show.optimizer_line import advice, start
from gadei_ps.show.progress import Training
from gadei_ps.show.status import Rates, job_status, statuses

VALUES = (
    *(MISSING, None, True, "", ESCAPE, 0, -1, 2**31, 2**64, 10**400, 0.5, 1e308, math.nan),
    *([], {}, [[]], [{}], {"": ""}, {ESCAPE: ESCAPE}, [ESCAPE], [0] * 1000),
)


def rendered(report: dict[str, Any]) -> str:
    """All that commands print of a status."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        tables.show(job_status(report, Rates().update(report["learners"])))
        tables.show(statuses([report]))
        tables.show(view.stopped(report))
        tables.show(start(report) + advice(report, 9))
        print_json(report)
    assert Training()(report, 0.0) == []
    return shown.getvalue()


def test_each_field_of_a_status(job_name: str) -> None:
    tensors = [{"name": "w", "shape": [16]}]
    with daemon(job_name, tensors=tensors) as job, Client(job_name) as client:
        client.push({"w": np.ones(16, np.float32)}, samples=3)
        client.wait_applied()
        jobs.checkpoint(job_name)
        whole = jobs.status(job_name)
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(job.socket))
            raw.sendall(pack({"v": 1, "op": "status"}))
            with raw.makefile("rb") as stream:
                report = json.loads(stream.read(struct.unpack("!I", stream.read(4))[0]))
    undeclared = set(places(report)) - set(places(whole)) - {("v",), ("ok",)}
    assert not undeclared, "gadei_ps/job/replies.py lacks a field that the watchdog reports"
    assert {one.name for one in metrics.JOB} <= set(report)
    assert {one.name for one in metrics.LEARNER} <= set(report["learners"][0])
    assert whole["last_checkpoint"]
    accepted = 0
    for at in places(report):
        for value in VALUES:
            changed = json.dumps(put(report, at, value)).encode()
            try:
                reply = control._reply(Status(), changed)
            except ValidationError as error:
                assert "\n" not in invalid(error)
                continue
            if isinstance(reply, replies.Reply):
                printed = rendered(reply.model_dump(exclude_unset=True, by_alias=True))
                assert not {"\x1b", "\x07", "\x9b"} & set(printed), at
                accepted += 1
    assert accepted > 20


DONE = pack({"v": 1, "ok": True})
REFUSAL = pack({"v": 1, "ok": False, "error": ESCAPE, "kind": "OtherVersion"})
ANSWERS = (
    *(DONE, REFUSAL, pack({}), pack({"v": 2, "ok": True})),
    pack({"v": 1, "ok": False, "error": ["x"], "kind": {}}),
    pack({"v": 1, "ok": True, "note": "waiting", "text": "x"}),
    struct.pack("!I", 200_000) + b"[" * 200_000,
    struct.pack("!I", 100_023) + b'{"v":1,"ok":true,"job":' + b"[" * 100_000,
    struct.pack("!I", MAX_MESSAGE + 1),
)
STATUS = (("status",),)
COMMANDS = (
    *(("status", "--json"), ("stop",), ("set", "lr=0.1"), ("set", "sync=bsp"), ("checkpoint",)),
    *(("history",), ("attach", "--", "true"), ("kill", "--server"), ("trace", "--for", "1s")),
)


def test_commands(cli: Cli, runtime_dir: Path) -> None:
    path = runtime_dir / "other.sock"
    asked = [(one, STATUS) for one in ANSWERS] + [(one, COMMANDS) for one in (DONE, REFUSAL)]
    for answer, commands in asked:
        with impostor(path, lambda peer, answer=answer: peer.sendall(answer)):
            for command in commands:
                done = cli(command[0], path, *command[1:])
                assert done.code in (1, 2), done
                assert "internal error" not in done.error
                assert not {"\x1b", "\x07", "\x9b"} & set(done.err + done.out)


def in_drips(peer: socket.socket) -> None:
    """A reply of minutes, of which something comes all the time."""
    for byte in pack({"v": 1, "ok": True, "job": "x" * 200 * int(PATIENCE_S)}):
        peer.sendall(bytes([byte]))
        time.sleep(0.01)


def endless_notes(peer: socket.socket) -> None:
    while True:
        peer.sendall(pack({"v": 1, "ok": True, "note": "waiting", "text": ESCAPE}))
        time.sleep(0.01)


@pytest.mark.parametrize("answer", [in_drips, endless_notes])
def test_the_time_of_a_reply_is_bounded(
    answer: Callable[[socket.socket], None], runtime_dir: Path
) -> None:
    path = runtime_dir / "slow.sock"
    begin = time.monotonic()
    with (
        impostor(path, answer),
        Connection(str(path), timeout_s=0.2) as one,
        pytest.raises((NoAnswer, ControlError)),
    ):
        one.request(Status() if answer is endless_notes else Attach())
    assert time.monotonic() - begin < PATIENCE_S
