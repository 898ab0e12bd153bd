"""Jobs that run, or whose memory is left, when their units get another user or are removed."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from saved_jobs import COUNTED, there
from shell import Cli, is_running

from gadei_ps.commands import unit_files
from gadei_ps.commands.service_manager import Scope
from gadei_ps.errors import UsageError
from gadei_ps.memory import segment


@pytest.fixture
def place(tmp_path: Path, job_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install units of this user with a job file; the path stands for the root directory."""
    monkeypatch.setattr(unit_files, "places", lambda: (Path("/usr/bin/env"),))
    me = pwd.getpwuid(os.getuid()).pw_name
    unit_files.install(Scope.SYSTEM, user=me, job=job_name, where=tmp_path / "root")
    yield tmp_path / "root"
    for name in support.segments(job_name):
        segment.unlink(name)


def test_a_job_is_neither_broken_nor_forgotten(
    cli: Cli, job_name: str, place: Path, compiled: None
) -> None:
    (cli.directory / f"{job_name}.toml").write_text(COUNTED + "[checkpoint]\n")
    daemon = cli.start("serve", f"{job_name}.toml")
    support.eventually(lambda: is_running(job_name), what=lambda: daemon.err)
    unit = place / "gadei-ps@.service"
    before = unit.read_text()
    refusal = f"job {job_name} of user .* is in memory, and user nobody could not continue it"
    for end in (lambda: None, lambda: support.kill_all(job_name)):
        end()
        with pytest.raises(UsageError, match=refusal):
            unit_files.install(Scope.SYSTEM, user="nobody", force=True, where=place)
        assert unit.read_text() == before
        done = unit_files.uninstall(Scope.SYSTEM, where=place, dry_run=True)
        assert f"memory of job {job_name}" in [what for what, _ in done.left]
    saved = cli("serve", "--finish", "--name", job_name, f"{job_name}.toml")
    assert saved.code == 0, saved.err
    assert there(job_name, cli)
    assert unit_files.install(Scope.SYSTEM, user="nobody", where=place).user == "nobody"
    left = unit_files.uninstall(Scope.SYSTEM, where=place, dry_run=True).left
    assert not any(what.startswith("memory") for what, _ in left)
