"""Messages of a process that ends because a script has stored to read-only memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal

import pytest

from gadei_ps import _native

PAGE = mmap.PAGESIZE


def dies(calls: list[tuple[int, int]], at: int) -> str:
    """Return what a process prints that calls tell_of_stores() so often and stores at a page."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no report of pytest's
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(write, 2)
        memory = mmap.mmap(-1, 4 * PAGE, prot=mmap.PROT_READ)
        address = _native.address(memory)
        for page, pages in calls:
            _native.tell_of_stores(address + page * PAGE, pages * PAGE)
        ctypes.memset(address + at * PAGE, 1, 1)
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.parametrize(
    ("calls", "at", "says"),
    [
        ([(1, 2)], 1, True),
        ([(1, 2)], 2, True),
        ([(1, 2)], 0, False),
        ([(1, 2)], 3, False),
        ([(1, 1), (2, 1)], 2, True),
        ([(1, 2), (1, 0)], 1, False),
        ([(1, 1), (1, 2)], 2, True),
        ([(1, 2), (1, 1)], 2, False),
        ([(1, 2), (1, 0), (2, 1)], 1, False),
    ],
)
def test_who_has_stored(calls: list[tuple[int, int]], at: int, says: bool) -> None:
    """Only a store into memory that has been announced; a later announcement replaces it."""
    output = dies(calls, at)
    assert ("written to a parameter in place" in output) == says
    assert bool(output) == says
