"""Jobs that run, or whose memory is left, when their units get another user or are removed."""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from saved_jobs import COUNTED, there
from shell import Cli, is_running

from gadei_ps.commands import belongings, systemd, uninstall
from gadei_ps.commands.units import Scope
from gadei_ps.errors import UsageError
from gadei_ps.job import paths
from gadei_ps.memory import segment


@pytest.fixture
def units(tmp_path: Path, job_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Units of this user with a job file."""
    monkeypatch.setattr(systemd, "places", lambda: (Path("/usr/bin/env"),))
    monkeypatch.setattr(systemd, "program", lambda: [sys.executable, "-m", "gadei_ps"])
    monkeypatch.setattr(belongings, "kept_in", lambda: tmp_path)
    where = tmp_path / "root"
    me = pwd.getpwuid(os.getuid()).pw_name
    systemd.install(Scope.SYSTEM, user=me, job=job_name, where=where)
    yield where
    for name in support.segments(job_name):
        segment.unlink(name)


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_is_neither_broken_nor_forgotten(
    cli: Cli, job_name: str, units: Path, saves: bool, compiled: None
) -> None:
    (cli.directory / f"{job_name}.toml").write_text(COUNTED + ("[checkpoint]\n" if saves else ""))
    daemon = cli.start("serve", f"{job_name}.toml")
    support.eventually(lambda: is_running(job_name), what=lambda: daemon.err)
    with pytest.raises(UsageError, match=f"job '{job_name}' of user .* runs.*stop it first"):
        systemd.install(Scope.SYSTEM, user="nobody", force=True, where=units)
    assert "User=nobody" not in (units / "gadei-ps@.service").read_text()
    support.kill_all(job_name)
    # Memory comes before what makes its own user a stranger.
    lines = list(systemd.install(Scope.SYSTEM, user="nobody", force=True, where=units).next)
    verb = "serve --finish --name" if saves else "export"
    save = next(line for line in lines if f" {verb} {job_name} " in line)
    if saves:
        assert lines[lines.index(save) + 1].startswith("# or discard it: ")
    assert (f" gc {job_name}" in save) != saves, "what removes unsaved memory waits for the saving"
    assert lines.index(save) < lines.index("systemd-tmpfiles --create gadei-ps.conf")
    # Removed units: the memory is named, and the user stays until it is gone.
    me = pwd.getpwuid(os.getuid()).pw_name
    systemd.install(Scope.SYSTEM, user=me, force=True, where=units)
    done = uninstall.uninstall(Scope.SYSTEM, where=units)
    (memory,) = done.memory
    assert memory["job"] == job_name
    assert memory["bytes"] > 4000
    assert "it may be more than any checkpoint has" in memory["what"]
    (line,) = [one for one in done.next if memory["save"] in one]
    assert not any("userdel" in line or line.startswith("rm -r") for line in done.next)
    assert "uninstall-unit --system  # again" in done.next[-1]
    # The commands, without the change of the user, and with this test's paths.
    if saves:
        words = shlex.split(memory["save"])
        saved = cli(*words[words.index("gadei_ps") + 1 : -1], f"{job_name}.toml")
        assert saved.code == 0, saved.err
        assert there(job_name, cli)
    else:
        line = line.replace(f"runuser -u {me} -- ", "")
        line = line.replace(f"={units}/run/gadei-ps", f"={paths.directory()}")
        assert subprocess.run(["sh", "-c", line], cwd=cli.directory, check=False).returncode
        assert support.segments(job_name), "it could not be saved, and is not discarded"
        (units / "var/lib/gadei-ps").mkdir(parents=True)
        subprocess.run(["sh", "-c", line], cwd=cli.directory, check=True)
        assert (units.parent / f"{job_name}.safetensors").is_file()
    assert not support.segments(job_name)
    again = uninstall.uninstall(Scope.SYSTEM, where=units)
    assert again.memory == ()
    for line in again.next:  # as far as it concerns this test's directories
        if line.startswith("rm -r"):
            subprocess.run(["sh", "-c", line], check=True)
    assert saves or (units.parent / f"{job_name}.safetensors").is_file(), "what was just saved"


def test_memory_of_another_build_is_not_removed_unsaved(tmp_path: Path) -> None:
    """This gadei-ps cannot save it, but could remove it."""
    theirs = belongings.Belongings.of(Scope.SYSTEM, tmp_path / "gadei-ps", tmp_path)
    for saves in (True, False):
        one = belongings.Memory("demo", 1, 5000, True, saves, False, "made by 0.1.9")
        lines = theirs.settle(["gadei-ps"], [one])
        assert all(line.startswith("#") for line in lines if " gc demo" in line)
        assert len(lines) == 3
