"""The identity of a process, and children that die with their parent."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support import PATIENCE_S, Child, eventually

from gadei_ps.machine import ownership, process

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


def test_a_process_is_its_pid_and_start() -> None:
    me, start = os.getpid(), process.start_ticks(os.getpid())
    assert start > 0
    assert process.alive(me, start)
    assert not process.alive(me, start + 1)
    assert not process.alive(me, 0)
    assert not process.alive(0, start)
    assert not process.alive(-1, start)
    assert process.start_ticks(2**22 + 1) == 0


def test_signals_by_name() -> None:
    assert process.signal_name(signal.SIGKILL) == "SIGKILL"
    assert process.signal_name(40) == "signal 40"


def test_groups_are_killed_with_their_leader() -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    pause = "; import signal; signal.pause()"
    leader = process.spawn([sys.executable, "-c", script + pause], stdout=subprocess.PIPE)
    assert leader.stdout
    follower = int(leader.stdout.readline())
    process.kill_group(leader.pid)
    leader.communicate()
    eventually(lambda: not process.start_ticks(follower))
    process.kill_group(leader.pid)  # it is gone: no error


BY_PID = {  # files that signal by number: their own process, or children that they have not reaped
    "gadei_ps/machine/foreground.py",
    "gadei_ps/machine/launch.py",
    "gadei_ps/machine/process.py",
    "gadei_ps/server/fork_server.py",
    "watchdog/__main__.py",
}
OLD = {"gadei_ps/replicas"}


def test_other_processes_are_signalled_through_pidfds() -> None:
    """A pid may be another process' by then."""
    root = Path(__file__).resolve().parents[2]
    product = [
        one for name in ("gadei_ps", "watchdog", "learners") for one in (root / name).rglob("*.py")
    ]
    found = {
        str(one.relative_to(root))
        for one in product
        if re.search(r"\bos\.kill(pg)?\(|\bpsutil\.Process\(.*\.kill\(", one.read_text())
    }
    assert {one for one in found if not one.startswith(tuple(OLD))} == BY_PID


def test_processor_time() -> None:
    before = process.cpu_s(os.getpid())
    assert before > 0
    eventually(lambda: sum(range(10_000)) and process.cpu_s(os.getpid()) > before)
    child = process.spawn(SLEEPER)
    child.kill()
    child.wait()
    assert process.cpu_s(child.pid) == 0


def test_modules_are_not_looked_for_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "gadei_ps").mkdir()
    (tmp_path / "gadei_ps" / "__main__.py").write_text("raise SystemExit('the wrong one')")
    (tmp_path / "gadei_ps" / "__init__.py").touch()
    command = process.module_command("gadei_ps", "--version")
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_names_of_programs_may_be_anything() -> None:
    """The second field of /proc/PID/stat holds blanks and parentheses as they are."""
    script = (
        "import ctypes, signal; ctypes.CDLL(None).prctl(15, b') S 1 (', 0, 0, 0);"
        "print(flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert child.stdout
        child.stdout.readline()
        start = process.start_ticks(child.pid)
        assert abs(start - process.start_ticks(os.getpid())) < 10**6
        assert process.alive(child.pid, start)
    finally:
        child.kill()
        child.communicate()


def test_a_zombie_does_not_live() -> None:
    child = process.spawn(SLEEPER)
    start = process.start_ticks(child.pid)
    assert process.alive(child.pid, start)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.alive(child.pid, start)
    child.wait()


def test_a_process_whose_main_thread_has_ended_lives() -> None:
    """Let its first thread become a zombie; the others run on."""
    script = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.readline).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    try:
        start = process.start_ticks(child.pid)
        stat = Path(f"/proc/{child.pid}/stat")
        eventually(lambda: stat.read_text().rpartition(") ")[2].startswith("Z"))
        assert process.start_ticks(child.pid) == start > 0
        assert process.alive(child.pid, start)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.alive(child.pid, start)
    finally:
        child.kill()
        child.communicate()


def _parent(pipe: Connection, how: int) -> None:
    child = process.spawn(SLEEPER, how=how)
    pipe.send((child.pid, process.start_ticks(child.pid)))
    pipe.recv()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_die_with_their_parent(how: int) -> None:
    parent = Child(_parent, how)
    pid, start = parent.receive()
    assert process.alive(pid, start)
    parent.kill()
    eventually(lambda: not process.alive(pid, start))


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    words = [str(process.LAUNCHER), "9", "1", "", "2", sys.executable, "-c", "print('began')"]
    ended = subprocess.run(words, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_child_lives_on_when_the_thread_ends_that_has_started_it() -> None:
    children: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: children.append(process.spawn(SLEEPER)))
    thread.start()
    thread.join()
    tasks = Path("/proc/self/task")
    eventually(lambda: not (tasks / str(thread.native_id)).exists())
    with children[0] as child:
        start = process.start_ticks(child.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.2)
        assert process.alive(child.pid, start)
        child.kill()


