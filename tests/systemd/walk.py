"""A random walk of a job's unit, and what must hold after each step of it.

Learners count (counting.py): each adds ones to a value of its own, so the weights of a checkpoint
show how many gradients of each are in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import service
import versions
from booted import Booted
from counting import COUNTS, mapped
from lanes import Counted
from support import PATIENCE_S, eventually
from versions import OWN, UPGRADED

from gadei_ps.errors import ControlError, JobNotFound
from gadei_ps.job import control
from gadei_ps.storage import checkpoint

LEARNER = Path(__file__).with_name("counting.py")
ENVIRONMENT = ("GADEI_PS_RUNTIME_DIR=/run/gadei-ps", "GADEI_PS_STATE_DIR=/var/lib/gadei-ps")
LANES = 4096
JOB = service.JOB.replace("[1024]", f"[{LANES}]")
MOST_LEARNERS = 2
GUEST = "guest"  # an ordinary user, who may become the job's as with sudo
LOGIN = (*service.login(GUEST), "-p", "AmbientCapabilities=CAP_SETUID CAP_SETGID")
SETTLE_S = 3 * PATIENCE_S
COMPILE_S = 600.0  # for the first start of a version


class Walk:
    """One job, its learners, and what has been confirmed to them."""

    def __init__(self, manager: Booted, folder: Path, job: str, seed: int) -> None:
        self.manager, self.folder, self.job = manager, folder, job
        self.unit, self.end = f"gadei-ps@{job}.service", f"gadei-ps-end@{job}.service"
        self.chance = random.Random(seed)
        self.learners: list[Counted] = []
        self.confirmed = np.zeros(LANES, np.int64)  # by a stop or a checkpoint that has returned
        self.done: list[str] = []
        self.program = OWN  # which version the unit starts
        manager.write(f"/etc/gadei-ps/{job}.toml", JOB)
        service.forget_users_at_once(manager)
        service.add_user(manager, GUEST)
        self.uid = int(manager.do("id", "-u", service.USER))
        manager.do("systemctl", "enable", self.unit)

    # -- what there is --------------------------------------------------------------------------

    def states(self) -> tuple[str, str, str, str]:
        """Return the unit's active state, sub-state and result; active state of the end's unit."""
        asked = ("-p", "Id", "-p", "ActiveState", "-p", "SubState", "-p", "Result")
        output = self.manager.do("systemctl", "show", self.unit, self.end, *asked)
        one, two = (
            dict(line.split("=", 1) for line in part.splitlines())
            for part in output.strip().split("\n\n")
        )
        return one["ActiveState"], one["SubState"], one["Result"], two["ActiveState"]

    def ask(self, request: Any) -> dict[str, Any] | None:
        """The watchdog's answer; None if there is no watchdog."""
        path = f"/proc/{self.manager.pid}/root/run/gadei-ps/{self.job}.sock"
        with contextlib.suppress(JobNotFound, ControlError), control.Connection(path) as asked:
            return asked.request(request)
        return None

    def processes(self) -> dict[int, str]:
        """Those of the job inside, without learners: pids here, and command lines."""
        return {
            pid: text
            for pid, text in self._inside(self.job)
            if "gadei" in text and not any(word in text for word in (LEARNER.name, "systemctl"))
        }

    def _inside(self, words: str) -> Iterator[tuple[int, str]]:
        """Return pids here and command lines of processes inside that have these words."""
        inside = Path(f"/proc/{self.manager.pid}/ns/pid").readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (folder / "cmdline").read_text().replace("\0", " ")
                if words in text and (folder / "ns/pid").readlink() == inside:
                    yield int(folder.name), text.strip()

    def _pids(self, one: Counted) -> list[int]:
        """Return the pids of a learner, here; it may just start."""
        words = f"{LEARNER.name} {self.job} {one.lane} "

        def found() -> list[int]:
            return [pid for pid, text in self._inside(words) if LOGIN[0] not in text]

        pids: list[int] = eventually(found)
        return pids

    def segments(self) -> list[str]:
        found = (path.name for path in (self.folder / "shm").iterdir())
        return [name for name in found if self.job in name]

    def saved(self) -> np.ndarray:
        """Return gradients of each lane in the newest checkpoint, int64 (LANES,)."""
        folder = self.folder / "var/lib/gadei-ps" / self.job
        snapshot, _, problems = checkpoint.newest(folder)
        assert not problems, problems
        if snapshot is None:
            return np.zeros(LANES, np.int64)
        lanes = snapshot.weights[:LANES].astype(np.int64)
        assert lanes.sum() == snapshot.counts["applied"], "lost or doubled within a checkpoint"
        return lanes

    @property
    def living(self) -> list[Counted]:
        return [one for one in self.learners if not one.dead]

    # -- steps ----------------------------------------------------------------------------------

    def systemctl(self, verb: str, *flags: str) -> int:
        return self.manager.run("systemctl", verb, *flags, self.unit).returncode

    def start(self) -> None:
        self.manager.run("systemctl", "reset-failed", self.unit, self.end)
        asked = ("systemctl", "start", self.unit)
        assert self.manager.run(*asked, timeout_s=COMPILE_S).returncode == 0, self.said()
        assert self.settled() == "active"

    def stop(self) -> None:
        assert self.systemctl("stop") == 0
        assert self.settled() in ("inactive", "failed")

    def restart(self) -> None:
        self.manager.run("systemctl", "reset-failed", self.unit, self.end)
        before = {one.lane: one["left"] for one in self.living if one["attached"]}
        assert self.systemctl("restart") == 0
        assert self.settled() == "active", self.said()
        saved = self.saved()
        for one in self.living:
            if one.lane in before:
                eventually(lambda one=one: one["left"] > before[one.lane])
                assert saved[one.lane] == one["told"]
        self.confirm(saved)

    def reload(self) -> None:
        self.change()
        if self.states()[0] != "active":
            return
        assert self.systemctl("reload") == 0, self.said()
        # All of the file has been taken over.
        again = (*service.become(service.USER), "env", *ENVIRONMENT, OWN, "reload", "--json")
        report = json.loads(self.manager.do(*again, f"/etc/gadei-ps/{self.job}.toml"))
        assert report["changed"] == {}, report

    def change(self) -> None:
        """Half of the time, another job file, in what may change while counts stay exact."""
        if self.chance.random() < 0.5:
            keep, timeout_s = self.chance.randint(3, 9), self.chance.randint(30, 90)
            text = JOB.replace("[checkpoint]\n", f"[checkpoint]\nkeep = {keep}\n")
            text = f"learner_timeout_s = {timeout_s}\n{text}"
            self.manager.write(f"/etc/gadei-ps/{self.job}.toml", text)

    def checkpoint(self) -> None:
        if self.states()[0] != "active":
            return
        before = self.ask(control.Status())
        self.manager.do("env", *ENVIRONMENT, OWN, "checkpoint", self.job)
        assert before is not None
        saved = self.saved()
        assert saved.sum() >= before["version"]
        self.confirm(saved)

    def kill(self, *words: str) -> None:
        """words: of `watchdog`, `server` and `standby`."""
        status = self.ask(control.Status())
        if status is None:
            return
        inside = {int(status[f"{word}_pid"]) for word in words} - {0}
        here = [pid for pid in self.processes() if _pid_inside(pid) in inside]
        for pid in here:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_any(self) -> None:
        """Whatever of the job runs, by its process: also one that starts, stops or ends it."""
        found = list(self.processes())
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(found), signal.SIGKILL)

    def kill_a_learner(self) -> None:
        if self.living:
            one = self.chance.choice(self.living)
            for pid in self._pids(one):
                os.kill(pid, signal.SIGKILL)
            one.bury()

    def logout(self) -> None:
        """End all sessions of an ordinary user, and with them the learners started there.

        logind then removes what that user has in /dev/shm.
        """
        for one in self.living:
            self._pids(one)
        service.logout(self.manager)
        shown = ("loginctl", "show-user", GUEST)
        eventually(lambda: self.manager.run(*shown).returncode, SETTLE_S, self.said)
        for one in self.living:
            if one.session:
                one.bury()

    def learn(self) -> None:
        if len(self.living) >= MOST_LEARNERS:
            return
        lane = len(self.learners)
        name = f"/var/{self.job}.{lane}"
        counts = mapped(self.folder / name[1:])
        command = ("env", *ENVIRONMENT, sys.executable, LEARNER, self.job, lane, name)
        os.chown(self.folder / name[1:], self.uid, self.uid)
        session = self.chance.random() < 0.5
        user = service.USER if session or self.chance.random() < 0.5 else "root"
        before = (*(LOGIN if session else ()), *service.become(user))
        process = self.manager.start(*before, *command)
        self.learners.append(Counted(lane, process, counts, session))

    def boot(self, *, orderly: bool, memory: bool) -> None:
        """memory: /dev/shm stays, as in a container that has it from elsewhere."""
        running = self.states()[0] == "active"
        before = self.ask(control.Status())
        self.manager.halt(orderly=orderly)
        for one in self.living:
            one.bury()
        saved = self.saved()
        if orderly:
            assert not self.segments()
            if running and before is not None:
                assert saved.sum() >= before["version"]
            self.exact(saved)
        elif not memory:
            assert (saved >= self.confirmed).all()
            for one in self.learners:
                assert saved[one.lane] <= one.high
                one.low = one.high = int(saved[one.lane])
        if not memory:
            for path in (self.folder / "shm").iterdir():
                path.unlink()
        self.manager.boot()
        eventually(lambda: self.states()[0] == "active", SETTLE_S, self.said)
        assert self.settled() == "active"

    def upgrade(self) -> None:
        """Change to the other version, or back: by a restart, a stop, or without an orderly end."""
        self.program = UPGRADED if self.program == OWN else OWN
        self._write("unit", self.unit, versions.of_unit(self.program))
        how = self.chance.choice(("restart", "stop", "kill watchdog", "kill all"))
        self.done.append(f"to {self.program} with {how}")
        if self.states()[0] != "active" or how == "stop":
            self.stop()
        elif how == "restart":
            self.manager.run("systemctl", "reset-failed", self.unit, self.end)
            asked = ("systemctl", "restart", self.unit)
            assert self.manager.run(*asked, timeout_s=COMPILE_S).returncode == 0, self.said()
        else:
            # The new version refuses the memory, and the end's unit, still of the old one, ends it.
            self.kill("watchdog", *(("server", "standby") if how == "kill all" else ()))
            eventually(lambda: self.states()[0] == "failed", SETTLE_S, self.said)
            assert self.settled() == "failed"
            assert not self.processes(), (self.processes(), self.said())
            assert not self.segments(), (self.segments(), self.said())
            self.exact(self.saved())
        self._write("end", self.end, versions.of_end(self.program))
        self.start()
        main = self.manager.show(self.unit, "MainPID")
        assert str(self.program.parent) in self.manager.do("cat", f"/proc/{main}/cmdline")

    def _write(self, name: str, unit: str, text: str) -> None:
        """A drop-in."""
        self.manager.write(f"/etc/systemd/system/{unit}.d/{name}.conf", text)
        self.manager.do("systemctl", "daemon-reload")

    def during(self, verb: str, disturb: Callable[[], None]) -> None:
        """Something happens while systemctl does something. What it has confirmed is true."""
        if verb != "stop":
            self.manager.run("systemctl", "reset-failed", self.unit, self.end)
        if verb == "reload":
            self.change()
        process = self.manager.start("systemctl", verb, self.unit)
        time.sleep(self.chance.random() * self.chance.choice((0.1, 1.0, 4.0)))
        disturb()
        code = process.wait(SETTLE_S)
        # A watchdog that is killed afterwards is started again: after reset-failed, no limit of
        # starts is near.
        if verb in ("start", "restart") and code == 0:
            assert self.settled() == "active", self.said()

    # -- what must hold -------------------------------------------------------------------------

    def settled(self) -> str:
        """Wait until systemd has nothing to do for the job; return the unit's state."""
        last: list[object] = [None]

        def still() -> bool:
            now = self.states()
            jobs = self.manager.run("systemctl", "list-jobs", "--no-legend").stdout
            steady = now[1] in ("running", "dead", "failed") and "gadei-ps" not in jobs
            if now[0] != "active":
                steady = steady and now[3] in ("inactive", "failed")
            before, last[0] = last[0], now
            return steady and before == now

        eventually(still, SETTLE_S, self.said)
        return self.states()[0]

    def exact(self, saved: np.ndarray) -> None:
        """Nobody is attached: what was reported to each learner is what the checkpoint has."""
        for one in self.learners:
            if one.dead:
                assert one.low <= saved[one.lane] <= one.high, self.tell(one, saved)
                one.low = one.high = int(saved[one.lane])
            else:
                eventually(lambda one=one: not one["attached"], what=self.said)
                assert saved[one.lane] == one["told"] == one["begun"], self.tell(one, saved)
        self.confirm(saved)

    def confirm(self, saved: np.ndarray) -> None:
        assert (saved >= self.confirmed).all(), "a confirmed gradient is lost"
        for one in self.learners:
            assert saved[one.lane] <= (one.high if one.dead else one["begun"])
        self.confirmed = saved

    def tell(self, one: Counted, saved: np.ndarray) -> str:
        counts = {name: one[name] for name in COUNTS}
        return f"lane {one.lane}: saved {saved[one.lane]}, {counts}, {one.low}-{one.high}"

    def check(self) -> None:
        """The unit's state is true."""
        state, _, result, end = self.states()
        if self.settled() == "active":
            assert end == "active", end
            eventually(lambda: self.ask(control.Status()), what=self.said)
            for one in self.living:
                before = one["returned"]
                eventually(lambda one=one, before=before: one["returned"] > before, what=self.said)
            return
        assert result in ("success", "signal", "start-limit-hit"), (state, result, self.said())
        assert not self.processes(), (self.processes(), self.said())
        assert not self.segments(), (self.segments(), self.said())
        self.exact(self.saved())

    def said(self) -> str:
        units = ("-u", self.unit, "-u", self.end)
        text = self.manager.run("journalctl", "--no-pager", "-b", "-n", 60, *units).stdout
        return f"{self.done[-10:]}, {self.states()}\n{text}"

    def step(self) -> str:
        """One random step, and the look afterwards. Returns what was done."""
        steps: list[tuple[float, str, Callable[[], object]]] = [
            (2, "start", self.start),
            (2, "stop", self.stop),
            (1, "restart", self.restart),
            (0.5, "reload", self.reload),
            (2, "checkpoint", self.checkpoint),
            (1, "kill watchdog", lambda: self.kill("watchdog")),
            (1, "kill server", lambda: self.kill("server")),
            (1, "kill standby", lambda: self.kill("standby")),
            (1, "kill servers", lambda: self.kill("server", "standby")),
            (1, "kill all", lambda: self.kill("watchdog", "server", "standby")),
            (1, "kill learner", self.kill_a_learner),
            (1, "logout", self.logout),
            (1, "upgrade", self.upgrade),
            (0.5, "daemon-reexec", lambda: self.manager.do("systemctl", "daemon-reexec")),
            (0.5, "daemon-reload", lambda: self.manager.do("systemctl", "daemon-reload")),
            (0.5, "reboot", lambda: self.boot(orderly=True, memory=False)),
            (0.5, "container again", lambda: self.boot(orderly=True, memory=True)),
            (0.7, "power cut", lambda: self.boot(orderly=False, memory=False)),
            (0.7, "container killed", lambda: self.boot(orderly=False, memory=True)),
        ]
        disturbances: dict[str, Callable[[], None]] = {
            "kill any": self.kill_any,
            "kill watchdog": lambda: self.kill("watchdog"),
            "kill server": lambda: self.kill("server"),
            "kill all": lambda: self.kill("watchdog", "server", "standby"),
            "daemon-reexec": lambda: void(self.manager.do("systemctl", "daemon-reexec")),
        }
        for verb in ("start", "stop", "restart", "reload"):
            for name, disturb in disturbances.items():

                def both(verb: str = verb, disturb: Callable[[], None] = disturb) -> None:
                    self.during(verb, disturb)

                steps.append((0.6 if verb == "stop" else 0.2, f"{verb} and {name}", both))

        def stop_dead() -> None:
            self.kill("watchdog")
            self.during("stop", self.kill_any if self.chance.random() < 0.5 else lambda: None)

        steps.append((1.5, "kill watchdog, stop", stop_dead))
        idle = self.states()[0] != "active"  # then most of it would do nothing
        weights = [
            weight / 10
            if idle and name.startswith(("stop", "reload", "check", "kill", "log"))
            else weight
            for weight, name, _ in steps
        ]
        _, name, do = self.chance.choices(steps, weights)[0]
        self.done.append(name)
        do()
        self.check()
        self.learn()
        self.check()
        return name

    def finish(self) -> int:
        """The last stop; returns how many gradients have been confirmed in all."""
        self.start()
        self.check()
        self.stop()
        self.check()
        return int(self.confirmed.sum())


def void(_: object) -> None:
    """Forget a value."""


def _pid_inside(pid: int) -> int:
    """A process's id in its own pid namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0
