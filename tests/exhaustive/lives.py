"""Lives of a job in which one call of one of its processes fails; see test_failing_calls.py.

Run with faults.c preloaded. Each line of standard input names the scene, the role, the kind of
call, its number (0: none fails, and all are listed) and the error. A fork lives that life; the
answer says what failed, and all that is wrong. Scenes: `life` is a job from its start to its end,
with two learners and a checkpoint. In `adopted` a watchdog and a learner have died, in `taken over`
the active server, and in `orphaned` a watchdog; there, calls count from the death on. `forked` is a
life with a fork server, and `replaced` is `taken over` with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import Child, QuickDaemon, config, eventually, live_weights, quick, status
from support.processes import children

from gadei_ps.commands import jobs
from gadei_ps.errors import GadeiError
from gadei_ps.job.faults import Processes
from gadei_ps.learners.client import Client
from gadei_ps.machine import process
from gadei_ps.memory import presence
from gadei_ps.server import manager
from gadei_ps.storage import checkpoint

ROLES = ("", "watchdog", "server", "checkpoint-writer", "learner", "command", "fork-server")
PROGRAMS = {
    "gadei_ps.watchdog.__main__": "watchdog",
    "gadei_ps.server.manager": "server",
    "gadei_ps.server.fork_server": "fork-server",
    "gadei_ps.watchdog.checkpoint_writer": "checkpoint-writer",
    "gadei_ps.cli.app": "command",
}
KINDS = (
    *("open", "mmap", "ftruncate", "fallocate", "fsync", "rename", "read", "write"),
    *("pidfd_open", "clone", "vfork", "opendir", "sendmsg", "recvmsg"),
)
WITH_FORK_SERVER = ("forked", "replaced")  # scenes of a job with a fork server
PR_SET_CHILD_SUBREAPER = 36
VALUES = 304  # as the model is padded
PUSHES = 3
LIFE_S = 60.0
SPAWN = process.spawn  # before forks are in its place
SERVE = manager.main
shim = ctypes.CDLL(None)
shim.counts_failed.restype = ctypes.c_char_p
shim.counts_all.restype = ctypes.c_char_p
shim.counts_seen.restype = ctypes.c_long


def become(role: str) -> None:
    """The calling process has this role."""
    shim.counts_role(ROLES.index(role))


def _serve() -> None:
    """Become a server, in a fork of the fork server."""
    become("server")
    SERVE()


def _in_roles(main: Callable[[str], int]) -> Callable[[str], int]:
    def bits(module: str) -> int:
        if Life.programs and PROGRAMS.get(module) == "watchdog":
            process.spawn = SPAWN
        become(PROGRAMS.get(module, ""))
        if PROGRAMS.get(module) == "fork-server":
            manager.main = _serve
        return main(module)

    return bits


def _learn(pipe: Connection, job: str) -> None:
    """Push ones; send the error, and how many gradients it has published."""
    become("learner")
    client = None
    wrong = ""
    try:
        client = Client(job)
        for _ in range(PUSHES):
            client.push(np.ones(VALUES, np.float32), samples=1)
        client.pull(consistent=True)
    except (GadeiError, OSError) as error:
        wrong = f"{type(error).__name__}: {error}"
    except BaseException:
        wrong = traceback.format_exc()
    published = 0
    if client is not None:
        published = client.published
        client.detach()
    become("")
    pipe.send((wrong, published))


def _stay(pipe: Connection, job: str) -> None:
    """A learner whose own calls do not fail: pushes as many ones as ordered; 0: detaches."""
    client = Client(job)
    pipe.send(client.row)
    while count := pipe.recv():
        for _ in range(count):
            client.push(np.ones(VALUES, np.float32), samples=1)
        client.pull(consistent=True)
        pipe.send(client.published)
    client.detach()
    pipe.send(client.published)


class Life:
    """One job from its start to its end."""

    programs = False  # the watchdog starts programs, not forks

    def __init__(self, directory: Path, scene: str, role: str, plan: Callable[[], None]) -> None:
        """plan: calls count from then on."""
        self.directory = directory
        self.scene = SCENES[scene]
        self.plan = plan
        self.job = f"t{os.getpid()}-calls"
        self.saved = directory / "saved"
        self.config = config(
            self.job,
            tensors=[{"name": "w", "shape": [VALUES]}],
            shards=1,
            standby=scene in ("taken over", "replaced"),
            checkpoint={"every_s": 0, "directory": str(self.saved)},
        )
        self.commands = role == "command" and scene == "life"
        self.daemon = QuickDaemon(self.config)
        self.total = 0
        self.alone = False  # no watchdog is to be there
        self.wrong: list[str] = []
        self.said: list[str] = []

    def life(self) -> None:
        self.plan()
        self.twice("start", self._start)
        for _ in range(2):
            self.twice("learner", self._teach)

    def adopted(self) -> None:
        self.twice("start", self._start)
        stays, dies = self._hire(), self._hire()
        self._push(dies)
        watchdog = self.daemon._process
        assert watchdog is not None
        watchdog.kill()
        watchdog.wait()
        self._push(stays)
        dies.kill()
        self.plan()
        self.twice("start", self._start)
        self._push(stays)
        self._dismiss(stays)

    def taken_over(self) -> None:
        self.twice("start", self._start)
        processes = Processes(self.job)
        first = eventually(lambda: processes.server(ready=True), LIFE_S)
        second = eventually(processes.standby, LIFE_S)
        one = self._hire()
        self._push(one)
        self.plan()
        os.kill(first.pid, signal.SIGKILL)
        self._push(one)

        def replaced() -> bool:
            self._watch()
            third = processes.standby()
            return third is not None and third.pid not in (first.pid, second.pid)

        eventually(replaced, LIFE_S, "no other standby")
        self._push(one)
        self._dismiss(one)

    def orphaned(self) -> None:
        self.twice("start", self._start)
        one = self._hire()
        self._push(one)
        watchdog = self.daemon._process
        assert watchdog is not None
        watchdog.kill()
        watchdog.wait()
        self.alone = True
        self.plan()
        for words, code, says in (
            (["ls"], 0, "orphaned"),
            (["status", self.job], 1, "has lost its watchdog"),
            (["gc"], 0, ""),
            (["gc", self.job], 0, ""),
            (["stop", self.job], 1, "has no watchdog to write its last checkpoint"),
            (["trace", self.job, "--out", str(self.directory / "trace"), "--for", "1ms"], 0, "0 "),
            (["export", self.job, str(self.directory / "orphan.npz")], 0, "orphan.npz"),
        ):
            self.twice(words[0], lambda words=words, c=code, s=says: self._command(words, c, s))
        self.alone = False
        self.twice("start", self._start)
        self._push(one)
        self._dismiss(one)

    def _hire(self) -> Child:
        one = Child(_stay, self.job)
        one.receive(LIFE_S)
        return one

    def _push(self, one: Child) -> None:
        one.send(PUSHES)
        one.receive(LIFE_S)
        self.total += PUSHES

    def _dismiss(self, one: Child) -> None:
        self._watch()
        one.send(0)
        one.receive(LIFE_S)
        one.join()

    def live(self) -> None:
        self.scene(self)
        self._settle()
        if self.commands:
            out = str(self.directory / "out")
            for words, says in (
                (["status", self.job], self.job),
                (["status"], self.job),
                (["ls"], "running"),
                (["set", self.job, "sync=ssp:2"], "ssp"),
                (["trace", self.job, "--out", out, "--for", "1ms"], "0 run times"),
                (["kill", self.job, "--server", "--signal", "CONT"], "server"),
                (["attach", self.job, "--", "true"], ""),
                (["run", self.job, "--", "true"], "no learner joined"),
                (["checkpoint", self.job], "checkpoint of version"),
                (["export", self.job, f"{out}.npz"], "out.npz"),
                (["gc"], ""),
                (["gc", self.job], ""),
                (["stop", self.job, "--drain"], self.job),
            ):
                wanted = int(words[0] == "run")  # the program makes no learner
                self.twice(words[0], functools.partial(self._command, words, wanted, says))
        else:
            self.twice("checkpoint", lambda: jobs.checkpoint(self.job))
            self._settle()
            self.twice("stop", self._stop)
        snapshot, _, problems = checkpoint.newest(self.saved)
        if snapshot is None or problems or snapshot.version != self.total:
            self.wrong.append(f"saved: {problems}, not version {self.total}")
        elif (snapshot.weights[:VALUES] != -self.total).any():
            self.wrong.append(f"saved weights are {snapshot.weights[:3]}, not {-self.total}")
        self.daemon.end()
        if left := [one.name for one in presence.find() if one.job == self.job]:
            self.wrong.append(f"left in memory: {left}")
        if names := list(Path(os.environ["GADEI_PS_RUNTIME_DIR"]).iterdir()):
            self.wrong.append(f"left behind: {names}")

    def twice(self, what: str, do: Callable[[], object]) -> None:
        """Repeat it: what has failed once succeeds the second time."""
        for _ in range(3):
            try:
                do()
                return
            except (GadeiError, OSError) as error:
                self.said.append(f"{what}: {type(error).__name__}: {error}")
                if "\n" in str(error).strip():
                    self.wrong.append(f"{what}: {error}")
                if not what.startswith("start"):
                    self._watch()
        raise AssertionError(f"{what}: {self.said[-1]}")

    def _start(self) -> None:
        with quick.fork_quickly(fork_server=True):
            self.daemon._start(fresh=False)

    def _watch(self) -> None:
        """Start another watchdog if this one has ended, as systemd does."""
        process = self.daemon._process
        if process is None or self.alone or process.poll() is None:
            return
        self.said.append(f"the watchdog has ended with {process.returncode}")
        self.twice("start again", self._start)

    def _teach(self) -> None:
        child = Child(_learn, self.job)
        try:
            wrong, published = child.receive(LIFE_S)
        finally:
            child.kill()
        self.total += published
        if wrong:
            if "Traceback" in wrong:
                self.wrong.append(f"learner: {wrong}")
            raise GadeiError(wrong)

    def _settle(self) -> None:
        """Every gradient is applied once."""

        def settled() -> bool:
            self._watch()
            with contextlib.suppress(GadeiError):
                now = status(self.job)
                return now["version"] >= self.total and not now["learners"]
            return False

        eventually(settled, LIFE_S / 3, "not all gradients are applied")
        now = status(self.job)
        if now["version"] != self.total or (live_weights(self.job)[:VALUES] != -self.total).any():
            self.wrong.append(f"{self.total} gradients were pushed, {now['version']} are applied")

    def _command(self, words: list[str], wanted: int, says: str) -> None:
        """wanted: how it ends. says: a part of what it says then."""
        paths = [self.directory / name for name in ("stdout", "stderr")]
        with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
            child = quick.Forked(
                [sys.executable, "-P", "-m", "gadei_ps", *words], stdout=out, stderr=err
            )
            code = child.wait(LIFE_S)
        output, errors = [path.read_text() for path in paths]
        # Of the tests beside this one, not of this job.
        errors = re.sub("^.* has jobs elsewhere .*\n", "", errors, flags=re.MULTILINE)
        what = f"{words[0]} has ended with {code}: {errors}"
        lines = 1 + errors.count("left alone: ")  # gc names each file that it cannot open
        lines += errors.count("looked in ")  # gc, where it has removed nothing
        lines += 2 if words[0] == "run" else 0  # it says how it begins and how it has ended
        if code not in (0, 1, 2) or errors.count("\n") > lines or "internal error" in errors:
            self.wrong.append(what)
        if code and not errors:
            self.wrong.append(f"{what} nothing")
        if code == wanted and says in (errors if code else output):
            return
        if not code:
            self.wrong.append(f"{what} and printed: {output}")
        raise GadeiError(what)

    def _stop(self) -> None:
        process = self.daemon._process
        assert process is not None
        if process.poll() is not None:
            self._start()
        jobs.stop(self.job, drain=True, timeout_s=10.0)


SCENES = {
    "life": Life.life,
    "adopted": Life.adopted,
    "taken over": Life.taken_over,
    "orphaned": Life.orphaned,
    "forked": Life.life,
    "replaced": Life.taken_over,
}


def _live(asked: dict[str, Any]) -> dict[str, Any]:
    """Live in the fork."""
    directory = Path(tempfile.mkdtemp(prefix="gps-life-", dir="/dev/shm"))
    runtime = Path(tempfile.mkdtemp(prefix="gps-", dir="/dev/shm"))
    os.environ["GADEI_PS_RUNTIME_DIR"] = str(runtime)
    os.environ["GADEI_PS_STATE_DIR"] = str(directory / "state")
    shim.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    log = directory / "log"
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)

    def plan() -> None:
        shim.counts_plan(
            ROLES.index(asked["role"]),
            KINDS.index(asked["kind"]),
            ctypes.c_long(asked["number"]),
            asked["error"],
        )

    Life.programs = asked["programs"]
    life = Life(directory, asked["scene"], asked["role"], plan)
    try:
        life.live()
    except BaseException:
        life.wrong.append(traceback.format_exc())
        life.daemon.end()
    with contextlib.suppress(AssertionError):
        eventually(lambda: not children())
    if left := children():
        life.wrong.append(f"left running: {left}")
        for one in psutil.Process().children(recursive=True):
            one.kill()
    if life.wrong:  # it may have kept its memory
        with contextlib.suppress(GadeiError):
            jobs.drop(life.job)
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        life.wrong.append(text)
    shutil.rmtree(directory)
    shutil.rmtree(runtime)
    messages = life.said + [line for line in text.splitlines() if "error" in line]
    life.wrong += [f"no words for users: {line}" for line in messages if "[Errno" in line]
    if (calls := shim.counts_all()) is None:
        life.wrong.append("the list of calls is full (COUNTS_ROOM in faults.c)")
    return {
        "failed": shim.counts_failed().decode(errors="replace"),
        "seen": shim.counts_seen(),
        "calls": (calls or b"").decode(errors="replace").splitlines(),
        "wrong": life.wrong,
        "said": messages,
    }


def main() -> None:
    quick._main = _in_roles(quick._main)
    with quick.fork_quickly(fork_server=True):
        quick.load_commands()
        for line in sys.stdin:
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    os.close(read)
                    begin = time.monotonic()
                    asked = json.loads(line)
                    none = quick.without_fork_server()
                    with contextlib.nullcontext() if asked["scene"] in WITH_FORK_SERVER else none:
                        outcome = _live(asked)
                    outcome["seconds"] = time.monotonic() - begin
                    with os.fdopen(write, "wb") as answer:
                        answer.write(json.dumps(outcome).encode())
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as answer:
                print(answer.read().decode(), flush=True)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
