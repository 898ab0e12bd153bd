"""Checks of the kernel and its limits: cores, system calls, files, paths of sockets."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import threading

from gadei_ps import _native
from gadei_ps.commands.doctor.result import Found, Level

# A watchdog holds for each learner a pidfd, its ring and its connection, and for itself some more.
FILES_OF_A_LEARNER = 3
FILES_OF_THE_JOB = 64
MOST_LEARNERS = 256
LONGEST_SOCKET_PATH = 107  # of sockaddr_un, without its closing zero
SOCKET_NAME_BYTES = len("/..sock.") + 7  # in the directory, without the job's name; 7: a pid
LONGEST_JOB_NAME = 48
SYS_FUTEX_WAITV = 449
DIED = 1  # what lease_take() returns to the next owner
OWNER_DIES_WITHIN_NS = 1_000_000_000


def cores() -> Found:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {present} usable"
    if usable < 2:
        return Level.WARNING, found, "learners and the server share one core; give two or more"
    return Level.OK, found, ""


def futex_waitv() -> Found:
    libc = ctypes.CDLL(None, use_errno=True)
    # No futexes to wait for: a kernel that knows the call refuses that as invalid.
    libc.syscall(SYS_FUTEX_WAITV, None, 0, 0, None, 0)
    if ctypes.get_errno() == errno.EINVAL:
        return Level.OK, f"kernel {platform.release()}", ""
    return (
        Level.WARNING,
        f"kernel {platform.release()} lacks it or forbids it: an idle server wakes by a timer",
        "use Linux 5.16 or newer",
    )


def pidfd() -> Found:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return (
            Level.ERROR,
            f"{error.strerror}: the death of a learner cannot be detected",
            "use Linux 5.3 or newer, and a sandbox that allows it",
        )
    return Level.OK, "works", ""


def robust_mutex() -> Found:
    """Check that the next thread gets the lease, and the news, of a thread that ended with it."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    lease = _native.address(memory)
    try:
        _native.lease_make(lease)
        owner = threading.Thread(target=_native.lease_take, args=(lease, 0))
        owner.start()
        owner.join()
        # Python's join does not wait for the kernel's end of the thread.
        found = _native.lease_take(lease, OWNER_DIES_WITHIN_NS)
        if found != _native.PS_TIMEOUT:
            _native.lease_release(lease)  # before its memory is unmapped
        reason = "" if found == DIED else "no news of it"
    except OSError as error:
        reason = str(error.strerror)
    if not reason:
        return Level.OK, "work", ""
    return (
        Level.ERROR,
        f"do not work ({reason}): the death of a server cannot be detected",
        "use an ordinary Linux kernel, and a sandbox that allows set_robust_list",
    )


def files() -> Found:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Level.OK, "unlimited", ""
    learners = max(0, (soft - FILES_OF_THE_JOB) // FILES_OF_A_LEARNER)
    if learners >= MOST_LEARNERS:
        return Level.OK, f"{soft}", ""
    needed = FILES_OF_THE_JOB + FILES_OF_A_LEARNER * MOST_LEARNERS
    beyond = hard != resource.RLIM_INFINITY and hard < needed
    return (
        Level.WARNING,
        f"{soft}, enough for {learners} of {MOST_LEARNERS} learners",
        f"ulimit -n {needed}" + (f" by root: your hard limit is {hard}" if beyond else ""),
    )


def runtime_directory() -> Found:
    from gadei_ps.job import paths

    path = paths.directory()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not os.access(there, os.W_OK):
        return (
            Level.ERROR,
            f"{path}: you cannot write in {there}",
            "set GADEI_PS_RUNTIME_DIR to a directory you may write",
        )
    room = LONGEST_SOCKET_PATH - len(os.fsencode(path)) - SOCKET_NAME_BYTES
    if room < 1:
        return (
            Level.ERROR,
            f"{path}: too long for the path of a socket",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    if room < LONGEST_JOB_NAME:
        return (
            Level.WARNING,
            f"{path}: leaves {room} characters for the name of a job",
            "set GADEI_PS_RUNTIME_DIR to a shorter one",
        )
    return Level.OK, str(path), ""
