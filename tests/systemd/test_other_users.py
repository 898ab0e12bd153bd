"""The steps that install-unit and uninstall-unit print, followed to the letter."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
import service as services
from booted import Booted
from service import ENVIRONMENT, PROGRAM, USER, Service, become
from support import eventually

OTHER = "gadei-ps-other"


class Moving:
    """A job whose units get another user."""

    def __init__(self, service: Service) -> None:
        self.service, self.manager = service, service.manager
        self.user = USER

    def install(self, user: str) -> list[str]:
        """What is to be done next, with the job's start as the last of it."""
        words = ("install-unit", "--system", "--force", "--json")
        done = self.manager.do(PROGRAM, *words, "--run-as", user, "--job", self.service.name)
        self.user = user
        return list(json.loads(done)["next"])

    def follow(self, lines: list[str]) -> None:
        for line in lines:
            self.manager.do("sh", "-c", line)
            if line.startswith("systemd-tmpfiles"):  # which has made the directory again
                services.give_kernels(self.manager, self.user)

    def status(self) -> dict[str, object]:
        asked = ("env", *ENVIRONMENT, PROGRAM, "status", self.service.name, "--json")
        found: dict[str, object] = json.loads(self.manager.do(*become(self.user), *asked))
        return found


@pytest.fixture
def moving(service: Service) -> Iterator[Moving]:
    made = Moving(service)
    yield made
    manager = service.manager
    manager.do("systemctl", "disable", "--now", service.unit)
    eventually(lambda: manager.show(service.end, "ActiveState") != "deactivating")
    made.follow(made.install(USER)[:-1])
    manager.run("userdel", OTHER)


@pytest.mark.timeout(300)
def test_another_user_goes_on_with_the_job(moving: Moving) -> None:
    """From its checkpoint, and from memory that no checkpoint has."""
    service, manager = moving.service, moving.manager
    service.systemctl("start")
    service.learn()
    refused = manager.run(PROGRAM, "install-unit", "--system", "--run-as", OTHER, "--force")
    assert refused.returncode == 2, refused
    assert f"{service.unit} runs, and user {OTHER} could not go on" in refused.stderr
    assert f"stop it first (systemctl stop {service.unit})" in refused.stderr
    service.systemctl("stop")
    learned = service.learned()
    moving.follow(moving.install(OTHER))
    assert moving.status()["version"] == learned == service.saved()
    main = manager.show(service.unit, "MainPID")
    assert manager.do("stat", "-c", "%U", f"/proc/{main}").strip() == OTHER

    # Back, when its last checkpoint has failed.
    directory = f"/var/lib/gadei-ps/{service.name}"
    learner = (*become(OTHER), "env", *ENVIRONMENT, *services.learner(service.name, "/tmp/again"))
    again = manager.start(*learner)
    eventually(lambda: "pushed" in manager.run("cat", "/tmp/again").stdout)
    manager.do("bash", "-c", f"mv {directory} {directory}.away; touch {directory}")
    manager.run("systemctl", "stop", service.unit)
    eventually(lambda: manager.show(service.end, "ActiveState") == "failed", what=service.said)
    again.wait(60)
    pushed = int(manager.do("tail", "-n", "1", "/tmp/again").split()[1])
    done = json.loads(manager.do(PROGRAM, "uninstall-unit", "--force", "--dry-run", "--json"))
    (memory,) = (one for one in done["memory"] if one["job"] == service.name)
    assert (memory["user"], memory["save"] in done["next"]) == (OTHER, True)
    assert not any("userdel" in line for line in done["next"])
    manager.do("bash", "-c", f"rm {directory}; mv {directory}.away {directory}")
    lines = moving.install(USER)
    assert shlex.split(memory["save"]) in [shlex.split(line) for line in lines]
    moving.follow(lines)
    assert moving.status()["version"] == learned + pushed == service.saved()


def test_an_impossible_name(manager: Booted) -> None:
    """One line says so, whatever systemd makes of it."""
    for name in ("my job", "my.job"):
        manager.write(f"/etc/gadei-ps/{name}.toml", services.JOB)
        made = manager.do("systemd-escape", "--template=gadei-ps@.service", name).strip()
        assert manager.run("systemctl", "start", made).returncode
        instance = made.partition("@")[2].removesuffix(".service")
        told = manager.show(made, "StatusText")
        assert told.startswith(f"failed: job name '{instance}': use 1 to 48 letters"), told
        manager.do("rm", f"/etc/gadei-ps/{name}.toml")
    manager.run("systemctl", "reset-failed")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (None, "there is no such file"),
        ("LEARNERS=2\n", "Missing argument 'COMMAND'"),
        ("PROGRAM=/usr/bin/true\nLEARNERS=two\n", "Invalid value for '--learners'"),
        ("PROGRAM=/srv/nothing\n", "there is no program '/srv/nothing'"),
    ],
)
def test_a_mistake_in_a_learners_file(
    text: str | None, mistake: str, manager: Booted, job_name: str
) -> None:
    """Its message names the file; the job itself is not needed for that."""
    learner, file = f"gadei-ps-learner@{job_name}.service", f"/etc/gadei-ps/{job_name}.learner"
    if text is not None:
        manager.write(file, text)
    wanted = f"/run/gadei-ps/{job_name}.wanted"
    manager.write(wanted, "")
    manager.run("systemctl", "start", learner)
    eventually(lambda: manager.show(learner, "ActiveState") == "failed")
    assert f"{file}: {mistake}" in manager.journal(learner)
    assert manager.show(learner, "NRestarts") == "0"
    manager.run("rm", "-f", file, wanted)
