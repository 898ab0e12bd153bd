"""Queries to the service manager: its version, and which units of jobs run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gadei_ps.commands import doctor, service_manager, unit_files
from gadei_ps.commands.doctor import Level
from gadei_ps.commands.service_manager import Scope
from gadei_ps.errors import UsageError


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that prints the file of the name that its first argument gives."""
    (folder := tmp_path / "bin").mkdir()
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\ncat "{folder}/$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_systemd_that_is_too_old(systemctl: Path, tmp_path: Path) -> None:
    (systemctl / "--version").write_text("systemd 247 (247.3-7+deb11u4)\n+PAM +AUDIT\n")
    with pytest.raises(UsageError, match=r"^systemd is 247, and the units .* need 248 or newer"):
        unit_files.install(Scope.USER, where=tmp_path)
    assert unit_files.install(Scope.USER, where=tmp_path, dry_run=True).units
    assert doctor.systemd()[0] == Level.WARNING
    (systemctl / "--version").write_text("systemd 248 (v248.13-r0)\n")
    assert unit_files.install(Scope.USER, where=tmp_path).units[0].written
    assert doctor.systemd() == (Level.OK, "systemd 248", "")


def test_what_a_stopped_job_has_left_is_waited_for(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = {
        "gadei-ps@a.service": "active",
        "gadei-ps-end@a.service": "active",
        "gadei-ps-learner@a.service": "activating",
        "gadei-ps@b.service": "failed",
        "gadei-ps-end@b.service": "deactivating",
        "gadei-ps-learner@c.service": "active",
        "gadei-ps@d.service": "deactivating",
    }
    lines = [f"{name} loaded {state} x described\n" for name, state in states.items()]
    (systemctl / "--user").write_text("".join(lines))
    found = service_manager.instances(Scope.USER)
    assert found.used == ("gadei-ps-learner@a.service", "gadei-ps@a.service")
    ending = ("gadei-ps-end@b.service", "gadei-ps-learner@c.service", "gadei-ps@d.service")
    assert found.ending == ending
    messages: list[str] = []

    def say(text: str) -> None:
        messages.append(text)
        (systemctl / "--user").write_text("".join(lines[:3]))

    service_manager.wait_for_ends(Scope.USER, say)
    assert messages == [f"waiting for {' '.join(ending)} to end, at most 120 s"]
    (systemctl / "--user").write_text("".join(lines))
    monkeypatch.setattr(service_manager, "UNITS_END_S", 0.0)
    with pytest.raises(UsageError, match=r"gadei-ps-end@b\.service has not ended"):
        service_manager.wait_for_ends(Scope.USER, messages.append)
