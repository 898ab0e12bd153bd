"""`doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from shell import Cli

from gadei_ps import doctor


def test_healthy_machine(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0, result
    checks = {one["name"]: one for one in result.json["checks"]}
    assert checks.keys() == doctor.CHECKS.keys()
    assert result.json["ok"]
    assert all(one["remedy"] for one in checks.values() if one["level"] != "ok")


def test_errors_are_exit_code_1(cli: Cli) -> None:
    too_long = cli.directory / ("x" * 120)
    result = cli("doctor", GADEI_PS_RUNTIME_DIR=str(too_long))
    assert result.code == 1
    assert "set GADEI_PS_RUNTIME_DIR to a shorter one" in result.out


def test_litter(cli: Cli, job_name: str, compiled: None) -> None:
    cli.serve(job_name).signal(signal.SIGKILL)
    (found,) = (
        one for one in cli("doctor", "--json").json["checks"] if one["name"] == "left by dead jobs"
    )
    assert (found["level"], found["remedy"]) == ("warning", "gadei-ps gc")


@pytest.mark.parametrize(
    ("files", "removes"),
    [
        ({}, True),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        (
            {
                "etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n",
                "usr/lib/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=yes\n",
            },
            True,
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=yes\n",
                "etc/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=off\n",
            },
            False,
        ),
        (
            {
                "run/systemd/logind.conf.d/60-b.conf": "[Login]\nRemoveIPC=no\n",
                "etc/systemd/logind.conf.d/50-a.conf": "[Login]\nRemoveIPC=yes\n",
            },
            False,
        ),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=\n"}, True),
        ({"etc/systemd/logind.conf": "no section"}, True),
    ],
)
def test_remove_ipc(tmp_path: Path, files: dict[str, str], removes: bool) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert doctor.removes_ipc(tmp_path) is removes
