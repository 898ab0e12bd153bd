"""Two versions of gadei-ps side by side: a job goes from one to the other by a stop and a start."""

from __future__ import annotations

import json
import shutil
import site
import sys
import venv
from pathlib import Path

import pytest
from booted import Booted
from service import Service
from support import eventually

ROOT = Path(__file__).parents[2]
UPGRADED = Path("/var/lib/upgraded")  # inside


def made(directory: Path, place: Path) -> None:
    """An environment, to be used at `place`, with a version whose servers are of another build."""
    venv.create(directory, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    others = [path for path in (*sys.path, *site.getsitepackages()) if "site-packages" in path]
    (packages / "others.pth").write_text("\n".join(others))
    package = packages / "gadei_ps"
    ignored = shutil.ignore_patterns("__pycache__")
    for room in ("gadei_ps", "learners", "watchdog"):
        into = package if room == "gadei_ps" else package / room
        shutil.copytree(ROOT / room, into, ignore=ignored, dirs_exist_ok=True)
    with (package / "server" / "driver.py").open("a") as source:
        source.write("# of another build\n")
    program = directory / "bin" / "gadei-ps"
    program.write_text(
        f"#!{place}/bin/python -P\n"
        "import sys\nfrom gadei_ps.cli.app import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)


@pytest.fixture
def upgraded(manager: Booted, tmp_path: Path) -> Path:
    """The program of the other version, inside."""
    made(tmp_path / "upgraded", UPGRADED)
    shutil.copytree(
        tmp_path / "upgraded", Path(f"/proc/{manager.pid}/root{UPGRADED}"), symlinks=True
    )
    return UPGRADED / "bin" / "gadei-ps"


def use(service: Service, program: Path) -> None:
    """From the next start on; the end's unit keeps its own."""
    begin = f"{program} serve --json-log --name %i %E/gadei-ps/%i.toml"
    reload = f"{program} reload --name %i %E/gadei-ps/%i.toml"
    text = f"[Service]\nExecStart=\nExecStart={begin}\nExecReload=\nExecReload={reload}\n"
    service.drop_in(text + "TimeoutStartSec=600\n")


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

    # The new version goes on from there.
    service.manager.run("systemctl", "start", service.unit, timeout_s=600)
    assert service.state == "active", service.said()
    assert service.status()["version"] == learned
    main = service.manager.show(service.unit, "MainPID")
    assert str(UPGRADED) in service.manager.do("cat", f"/proc/{main}/cmdline")

    # Both versions are of one protocol, so either can stop the job; a restart comes back.
    own = Path(sys.executable).with_name("gadei-ps")
    use(service, own)
    service.systemctl("restart")
    assert service.status()["version"] == learned == service.saved()

    # Nobody is left of the right version: memory stays, and its own version ends the job whole.
    service.learn()
    service.drop_in("")
    end = f"/etc/systemd/system/{service.end}.d/test.conf"
    finish = f"{upgraded} serve --finish --json-log --name %i %E/gadei-ps/%i.toml"
    service.manager.write(end, f"[Service]\nExecStop=\nExecStop={finish}\n")
    use(service, upgraded)
    service.kill_the_watchdog()
    eventually(lambda: service.state == "failed", what=service.said)
    over = ("inactive", "failed")
    eventually(lambda: service.manager.show(service.end, "ActiveState") in over, what=service.said)
    (file, process), service.learners = service.learners[0], []
    process.wait(60)
    word, told, *_ = service.manager.do("tail", "-n", "1", file).split()
    assert word == "failed", service.said()
    ended = service.gadei_ps("serve", "--finish", f"/etc/gadei-ps/{service.name}.toml", "--json")
    assert ended.returncode == 0 and json.loads(ended.stdout)["job"] == service.name, ended.stderr
    assert service.saved() == learned + int(told)
    assert service.name not in service.manager.do("ls", "/dev/shm")
