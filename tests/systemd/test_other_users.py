"""The steps that install-unit prints, and those of the documentation, followed to the letter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import service as services
from booted import ROOT, Booted
from service import ENVIRONMENT, PROGRAM, USER, Service, become
from support import PATIENCE_S, eventually

OTHER = "gadei-ps-other"


class Moving:
    """A job whose units get another user."""

    def __init__(self, service: Service) -> None:
        self.service, self.manager = service, service.manager
        self.user = USER

    def install(self, user: str) -> list[str]:
        """Return what is to be done next, with the job's start as the last step."""
        words = ("install-unit", "--system", "--json")
        done = self.manager.do(PROGRAM, *words, "--run-as", user, "--job", self.service.name)
        self.user = user
        return list(json.loads(done)["next"])

    def is_refused(self, user: str) -> None:
        """The units are not given to this user while memory of the other one is left."""
        name = self.service.name
        refused = self.manager.run(PROGRAM, "install-unit", "--system", "--run-as", user)
        assert refused.returncode == 2, refused
        found = (
            f"job {name} of user {self.user} is in memory, and user {user} could not continue it"
        )
        assert f"{found}: stop it (systemctl stop gadei-ps@{name})" in refused.stderr

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
    """Continue from its checkpoint, and from memory that no checkpoint has."""
    service, manager = moving.service, moving.manager
    service.systemctl("start")
    service.learn()
    moving.is_refused(OTHER)
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
    again.wait(PATIENCE_S)
    pushed = int(manager.do("tail", "-n", "1", "/tmp/again").split()[1])
    done = json.loads(manager.do(PROGRAM, "uninstall-unit", "--force", "--dry-run", "--json"))
    assert f"memory of job {service.name}" in [what for what, _ in done["left"]]
    manager.do("bash", "-c", f"rm {directory}; mv {directory}.away {directory}")
    moving.is_refused(USER)
    text = (ROOT / "docs/administration.md").read_text()
    (save,) = re.findall(r"^sudo -u gadei-ps (env .* gadei-ps serve --finish .*)$", text, re.M)
    save = save.replace("gadei-ps serve", f"{PROGRAM} serve").replace("demo", service.name)
    manager.do(*become(OTHER), "env", "-u", "GADEI_PS_STATE_DIR", *save.split())
    moving.follow(moving.install(USER))
    assert moving.status()["version"] == learned + pushed == service.saved()


def test_an_impossible_name(manager: Booted) -> None:
    """One line says so, whatever systemd makes of it."""
    for name in ("my job", "my.job"):
        manager.write(f"/etc/gadei-ps/{name}.toml", services.JOB)
        made = manager.do("systemd-escape", "--template=gadei-ps@.service", name).strip()
        assert manager.run("systemctl", "start", made).returncode
        instance = made.partition("@")[2].removesuffix(".service")
        text = manager.show(made, "StatusText")
        assert text.startswith(f"failed: job name '{instance}': use 1 to 48 letters"), text
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
    """Name the file in its message; the job itself is not needed for that."""
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
