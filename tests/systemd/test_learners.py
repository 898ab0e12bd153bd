"""A learner's unit under a real systemd: it begins, ends and begins again with its job."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from service import LEARNER, Service
from support import PATIENCE_S, eventually

QUICK = "[Service]\nRestartSec=100ms\n"


class Learner:
    """The learner's unit of a job."""

    def __init__(self, service: Service, pushes: int = 0, code: int = 0) -> None:
        self.service, self.manager = service, service.manager
        self.unit = f"gadei-ps-learner@{service.name}.service"
        self.file = f"/var/lib/gadei-ps/{service.name}.count"
        words = (sys.executable, LEARNER, service.name, self.file, pushes, code)
        program = " ".join(map(str, words))
        self.manager.write(f"/etc/gadei-ps/{service.name}.learner", f"PROGRAM={program}\n")
        self.manager.write(f"/etc/systemd/system/{self.unit}.d/test.conf", QUICK)
        self.manager.do("systemctl", "enable", self.unit)

    def show(self, name: str) -> str:
        return self.manager.show(self.unit, name)

    def learns(self) -> None:
        """Wait until it pushes."""

        def attached() -> bool:
            found = self.service.gadei_ps("status", self.service.name, "--json")
            return '"learners": [{' in found.stdout and "pushed" in self.said()

        eventually(attached, what=self.service.said)

    def said(self) -> str:
        return self.manager.run("cat", self.file).stdout

    def settled(self) -> None:
        """Wait until systemd has no more to do."""
        eventually(lambda: not self.jobs(), what=self.jobs)

    def jobs(self) -> str:
        found = self.manager.do("systemctl", "list-jobs", "--no-legend").splitlines()
        return "\n".join(line for line in found if self.service.name in line)


@pytest.fixture
def learner(service: Service, request: pytest.FixtureRequest) -> Iterator[Learner]:
    made = Learner(service, **getattr(request, "param", {}))
    service.drop_in("[Service]\nRestartSec=100ms\n")
    yield made
    service.manager.run("systemctl", "disable", made.unit)


@pytest.mark.parametrize("learner", [{"code": 1}], indirect=True)
def test_a_learner_that_fails_at_a_slow_stop(service: Service, learner: Learner) -> None:
    """Start its unit again meanwhile; that does not bring the job back."""
    service.systemctl("start")
    learner.learns()
    own = service.attached()
    service.learn()
    (slow,) = service.attached() - own
    service.kill("STOP", slow)  # the stop waits for it
    stopping = service.manager.start("systemctl", "stop", service.unit)
    again = f"{learner.unit} start waiting"
    eventually(lambda: again in " ".join(learner.jobs().split()), what=service.said)
    assert service.sub_state == "stop-sigterm"
    service.kill("CONT", slow)
    assert stopping.wait(PATIENCE_S) == 0
    service.is_gone()
    eventually(lambda: learner.show("ActiveState") == "inactive", what=service.said)
    learner.settled()
    assert service.said().count(f"Started {service.unit}") == 1
    assert "Failed to enqueue" not in service.manager.do("journalctl", "--no-pager", "-b")


def test_a_restart_of_the_job(service: Service, learner: Learner) -> None:
    """Check that the learners that it has stopped start again."""
    service.systemctl("start")
    learner.learns()
    before = learner.show("MainPID")
    service.systemctl("restart")
    eventually(lambda: learner.show("MainPID") not in (before, "0"), what=service.said)
    learner.learns()
    service.systemctl("stop")
    service.systemctl("start")  # at once
    learner.learns()
    service.systemctl("stop")
    service.is_gone()
    eventually(lambda: learner.show("ActiveState") == "inactive", what=service.said)


@pytest.mark.parametrize("learner", [{"pushes": 5}], indirect=True)
def test_a_learner_that_has_finished(service: Service, learner: Learner) -> None:
    """It stays so when a watchdog is replaced or the job restarted, until somebody starts it."""

    def starts() -> int:
        return service.manager.journal(learner.unit).count(f"Started {learner.unit}")

    def finished(times: int) -> None:
        eventually(
            lambda: starts() == times and learner.show("ActiveState") == "inactive",
            what=service.said,
        )
        learner.settled()

    service.systemctl("start")
    finished(1)
    before = service.pids()[0]
    service.kill_the_watchdog()
    service.replaced(before)
    finished(1)
    service.systemctl("restart")
    finished(1)
    service.manager.do("systemctl", "start", learner.unit)
    finished(2)
    service.systemctl("stop")
    service.systemctl("start")
    finished(3)
    service.systemctl("stop")
    service.is_gone()


def test_a_learner_without_its_job(service: Service, learner: Learner) -> None:
    service.manager.do("systemctl", "start", learner.unit)
    learner.settled()
    assert learner.show("ActiveState") == "inactive"
    assert service.state == "inactive"


def test_a_lost_marker(service: Service, learner: Learner) -> None:
    """The job's watchdog makes it again, and says so: no learner is kept away for long."""
    marker = f"/run/gadei-ps/{service.name}.wanted"
    service.systemctl("start")
    learner.learns()
    service.manager.do("systemctl", "stop", learner.unit)
    service.manager.do("rm", marker)
    there = ("test", "-e", marker)
    eventually(lambda: service.manager.run(*there).returncode == 0, what=service.said)
    assert f"systemctl start gadei-ps-learner@{service.name}" in service.said()
    service.manager.do("systemctl", "start", learner.unit)
    learner.learns()
    service.systemctl("stop")
    service.is_gone()
    assert service.manager.run(*there).returncode
    eventually(lambda: learner.show("ActiveState") == "inactive", what=service.said)


def test_a_marker_that_the_end_cannot_make(service: Service, learner: Learner) -> None:
    """The watchdog makes it before learners may start."""
    text = "[Service]\nExecStart=\nExecStart=-/bin/false\n"
    service.manager.write(f"/etc/systemd/system/{service.end}.d/test.conf", text)
    service.manager.do("systemctl", "daemon-reload")
    service.systemctl("start")
    learner.learns()
    service.systemctl("stop")
    service.is_gone()
