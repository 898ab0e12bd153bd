"""Processes, identified by pid and start time: a pid alone may be reused."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NoReturn

from gadei_ps import _native
from gadei_ps.errors import UsageError

MANY_FILES = 4096  # 256 learners and 512 clients need more than the usual 1024
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PIDFD_SIGNAL_PROCESS_GROUP = 4  # of pidfd_send_signal(), Linux 6.9
# Name of a thread in a library of C++ that may wait without end.
FOREIGN = "foreign"


def leave(code: int) -> NoReturn:
    """End this process.

    It ends at once if a FOREIGN thread still waits: the interpreter's end destroys what that waits
    for, and the process would end by a signal.
    """
    if any(one.name == FOREIGN for one in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def cores() -> int:
    """Return the cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def start_ticks(pid: int) -> int:
    """Return the start time of a process (clock ticks after boot); 0 if there is no such process.

    A process exists as long as any of its threads runs, even if its main thread has ended. Raises
    OSError if the kernel cannot show it: no file descriptor or memory is free.
    """
    try:
        return _native.start_ticks(pid)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"/proc/{pid}/stat") from None


def cpu_s(pid: int) -> float:
    """Return the processor time (s) of a process and of its children that have ended.

    0 if there is no such process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    # The second field is the program's name in parentheses and may hold blanks and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def tree_cpu_s(pid: int) -> float:
    """Return the processor time (s) of a process and of all below it, ended or not.

    0 if there is no such process.
    """
    total, left = 0.0, [pid]
    while left:
        one = left.pop()
        total += cpu_s(one)
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                left += map(int, thread.read_text().split())
    return total


def private_bytes(pid: int) -> int:
    """Return the private memory of a process (bytes); 0 if there is no such process.

    What forks share until one of them writes to it is not private.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in text.splitlines() if line.startswith("Private_")]
    return sum(int(words[1]) << 10 for words in lines)


def signal_name(number: int) -> str:
    """SIGKILL, say; real-time signals have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def alive(pid: int, start: int) -> bool:
    """Return whether this very process still runs: any thread of it. A zombie does not.

    True if the kernel cannot show it: no process may be replaced for that.
    """
    try:
        return pid > 0 and start > 0 and start_ticks(pid) == start
    except OSError:
        return True


def is_suspended(pid: int) -> bool:
    """Return whether the process and one it descends from are stopped, as by Ctrl-Z."""
    here, *above = map(_is_stopped, ancestors(pid))
    return here and any(above)


def _is_stopped(pid: int) -> bool:
    return _status(pid, "State")[:1] == ["T"]


def namespace() -> int:
    """Return the inode of this process' pid namespace. A pid identifies a process only there."""
    return Path("/proc/self/ns/pid").stat().st_ino


def check_proc() -> None:
    """Raise UsageError unless /proc shows this process under its own pid."""
    try:
        shown = str(Path("/proc/self").readlink())
    except OSError:
        shown = ""
    if shown != str(os.getpid()):
        raise UsageError(
            "/proc does not show this pid namespace, so processes cannot be identified: mount it "
            "there (unshare --mount-proc)"
        )


def owner(pid: int) -> int | None:
    """Effective user of a process; None if there is no such process."""
    found = _status(pid, "Uid")
    return int(found[1]) if found else None


def ancestors(pid: int) -> Iterator[int]:
    """Yield the process, its parent and so on, up to the first process of this pid namespace."""
    while pid > 0:
        yield pid
        pid = int(next(iter(_status(pid, "PPid")), 0))


def is_deeper(pid: int) -> bool:
    """Return whether the process is in a pid namespace below, where our pids have no meaning."""
    return len(_status(pid, "NSpid")) > 1


def maps(pid: int, device: int, inode: int) -> bool:
    """Return whether the process has this file mapped. True even if that is unknown.

    A process that is just ending shows no mappings, and counts as one that has the file mapped.
    """
    try:
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return True
    wanted = f" {os.major(device):02x}:{os.minor(device):02x} {inode} "
    return not text or wanted.encode() in text


