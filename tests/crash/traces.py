"""Samples of the stores into shared words, and their comparison with a model."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from support import Child, Rig
from support.models import verify

ROOM = 4096  # samples
PTRACE_TRACEME = 0
PTRACE_TRACEME = 0
Trace = list[tuple[int, ...]]
"""Values of the words, in this order."""


class _Samples(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("room", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("words", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class Recorder:
    """The values of some words, one sample after the other."""

    def __init__(self, library: Path, words: Sequence[tuple[int, int]]) -> None:
        """words: of each its address and its bytes."""
        self._code = ctypes.CDLL(str(library))
        self._guarded = 0
        self._words = np.array(words, np.uint64)
        self._values = np.zeros((ROOM, len(words)), np.uint64)
        self._samples = _Samples(
            self._values.ctypes.data, ROOM, 0, self._words.ctypes.data, len(words)
        )
        self.sample()

    def sample(self) -> None:
        assert self._code.sample(ctypes.byref(self._samples))

    def trace(self, pid: int) -> None:
        """Trace from the start a process that has asked to be traced and has stopped itself."""
        assert os.WIFSTOPPED(os.waitpid(pid, 0)[1])
        self._guarded = self._code.guard(ctypes.byref(self._samples), pid)

    def go_on(self, pid: int, most: int = 0) -> None:
        """Let it run until it has stored something else, or for `most` instructions."""
        arguments = (ctypes.byref(self._samples), pid, self._guarded, ctypes.c_int64(most))
        assert self._code.go_on(*arguments), "the process has ended"

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A thread samples meanwhile."""
        stop = ctypes.c_uint32(0)
        call = (ctypes.byref(self._samples), ctypes.byref(stop))
        thread = threading.Thread(target=self._code.watch, args=call)
        thread.start()
        try:
            yield
        finally:
            stop.value = 1
            thread.join()
            self.sample()

    @property
    def rows(self) -> list[list[int]]:
        found: list[list[int]] = self._values[: self._samples.kept].tolist()
        return found


def _serve(pipe: Connection, rig: Rig) -> None:
    """A server of one thread, to be traced from the first instruction of its recovery on.

    Numba's own way to a function looks at types, with more instructions than the server itself.
    """
    faulthandler.disable()
    part = rig.part(0)
    recover, serve = (
        next(iter(function.overloads.values())).entry_point
        for function in (rig._recover.recover, rig._shard.serve)
    )
    assert not ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, None, None)
    os.kill(os.getpid(), signal.SIGSTOP)
    recover(part)
    serve(part)


def load(rig: Rig) -> None:
    """Load all that a traced server runs. To be called before there is anything to do."""
    with rig.serving():
        rig.recover()
    rig.board["quit"] = 0


def traced(rig: Rig, record: Recorder) -> Child:
    """A server of one shard that is stopped before its recovery; load() has been called."""
    child = Child(_serve, rig)
    record.trace(child.pid)
    return child


def accepts(
    model: str,
    defines: str,
    words: Sequence[str],
    trace: Trace,
    *,
    gaps: bool = False,
    brief: Sequence[str] = (),
) -> bool:
    """gaps: a word that differs in two samples may have had other values in between.

    brief: words that may have had them in any case, as who looks may have to wait for a core.
    """
    found: bool = verify().accepts(model, defines, words, trace, gaps=gaps, brief=brief)
    return found


def swapped(trace: Trace, first: tuple[int, int], then: tuple[int, int]) -> Trace:
    """The trace with two stores, one right after the other, in the other order.

    first, then: of each its word, by number, and the value stored.
    """
    for number in range(1, len(trace) - 1):
        before, between, after = trace[number - 1 : number + 2]
        one = between[first[0]] == first[1] != before[first[0]]
        if one and after[then[0]] == then[1] != between[then[0]]:
            other = list(before)
            other[then[0]] = then[1]
            return [*trace[:number], tuple(other), *trace[number + 1 :]]
    raise AssertionError(f"they do not follow one another: {first}, {then} in {trace}")


def with_one_more(trace: Trace, store: tuple[int, int], values: dict[int, int]) -> Trace:
    """The trace with a sample more, right before the one in which a word has this value first.

    values: by word, in which it differs from the sample before.
    """
    number = next(at for at, sample in enumerate(trace) if sample[store[0]] == store[1])
    other = list(trace[number - 1])
    for word, value in values.items():
        other[word] = value
    return [*trace[:number], tuple(other), *trace[number:]]
