"""Lines between processes, and a child process of an event loop."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support import PATIENCE_S, eventually
from support.jobs import config
from support.memory import create_model

from gadei_ps import sync
from gadei_ps.machine import log, process
from gadei_ps.machine.child import Child
from gadei_ps.machine.lines import Lines
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.watchdog.checkpoints import Checkpoints
from gadei_ps.watchdog.job_memory import JobMemory

LONG = b"x" * (1 << 18)  # more than a pipe holds


class Loop:
    """An event loop, and the messages of a child."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.lines: list[bytes] = []
        self.codes: list[int] = []

    def start(self, script: str, **how: int) -> Child:
        command = [sys.executable, "-S", "-c", script]
        return Child(self.selector, command, self.lines.append, self.codes.append, **how)

    def hear(self) -> None:
        for key, mask in self.selector.select(0.05):
            key.data(mask)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    assert not made.selector.get_map()
    made.selector.close()


def pipe(most_bytes: int = 1 << 20) -> tuple[Lines, Lines]:
    read, write = os.pipe()
    return Lines(read, most_bytes=most_bytes), Lines(sends=write)


def test_a_line_that_does_not_fit_is_sent_in_the_end() -> None:
    """And none before it is whole."""
    ours, theirs = pipe()
    assert theirs.send(LONG)
    assert not theirs.send(b"next")
    got = list(ours.receive())
    assert got == []
    while not theirs.flush():
        got += ours.receive()
    got += ours.receive()
    assert theirs.send(b"next")
    got += ours.receive()
    assert got == [LONG, b"next"]
    theirs.close()
    assert list(ours.receive()) == []
    assert ours.has_ended
    ours.close()


def test_a_line_that_is_too_long_ends_a_channel() -> None:
    ours, theirs = pipe(most_bytes=100)
    theirs.send(b"short")
    theirs.send(LONG)
    assert list(ours.receive()) == [b"short"]
    assert ours.has_ended
    ours.close()
    with pytest.raises(BrokenPipeError):
        theirs.flush()
    theirs.close()


def test_a_child_is_heard_to_its_end(loop: Loop) -> None:
    child = loop.start("print(input()); print(input(), flush=True); raise SystemExit(3)")
    assert child.send(b"one")
    assert child.send(b"two")
    eventually(lambda: loop.hear() or loop.codes)
    assert (loop.lines, loop.codes) == ([b"one", b"two"], [3])


def test_a_child_that_reads_no_more(loop: Loop) -> None:
    child = loop.start(
        "import os, signal; os.close(0); print('closed', flush=True); signal.pause()"
    )
    eventually(lambda: loop.hear() or loop.lines)
    assert not child.send(b"one")
    child.kill()
    eventually(lambda: loop.hear() or loop.codes)
    assert loop.codes == [-signal.SIGKILL]


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_a_child_is_ended_without_a_report(loop: Loop, grace_s: float) -> None:
    child = loop.start("import sys; sys.stdin.read(); print('end')")
    child.end(grace_s, 60.0)
    assert not process.start_ticks(child.pid)
    assert not loop.codes


@pytest.mark.parametrize("dies", [False, True])
def test_a_child_is_ended_by_what_it_says(loop: Loop, *, dies: bool) -> None:
    """Nothing of it is reported after that, even if it has said more or has died by itself."""
    rest = "" if dies else "; __import__('time').sleep(1000)"
    child = loop.start(f"print('a\\nb\\nc', end='', flush=True){rest}")

    def on_line(line: bytes) -> None:
        loop.lines.append(line)
        child.end(0.0, PATIENCE_S)

    child._on_line = on_line
    if dies:
        assert process.gone(child._pidfd, PATIENCE_S)
    eventually(lambda: loop.hear() or not loop.selector.get_map())
    assert (loop.lines, loop.codes) == ([b"a"], [])
    child.end(0.0, 0.0)


def test_a_child_that_cannot_be_started_leaves_nothing(loop: Loop) -> None:
    gc.collect()  # else what other tests have left may be closed meanwhile
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(FileNotFoundError):
        Child(loop.selector, ["no-such-program"], loop.lines.append, loop.codes.append)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_checkpoint_writer_that_does_not_end_blocks_nothing(
    job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has reported its outcome, and closed its output; the kernel may still block it."""
    answer = 'print(\'{"ok": false, "error": "a full disk"}\', flush=True)'
    script = f"import os, signal; {answer}; os.close(1); signal.pause()"
    monkeypatch.setattr(process, "module_command", lambda *_: [sys.executable, "-c", script])
    memory = JobMemory(config(job_name))
    memory.create_control(sync.parse("asp"))
    selector = selectors.DefaultSelector()
    checkpoints = Checkpoints(memory, selector, log.get())
    outcomes: list[object] = []
    try:
        model = place([Tensor("w", (4,))])
        create_model(memory, model, np.zeros(model.elements, np.float32))
        checkpoints.ask(outcomes.append)
        assert checkpoints._checkpoint_writer is not None
        pid = checkpoints._checkpoint_writer.pid
        watched = len(selector.get_map())
        while len(selector.get_map()) == watched:
            for key, mask in selector.select():
                key.data(mask)
        assert process.start_ticks(pid)
        assert not outcomes
        os.kill(pid, signal.SIGKILL)
        while not outcomes:
            for key, mask in selector.select():
                key.data(mask)
        assert outcomes == [{"ok": False, "error": "a full disk"}]
    finally:
        checkpoints.close()
        selector.close()
        memory.remove()
