"""A start from memory looks at the disk: for newer checkpoints, and whether any can be made."""

from __future__ import annotations

import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import support
from saved_jobs import COUNTED, again, count, stop, there, truncate, weights, write
from shell import Cli, is_running

from gadei_ps.learners.client import Client

pytestmark = pytest.mark.usefixtures("compiled")

TEXT = COUNTED + "[checkpoint]\nevery_s = 0\n"


@pytest.fixture
def old(cli: Cli, job_name: str) -> str:
    """A dead job with version 2 in its memory."""
    (cli.directory / f"{job_name}.toml").write_text(TEXT)
    cli.made(job_name)
    again(cli, job_name)
    with Client(job_name) as client:
        count(client, 2)
    support.kill_all(job_name)
    return job_name


def test_a_newer_checkpoint_is_told_and_can_be_taken(
    old: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(cli, old, TEXT, range(5, 6))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        with monkeypatch.context() as context:
            context.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            daemon = again(cli, old)
        support.eventually(lambda: support.status(old)["newer_checkpoint"] == 5)
        command = f"gadei-ps stop {old} --discard"
        support.eventually(lambda: "resuming from memory" in daemon.err)
        line = next(line for line in daemon.err.splitlines() if "resuming from memory" in line)
        assert "at version 2; checkpoint 5 is newer" in line
        assert command in line
        assert str(there(old, cli)[0]) in line
        assert command in " ".join(cli("status", old).out.replace("│", " ").split())
        manager.settimeout(support.PATIENCE_S)
        while b"checkpoint 5 is newer" not in manager.recv(4096):
            pass
        assert support.status(old)["version"] == 2
        assert cli(*command.split()[1:]).code == 0
        while b"stopped at version 2; the newest checkpoint has version 5" not in manager.recv(
            4096
        ):
            pass
    assert not support.segments(old)
    assert daemon.wait().code == 0, "no unit starts it again by itself"
    again(cli, old)
    now = support.status(old)
    assert (now["version"], now["newer_checkpoint"], now["checkpoint_warning"]) == (5, None, None)
    assert (weights(old) == -5).all()


def test_a_newer_checkpoint_that_is_set_aside(old: str, cli: Cli) -> None:
    """Set it aside by the next checkpoint of the older memory; the log says how to use it."""
    write(cli, old, TEXT, range(5, 6))
    daemon = again(cli, old)
    support.eventually(lambda: support.status(old)["newer_checkpoint"] == 5)
    stop(old)
    assert "has a watchdog" not in daemon.wait().err
    line = next(line for line in daemon.err.splitlines() if "is set aside" in line)
    path = there(old, cli)[0].with_name("superseded-checkpoint-000000000005")
    assert f"gadei-ps stop {old}, then gadei-ps restore {path} --job-file JOB.toml" in line
    again(cli, old)
    assert support.status(old)["version"] == 2
    stop(old)

    restored = cli.start("restore", path)
    support.eventually(lambda: is_running(old))
    assert (weights(old) == -5).all()
    stop(old)
    assert restored.wait().code == 0
    again(cli, old)
    assert support.status(old)["version"] == 5


def test_one_that_was_set_aside_is_taken_by_a_unit(old: str, cli: Cli) -> None:
    """Use the commands that the log of the unit's watchdog names: restore would serve the job
    outside of it."""
    place = cli.directory / "its own; place"
    write(cli, old, f"{TEXT}directory = '{place}'\n", range(5, 6))
    daemon = cli.start("serve", f"{old}.toml", GADEI_PS_UNIT=f"gadei-ps@{old}.service")
    support.eventually(lambda: is_running(old) and support.status(old)["newer_checkpoint"] == 5)
    stop(old)
    assert daemon.wait().code == 0
    _, _, way = daemon.err.partition("to resume from it: ")
    (line,) = way.splitlines()[:1]
    unit = f"--user {{}} gadei-ps@{old}"
    first, last = (f"systemctl {unit.format(verb)}" for verb in ("stop", "start"))
    assert line.startswith(f"{first}; mv ")
    assert last in line
    words = shlex.split(line.removeprefix(f"{first}; "))
    subprocess.run([*words[:3], words[3].removesuffix(";")], check=True)
    again(cli, old)
    assert support.status(old)["version"] == 5


def test_a_newer_one_that_cannot_be_used_is_not_recommended(old: str, cli: Cli) -> None:
    write(cli, old, TEXT, range(5, 6))
    truncate(there(old, cli)[0])
    daemon = again(cli, old)
    stop(old)  # its checkpoint comes after the look
    assert "is newer" not in daemon.wait().err


def test_memory_is_gone_on_from_only_where_it_can_be_saved(old: str, cli: Cli) -> None:
    place = cli.directory / "state" / old
    shutil.rmtree(place)
    place.touch()
    failed = cli("serve", f"{old}.toml")
    assert failed.code == 2, failed
    last = failed.err.splitlines()[-1]
    assert f"{place}: cannot be written (Not a directory)" in last
    assert f"the memory of job '{old}' stays" in last
    place.unlink()
    daemon = again(cli, old)
    assert support.status(old)["version"] == 2

    # Servers that live continue, whatever the disk is.
    daemon.signal(signal.SIGKILL)
    shutil.rmtree(place)
    place.touch()
    daemon = again(cli, old)
    support.eventually(lambda: support.status(old)["checkpoint_warning"])
    assert "cannot be written" in support.status(old)["checkpoint_warning"]
    assert "checkpoints cannot be made" in daemon.err
    with Client(old) as client:
        count(client, 1)
    place.unlink()
    assert cli("checkpoint", old).code == 0
    now = support.status(old)
    assert (now["version"], now["checkpoint_warning"]) == (3, None)


def test_a_stop_that_has_begun_saves(old: str, cli: Cli) -> None:
    write(cli, old, TEXT, range(5, 6))
    again(cli, old)
    support.eventually(lambda: support.status(old)["newer_checkpoint"] == 5)
    with Client(old) as client:
        stopping = cli.start("stop", old, "--drain")
        support.eventually(lambda: client.stopping)
        refused = cli("stop", old, "--discard")
        assert (refused.code, "is stopping" in refused.error) == (4, True), refused
    assert stopping.wait().code == 0
    assert there(old, cli)[0].name.endswith("2"), "its own, and the other is set aside"