def _status(pid: int, field: str) -> list[str]:
    """Return the values of a line of /proc/PID/status; none if there is no such process or line."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(f"{field}:")), [])


def gone(pidfd: int, timeout_s: float) -> bool:
    """Wait for the death of a process; False if it lives on."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def forbid_core_dump() -> None:
    """Disable this process' core dump, which would delay the detection of its death.

    The limit is 1 byte: at 0 the kernel still starts a program that core dumps are piped to.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (min(1, hard) if hard >= 0 else 1, hard))


OOM_SCORE = Path("/proc/self/oom_score_adj")
_scores: dict[int, str] = {}  # of this process before end_last(), by its pid


def end_first() -> None:
    """Make the kernel kill this process before others if memory runs out."""
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("1000")


def end_last() -> None:
    """Make the kernel kill this process as late as possible without a privilege."""
    with contextlib.suppress(OSError, ValueError):
        before = OOM_SCORE.read_text().strip()
        _scores[os.getpid()] = before
        for wanted in range(0, int(before), 100):
            with contextlib.suppress(PermissionError):
                OOM_SCORE.write_text(str(wanted))
                return


def kill_group(leader: int) -> None:
    """Kill the process group that a child leads, such as a learner with its data loader's workers.

    The child must not have been reaped: after that, another process may have its pid. What has
    ended, or is another user's, is left alone.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_group_of(pidfd: int, pid: int, start: int) -> None:
    """Kill the process group that a process leads or has led; a child must not have been reaped."""
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, PIDFD_SIGNAL_PROCESS_GROUP)
    except (ProcessLookupError, PermissionError):
        pass
    except OSError:  # Linux before 6.9. As long as the group exists, no other process has the pid.
        if start_ticks(pid) in (0, start):
            kill_group(pid)


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended. It is not reaped: its pid remains its own."""
    if child.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # this program reaps all its children itself, or ignores SIGCHLD
        return child.poll() is not None


def send_signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a child. Popen's own methods would reap a child that has ended."""
    if not has_ended(child):
        with contextlib.suppress(ProcessLookupError):  # where SIGCHLD is ignored
            os.kill(child.pid, number)


def end_group(child: subprocess.Popen[bytes]) -> int:
    """Kill the process group that a child leads, ended or not; return the child's exit code."""
    if child.returncode is None:
        kill_group(child.pid)
    return child.wait()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this installation: `python -P -m MODULE`.

    Without -P, Python would look in the current directory first, and would find a source tree that
    lies there instead of the installed package.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


LAUNCHER = Path(_native.__file__).with_name("_launcher")
"""A program of C (native/launcher.c) that becomes a child which dies with its parent."""


def die_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Let this process get signal `how` when the thread that forked it ends."""
    _native.die_with_parent(how)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


_Start = tuple[Future[Any], Callable[[], Any], set[int]]
"""A start that a thread waits for: its result, the call, the signals that the thread blocks."""


class _Starter:
    """A thread that starts children for other threads, and ends with its process.

    The kernel sends a child the signal when the thread ends that has started the child.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._locks: dict[int, threading.Lock] = {}  # by process: a fork may copy one that is held
        self._wanted: queue.SimpleQueue[_Start]

    def call(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Call `start` in the thread; raise what it raises.

        The child blocks the signals that the caller blocks.
        """
        future: Future[subprocess.Popen[bytes]] = Future()
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if self._pid != os.getpid():  # a fork has no other threads than its first one
                wanted: queue.SimpleQueue[_Start] = queue.SimpleQueue()
                try:
                    threading.Thread(target=self._run, args=(wanted,), daemon=True).start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from None
                self._pid, self._wanted = os.getpid(), wanted
        self._wanted.put((future, start, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        return future.result()

    @staticmethod
    def _run(wanted: queue.SimpleQueue[_Start]) -> None:
        while True:
            # A signal that all other threads block must not be handled here.
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            future, start, blocked = wanted.get()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)
            del future, start  # the result holds pipes


_STARTER = _Starter()


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: int | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    how: int | None = signal.SIGKILL,
    protected: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a child that dies with this process, in a process group of its own. Raises OSError.

    how: signal that it gets then; None: it lives on. protected: whether the kernel, if memory runs
    out, treats it as this process, also after end_last(). In a group of its own the child does not
    get the terminal's Ctrl-C: the parent ends it.
    """
    score = "" if protected else _scores.get(os.getpid(), "")

    def start(words: Sequence[str], *more: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(words),
            env=None if env is None else dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(*pass_fds, *more),
            process_group=0,
        )

    if how is None and not (score and LAUNCHER.exists()):  # gone after an upgrade
        return start(command)
    errors, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        words = [str(LAUNCHER), str(int(how or 0)), str(os.getpid()), score, str(theirs), *command]
        if how is None or threading.current_thread() is threading.main_thread():
            child = start(words, theirs)
        else:
            child = _STARTER.call(lambda: start(words, theirs))
    except BaseException:
        os.close(errors)
        raise
    finally:
        os.close(theirs)
    try:
        with open(errors, "rb") as pipe:
            why = pipe.read()  # ends when the program begins
    except BaseException:  # a signal's: nobody would have the child
        end_group(child)
        raise
    if why:
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()
        child.wait()
        number = int.from_bytes(why, sys.byteorder)
        raise OSError(number, os.strerror(number), command[0])
    return child


def allow_files(wanted: int) -> None:
    """Raise this process's soft limit of open files to `wanted`, or to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
