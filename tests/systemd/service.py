"""The installed units in a booted systemd, and one job with learners outside of its unit."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

from booted import Booted
from support import PATIENCE_S, eventually

LEARNER = Path(__file__).with_name("learner.py")
JOB = """\
standby = true
[optimizer]
kind = "sgd"
lr = 1.0
[checkpoint]
every_s = 0
[[tensors]]
name = "w"
shape = [1024]
"""
ENVIRONMENT = (
    "GADEI_PS_RUNTIME_DIR=/run/gadei-ps",
    "GADEI_PS_STATE_DIR=/var/lib/gadei-ps",
    "NUMBA_CACHE_DIR=/var/cache",
)
PAM = "account required pam_permit.so\nsession required pam_systemd.so class=user\n"
USER = "gadei-ps"
KERNELS = "/var/cache/kernels"
PROGRAM = Path(sys.executable).with_name("gadei-ps")


def become(user: str) -> tuple[str, ...]:
    """The beginning of a command that runs as this user; inside, there may be no sudo."""
    group = "65534" if user == "nobody" else user  # its name differs from system to system
    return ("setpriv", f"--reuid={user}", f"--regid={group}", "--init-groups")


def learner(job: str, file: str) -> tuple[object, ...]:
    """The command of a learner that writes what it has done into this file."""
    return (sys.executable, LEARNER, job, file)


def install(manager: Booted) -> None:
    """Install the units and do what install-unit says is next, without the job."""
    report = json.loads(manager.do(PROGRAM, "install-unit", "--system", "--json"))
    *before, start = report["next"]
    assert "enable" in start
    manager.do("cp", "-r", "/var/cache/gadei-ps", KERNELS)
    for command in before:
        manager.do("sh", "-c", command)
    give_kernels(manager, USER)


def give_kernels(manager: Booted, user: str) -> None:
    """Those that were compiled before the boot, as if this user had done it."""
    manager.do("rm", "-rf", "/var/cache/gadei-ps")
    manager.do("cp", "-r", KERNELS, "/var/cache/gadei-ps")
    manager.do("chown", "-R", f"{user}:", "/var/cache/gadei-ps")
    manager.do("chmod", "700", "/var/cache/gadei-ps")


def add_user(manager: Booted, name: str) -> int:
    """An ordinary one, whose memory logind removes at its logout; returns the uid."""
    home = f"/var/{name}"
    manager.do("useradd", "--user-group", "--create-home", "--home-dir", home, name)
    return int(manager.do("id", "-u", name))


def login(user: str) -> tuple[str, ...]:
    """The beginning of a command that runs in a session of its own, of this user."""
    session = ("systemd-run", "--quiet", "--wait", "--collect", "-p", "PAMName=gadei-ps-test")
    return (*session, "-p", f"User={user}")


def logout(manager: Booted) -> None:
    """End all sessions with all that runs in them."""
    for line in manager.do("loginctl", "list-sessions", "--no-legend").splitlines():
        manager.run("loginctl", "terminate-session", line.split()[0])


def forget_users_at_once(manager: Booted) -> None:
    """logind ends what is left of a user 10 s after the last logout: not in tests."""
    manager.write("/etc/pam.d/gadei-ps-test", PAM)
    now = "[Login]\nUserStopDelaySec=0\n"
    manager.write("/etc/systemd/logind.conf.d/gadei-ps-test.conf", now)
    manager.do("systemctl", "restart", "systemd-logind")


class Service:
    """A job's unit."""

    def __init__(self, manager: Booted, name: str) -> None:
        self.manager, self.name = manager, name
        self.unit, self.end = f"gadei-ps@{name}.service", f"gadei-ps-end@{name}.service"
        self._users = itertools.cycle((USER, "root"))
        self._started = 0
        self.learners: list[tuple[str, subprocess.Popen[str]]] = []
        manager.write(f"/etc/gadei-ps/{name}.toml", JOB)

    def drop_in(self, text: str) -> None:
        self.manager.write(f"/etc/systemd/system/{self.unit}.d/test.conf", text)
        self.manager.do("systemctl", "daemon-reload")

    def systemctl(self, verb: str) -> str:
        return self.manager.do("systemctl", verb, self.unit)

    @property
    def state(self) -> str:
        return self.manager.show(self.unit, "ActiveState")

    @property
    def sub_state(self) -> str:
        return self.manager.show(self.unit, "SubState")

    def gadei_ps(self, *arguments: object, user: str = USER) -> subprocess.CompletedProcess[str]:
        return self.manager.run(*become(user), "env", *ENVIRONMENT, PROGRAM, *arguments)

    def status(self) -> dict[str, object]:
        done = self.gadei_ps("status", self.name, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def learn(self) -> None:
        """Start a learner outside of the unit, and wait until it pushes.

        The first one of a job runs as the job's user, the second one as root, and so on.
        """
        self._started += 1
        file = f"/tmp/{self.name}.{self._started}"
        command = (*become(next(self._users)), "env", *ENVIRONMENT, sys.executable, LEARNER)
        self.learners.append((file, self.manager.start(*command, self.name, file)))
        eventually(lambda: "pushed" in self.manager.run("cat", file).stdout)

    def learned(self) -> int:
        """Return the completed pushes of all learners, each of which has seen the stop."""
        total = 0
        for file, process in self.learners:
            process.wait(PATIENCE_S)
            last = self.manager.do("tail", "-n", "1", file).split()
            assert last[0] == "stopped", last
            total += int(last[1])
        self.learners.clear()
        return total

    def saved(self) -> int:
        """Return the gradients in the newest checkpoint."""
        names = self.manager.do("ls", f"/var/lib/gadei-ps/{self.name}").split()
        newest = max(name for name in names if name.startswith("checkpoint-"))
        path = f"/var/lib/gadei-ps/{self.name}/{newest}/manifest.json"
        counts = json.loads(self.manager.do("cat", path))["counts"]
        return int(counts["applied"])

    def attached(self) -> set[int]:
        """Return the pids of the learners."""
        found = self.status()["learners"]
        assert isinstance(found, list)
        return {int(one["pid"]) for one in found}

    def pids(self) -> list[int]:
        found = self.status()
        return [int(str(found[f"{who}_pid"])) for who in ("watchdog", "server", "standby")]

    def replaced(self, watchdog: int) -> None:
        """Wait until there is another watchdog than this one."""
        old = ("0", str(watchdog))
        eventually(
            lambda: self.state == "active" and self.manager.show(self.unit, "MainPID") not in old,
            what=self.said,
        )

    def kill(self, number: str, pid: int) -> None:
        self.manager.do("nsenter", "-t", "1", "-p", "kill", f"-{number}", pid)

    def kill_the_watchdog(self) -> None:
        self.kill("KILL", int(self.manager.show(self.unit, "MainPID")))

    def is_gone(self) -> None:
        """Nothing of it runs, and nothing is left in /dev/shm."""
        over = ("inactive", "failed")
        eventually(lambda: self.manager.show(self.end, "ActiveState") in over, what=self.said)
        assert self.state in over
        left = self.manager.run("pgrep", "-af", f"gadei_ps.*{self.name}").stdout.splitlines()
        assert not [line for line in left if "learner.py" not in line]
        assert self.name not in self.manager.do("ls", "/dev/shm")

    def said(self) -> str:
        return self.manager.journal("gadei-ps*")
