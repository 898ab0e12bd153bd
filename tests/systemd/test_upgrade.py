"""Two versions of gadei-ps side by side: a job goes from one to the other by a stop and a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import versions
from booted import Booted
from service import Service
from support import PATIENCE_S, eventually
from versions import OWN, UPGRADED


@pytest.fixture
def upgraded(manager: Booted, tmp_path: Path) -> Path:
    """The program of the other version, inside."""
    versions.install(Path(f"/proc/{manager.pid}/root"), tmp_path / "upgraded")
    return UPGRADED


def use(service: Service, program: Path) -> None:
    """Use it from the next start on; the end's unit keeps its own."""
    service.drop_in(versions.of_unit(program))


@pytest.mark.timeout(900)
def test_an_upgrade_and_a_downgrade(service: Service, upgraded: Path) -> None:
    service.systemctl("start")
    service.learn()
    use(service, upgraded)

    # In place of a stop, the watchdog dies: the new version does not take what is the old one's,
    # and the end's unit, of the old version, ends the job with all that it has learned.
    service.kill_the_watchdog()
    eventually(lambda: service.state == "failed", what=service.said)
    assert "is still in memory, made for servers of build" in service.said()
    service.is_gone()
    learned = service.learned()
    assert learned == service.saved()

    # The new version continues from there.
    service.manager.run("systemctl", "start", service.unit, timeout_s=600)
    assert service.state == "active", service.said()
    assert service.status()["version"] == learned
    main = service.manager.show(service.unit, "MainPID")
    assert str(UPGRADED.parent) in service.manager.do("cat", f"/proc/{main}/cmdline")

    # Both versions are of one protocol, so either can stop the job; a restart comes back.
    use(service, OWN)
    service.systemctl("restart")
    assert service.status()["version"] == learned == service.saved()

    # Nobody is left of the right version: memory stays, and its own version ends the job whole.
    service.learn()
    service.drop_in("")
    end = f"/etc/systemd/system/{service.end}.d/test.conf"
    service.manager.write(end, versions.of_end(upgraded))
    use(service, upgraded)
    service.kill_the_watchdog()
    eventually(lambda: service.state == "failed", what=service.said)
    over = ("inactive", "failed")
    eventually(lambda: service.manager.show(service.end, "ActiveState") in over, what=service.said)
    (file, process), service.learners = service.learners[0], []
    process.wait(PATIENCE_S)
    word, count, *_ = service.manager.do("tail", "-n", "1", file).split()
    assert word == "failed", service.said()
    ended = service.gadei_ps("serve", "--finish", f"/etc/gadei-ps/{service.name}.toml", "--json")
    assert ended.returncode == 0 and json.loads(ended.stdout)["job"] == service.name, ended.stderr
    assert service.saved() == learned + int(count)
    assert service.name not in service.manager.do("ls", "/dev/shm")
