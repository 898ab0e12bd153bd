"""Harm done to a living process from outside: a stopped thread, leases that are lost."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection

from support.processes import Child, Stopped

PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000  # waits for threads of other processes, too
GET_ROBUST_LIST = {"x86_64": 274, "aarch64": 100}[platform.machine()]
ROBUST_LIST = struct.Struct("QqQ")  # struct robust_list_head: first, futex_offset, pending
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _check(result: int) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _hold(pipe: Connection, thread: int) -> None:
    """Stop a thread, which continues when this process ends."""
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        _check(_libc.ptrace(request, thread, None, None))
    os.waitpid(thread, WALL)
    pipe.send("held")
    while True:  # a thread that is killed has ended for others once its tracer has seen it
        _, status = os.waitpid(thread, WALL)
        if os.WIFSIGNALED(status) or os.WIFEXITED(status):
            return


class Held:
    """One thread of a process does not run meanwhile; the others do."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def __enter__(self) -> None:
        self._tracer = Child(_hold, self._thread)
        assert self._tracer.receive() == "held"

    def __exit__(self, *exc: object) -> None:
        self._tracer.kill()


def lose_leases(pid: int, threads: Sequence[int]) -> None:
    """Lose the leases of these threads: they are not handed on at their end.

    The kernel finds it in a list in the thread's own memory, and finds none there any more, as if
    the memory had been taken away first. The process is stopped while that is done.
    """
    with Stopped(pid):
        memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        try:
            for thread in threads:
                head, size = ctypes.c_uint64(), ctypes.c_uint64()
                at, to = ctypes.byref(head), ctypes.byref(size)
                _check(_libc.syscall(GET_ROBUST_LIST, thread, at, to))
                first, offset, _ = ROBUST_LIST.unpack(
                    os.pread(memory, ROBUST_LIST.size, head.value)
                )
                assert first != head.value, f"thread {thread} holds nothing"
                os.pwrite(memory, ROBUST_LIST.pack(head.value, offset, 0), head.value)
        finally:
            os.close(memory)