@pytest.mark.parametrize("how", [None, signal.SIGKILL])
def test_a_program_that_does_not_exist_is_named(how: int | None) -> None:
    gc.collect()  # else what other tests have left may be closed meanwhile
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError) as error:
        process.spawn(["no-such-program", "-m"], how=how, stdout=subprocess.PIPE)
    assert error.value.filename == "no-such-program"
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_a_script_is_not_given_to_the_shell(tmp_path: Path) -> None:
    script = tmp_path / "no-such-script"
    script.write_text("import os\n")
    script.chmod(0o700)
    path = {"PATH": f"/nowhere::{tmp_path}:/bin"}
    for name in (str(script), script.name):
        with pytest.raises(OSError, match="Exec format error"):
            process.spawn([name], env=path)
    assert process.spawn(["true"], env=path).wait() == 0


def test_a_child_has_no_descriptor_but_its_own() -> None:
    show = [sys.executable, "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"]
    child = process.spawn(show, stdout=subprocess.PIPE)
    assert child.communicate()[0] == b"[0, 1, 2, 3]\n"  # 3: of listdir


def _children_of_a_protected_process(pipe: Connection) -> None:
    process.OOM_SCORE.write_text("300")
    process.end_last()
    show = ["cat", str(process.OOM_SCORE)]
    for how in (None, signal.SIGKILL):
        for protected in (True, False):
            child = process.spawn(show, stdout=subprocess.PIPE, how=how, protected=protected)
            pipe.send(int(child.communicate()[0]))


def test_protection_against_a_lack_of_memory_is_not_inherited_by_others() -> None:
    parent = Child(_children_of_a_protected_process)
    for _ in range(2):
        low, own_score = parent.receive(), parent.receive()
        assert low < own_score == 300
    parent.kill()


def test_a_spawned_child_is_on_its_own() -> None:
    """Neither the terminal's Ctrl-C nor what we read from it is the child's."""
    script = "import os, sys; print(os.getpgid(0) == os.getpid(), sys.stdin.read() == '')"
    child = process.spawn([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    assert child.communicate()[0] == b"True True\n"


def test_a_process_whose_user_is_not_told_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a watchdog short of descriptors would replace a server that lives."""
    pid, start = os.getpid(), process.start_ticks(os.getpid())
    opened = ownership.open_process(pid, start)
    assert opened is not None
    os.close(opened)
    read = Path.read_text

    def full(path: Path, *how: object, **more: object) -> str:
        if path.name == "status":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return read(path, *how, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", full)
    gc.collect()  # else what other tests have left may be closed meanwhile
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="cannot find the owner of process"):
        ownership.open_process(pid, start)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert ownership.open_process(pid, start + 1) is None


def test_a_thread_that_cannot_be_started_stops_one_start_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starter = process._Starter()

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            starter.call(lambda: subprocess.Popen(["true"]))
    assert starter.call(lambda: subprocess.Popen(["true"])).wait() == 0


def test_a_child_has_the_signal_mask_of_its_caller() -> None:
    """Whichever caller was the first one, and whatever it had blocked."""
    starter = process._Starter()
    show = "import signal; print([int(one) for one in signal.pthread_sigmask(0, [])])"
    shown: list[str] = []

    def start(blocked: set[int]) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        child = starter.call(
            lambda: subprocess.Popen([sys.executable, "-c", show], stdout=subprocess.PIPE)
        )
        shown.append(child.communicate()[0].decode().strip())

    for blocked in ({signal.SIGTERM}, set[int](), {signal.SIGUSR1}):
        thread = threading.Thread(target=start, args=(blocked,))
        thread.start()
        thread.join()
    assert shown == [f"[{int(signal.SIGTERM)}]", "[]", f"[{int(signal.SIGUSR1)}]"]


def test_a_fork_beside_a_start_can_start_children() -> None:
    """The fork has a lock that another thread held, and not the thread that would release it."""
    begun, released = threading.Event(), threading.Event()

    class Slow(threading.Thread):
        def start(self) -> None:
            begun.set()
            released.wait(PATIENCE_S)
            super().start()

    starter = process._Starter()
    first = threading.Thread(target=lambda: starter.call(lambda: subprocess.Popen(["true"])).wait())
    with pytest.MonkeyPatch.context() as slowly:
        slowly.setattr(process.threading, "Thread", Slow)  # of the starter
        first.start()
        assert begun.wait(PATIENCE_S)
    if (pid := os.fork()) == 0:
        try:
            os._exit(starter.call(lambda: subprocess.Popen(["true"])).wait())
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        ended = process.gone(pidfd, PATIENCE_S)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        assert ended, "it waits for a lock that nobody releases"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(pidfd)
        released.set()
        first.join()


def test_a_signal_to_a_child_that_the_kernel_has_reaped() -> None:
    """Send one as for all children of a program whose caller ignores SIGCHLD."""
    program = (
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from gadei_ps.machine import process\n"
        "child = subprocess.Popen(['true'])\n"
        "while process.start_ticks(child.pid): time.sleep(0.01)\n"
        "process.send_signal(child, signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("name", "ends"), [(process.FOREIGN, ""), ("own", "ended\n")])
def test_the_end_with_a_thread_that_waits(name: str, ends: str) -> None:
    """Wait in a library of C++ whose objects the interpreter's end destroys: it would crash."""
    script = (
        "import atexit, sys, threading\n"
        "from gadei_ps.machine import process\n"
        f"wait = threading.Thread(target=threading.Event().wait, name={name!r}, daemon=True)\n"
        "wait.start()\n"
        "atexit.register(print, 'ended')\n"
        "print('reported')\n"
        "process.leave(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, f"reported\n{ends}", "")
