"""`doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import support
from shell import Cli

from gadei_ps import doctor
from gadei_ps.kernels import cache


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
    cli.serve(job_name)
    support.kill_all(job_name)
    (found,) = (
        one for one in cli("doctor", "--json").json["checks"] if one["name"] == "left by dead jobs"
    )
    assert (found["level"], found["remedy"]) == ("warning", "gadei-ps gc")


def test_compiled_code(cli: Cli, compiled: None) -> None:
    home = cli.directory / "gadei-ps"
    kept = shutil.copytree(cache.directory(), home / cache.directory().name)

    def said() -> str:
        checks = cli("doctor", "--json", NUMBA_CACHE_DIR=str(cli.directory)).json["checks"]
        return next(one["finding"] for one in checks if one["name"] == "Numba's cache")

    assert said() == f"{kept}, filled"
    # One in each place the package was installed at, if there were several.
    for code in kept.rglob("shard.serve-*.nbc"):
        code.unlink()
    assert said().startswith(f"{kept}, not filled: the next start compiles")


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
    _write(tmp_path, files)
    assert doctor.removes_ipc(tmp_path) is removes


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("text", "highest"),
    [
        (None, 999),
        ("", 999),
        ("#SYS_UID_MAX 100\nUID_MIN\t\t\t 500\n", 499),
        ("UID_MIN 1000\n SYS_UID_MAX 400 # of all\n", 400),
        ("UID_MIN many\n", 999),
    ],
)
def test_system_users(tmp_path: Path, text: str | None, highest: int) -> None:
    _write(tmp_path, {} if text is None else {"etc/login.defs": text})
    assert doctor.system_uid_max(tmp_path) == highest


NOBODYS_UID = 54321


def test_logind(tmp_path: Path) -> None:
    """Concerned is who is no system user, does not linger, and whose logind removes."""
    assert doctor.logind(tmp_path, NOBODYS_UID)[:2] == (doctor.Level.OK, "no logind here")
    for name in ("system", "seats"):
        (tmp_path / "run/systemd" / name).mkdir(parents=True)
    level, finding, remedy = doctor.logind(tmp_path, NOBODYS_UID)
    assert level == doctor.Level.WARNING
    assert "removes your segments" in finding
    assert f"loginctl enable-linger {NOBODYS_UID}" in remedy
    assert "system users (root)" in doctor.logind(tmp_path, 0)[1]
    lingers = {f"var/lib/systemd/linger/{NOBODYS_UID}": ""}
    _write(tmp_path, lingers)
    assert "lingers" in doctor.logind(tmp_path, NOBODYS_UID)[1]
    (tmp_path / next(iter(lingers))).unlink()
    _write(tmp_path, {"etc/login.defs": f"SYS_UID_MAX {NOBODYS_UID}\n"})
    assert doctor.logind(tmp_path, NOBODYS_UID)[0] == doctor.Level.OK
    (tmp_path / "etc/login.defs").unlink()
    _write(tmp_path, {"usr/lib/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=no\n"})
    assert doctor.logind(tmp_path, NOBODYS_UID)[1] == "RemoveIPC=no"


@pytest.mark.parametrize(
    ("limits", "level", "said"),
    [
        ((-1, -1), "ok", "unlimited"),
        ((1024, 4096), "ok", "1024"),
        ((832, 832), "ok", "832"),
        ((364, 4096), "warning", "enough for 100 of 256 learners"),
        ((10, 500), "warning", "enough for 0 of 256 learners"),
    ],
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], level: str, said: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    found, finding, remedy = doctor.CHECKS["open files"]()
    assert (found, said in finding) == (level, True)
    assert ("hard limit is 500" in remedy) == (limits[1] == 500)


def test_a_dead_threads_mutex_is_told() -> None:
    assert doctor.CHECKS["robust mutexes"]() == (doctor.Level.OK, "work", "")
