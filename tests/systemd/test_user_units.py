"""Units of an ordinary user, whose sessions end: with linger nothing is lost, without it jobs end.

logind is as it comes, with RemoveIPC=yes, except that a user's last logout is final at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import service
from booted import Booted
from service import JOB, LEARNER, PROGRAM, become
from support import PATIENCE_S, eventually

NAME = "alice"
ELSEWHERE = "/var/alice/sockets"


class Login:
    """An ordinary user, who may have a session."""

    def __init__(self, manager: Booted) -> None:
        self.manager = manager
        self.uid = service.add_user(manager, NAME)
        self.job = "mine"
        self._environment = (
            *("env", "-i", f"HOME=/var/{NAME}", "PATH=/usr/bin:/bin"),
            f"XDG_RUNTIME_DIR=/run/user/{self.uid}",
        )
        cache = f"/var/{NAME}/.cache"
        manager.do("mkdir", cache)
        manager.do("cp", "-r", "/var/cache/gadei-ps", cache)
        manager.do("chown", "-R", f"{NAME}:", cache)
        self._session: subprocess.Popen[str] | None = None

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self.manager.run(*become(NAME), *self._environment, *arguments)

    def do(self, *arguments: object) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """A process in no session and no unit of the user."""
        return self.manager.start(*become(NAME), *self._environment, *arguments)

    def login(self) -> None:
        self._session = self.manager.start(*service.login(NAME), "sleep", "infinity")
        eventually(lambda: self.run("systemctl", "--user", "is-system-running").returncode == 0)

    def logout(self) -> None:
        """Wait until logind has done what it does at the last one."""
        service.logout(self.manager)
        self.session_has_ended()
        lingers = "yes" in self.manager.run("loginctl", "show-user", NAME, "-p", "Linger").stdout
        if not lingers:
            shown = ("loginctl", "show-user", NAME)
            eventually(lambda: self.manager.run(*shown).returncode, 100, self.said)

    def session_has_ended(self) -> None:
        """Wait for it."""
        assert self._session is not None
        self._session.wait(PATIENCE_S)

    def said(self) -> str:
        return self.manager.do("journalctl", "--no-pager", "-n", "60", "-o", "cat")

    def status(self, *variables: str) -> dict[str, object]:
        done = self.run(*variables, PROGRAM, "status", self.job, "--json")
        found: dict[str, object] = json.loads(done.stdout)
        return found

    def saved(self) -> int:
        folder = f"/var/{NAME}/.local/state/gadei-ps/{self.job}"
        newest = max(one for one in self.do("ls", folder).split() if one.startswith("checkpoint-"))
        counts = json.loads(self.do("cat", f"{folder}/{newest}/manifest.json"))["counts"]
        return int(counts["applied"])

    def segments(self) -> list[str]:
        return [one for one in self.do("ls", "/dev/shm").split() if f".{self.uid}." in one]


@pytest.fixture
def alice(manager: Booted) -> Iterator[Login]:
    """Provide the installed units and a running job. The session ends with the test."""
    service.forget_users_at_once(manager)
    made = Login(manager)
    made.login()
    made.do(PROGRAM, "install-unit", "--user", "--job", made.job)
    manager.write(f"/var/{NAME}/.config/gadei-ps/{made.job}.toml", JOB)
    made.do("systemctl", "--user", "daemon-reload")
    made.do("systemctl", "--user", "start", f"gadei-ps@{made.job}")
    yield made
    manager.run("loginctl", "disable-linger", NAME)
    service.logout(manager)
    eventually(lambda: manager.run("loginctl", "show-user", NAME).returncode, 100)
    made.session_has_ended()
    manager.do("userdel", "--remove", NAME)


@pytest.mark.timeout(300)
def test_with_linger_a_logout_changes_nothing(alice: Login) -> None:
    """A reload of a changed file and the next login find the same job."""
    alice.manager.do("loginctl", "enable-linger", NAME)
    file = f"/var/{NAME}/count"
    learn = (sys.executable, LEARNER, alice.job, file)
    alice.do("systemd-run", "--user", "--quiet", "--unit", "learner", *learn)
    eventually(lambda: "pushed" in alice.run("cat", file).stdout, what=alice.said)
    before = alice.status()
    alice.logout()
    pushed = alice.do("tail", "-n", "1", file)
    eventually(lambda: alice.do("tail", "-n", "1", file) != pushed, what=alice.said)
    assert len(alice.segments()) == 4
    text = JOB.replace("every_s = 0", "every_gradients = 500")
    alice.manager.write(f"/var/{NAME}/.config/gadei-ps/{alice.job}.toml", text)
    alice.do("systemctl", "--user", "reload", f"gadei-ps@{alice.job}")
    made = before["checkpoints"]
    eventually(lambda: alice.status()["checkpoints"] != made, what=alice.said)
    alice.login()
    after = alice.status()
    for who in ("watchdog_pid", "server_pid", "job_id", "names_lost"):
        assert after[who] == before[who], who
    alice.do("systemctl", "--user", "stop", f"gadei-ps@{alice.job}")
    word, count = eventually(
        lambda: (last := alice.do("tail", "-n", "1", file).split())[0] == "stopped" and last
    )
    assert (word, int(count)) == ("stopped", alice.saved())
    assert not alice.segments()


@pytest.mark.timeout(300)
def test_without_linger_a_logout_ends_the_job(alice: Login) -> None:
    """Stop it as a stop does; the next login continues. Others lose their memory's names."""
    file = f"/var/{NAME}/count"
    learner = alice.start(sys.executable, LEARNER, alice.job, file)
    eventually(lambda: "pushed" in alice.run("cat", file).stdout, what=alice.said)

    # A job that is of no unit and of no session, with its sockets elsewhere.
    alice.manager.write(f"/var/{NAME}/loose.toml", JOB)
    elsewhere = f"GADEI_PS_RUNTIME_DIR={ELSEWHERE}"
    loose = alice.start(elsewhere, PROGRAM, "serve", f"/var/{NAME}/loose.toml")
    asked = ("env", elsewhere, PROGRAM, "status", "loose", "--json")
    before = eventually(lambda: (done := alice.run(*asked)).returncode == 0 and done.stdout)
    assert not json.loads(before)["names_lost"]

    alice.logout()
    learner.wait(PATIENCE_S)
    word, count = alice.do("tail", "-n", "1", file).split()
    assert (word, int(count)) == ("stopped", alice.saved())
    assert not alice.segments()
    assert eventually(lambda: json.loads(alice.do(*asked))["names_lost"])
    alice.do("env", elsewhere, PROGRAM, "stop", "loose")
    assert loose.wait(PATIENCE_S) == 0

    alice.login()
    alice.do("systemctl", "--user", "start", f"gadei-ps@{alice.job}")
    assert alice.status()["version"] == int(count)
