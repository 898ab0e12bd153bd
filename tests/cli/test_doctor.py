"""`doctor` finds what is wrong and says what to do."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import support
from shell import Cli, program

from gadei_ps import _native
from gadei_ps.commands import doctor
from gadei_ps.kernels import cache
from gadei_ps.machine import gpus


def test_healthy_machine(cli: Cli) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0, result
    checks = {one["name"]: one for one in result.json["checks"]}
    assert checks.keys() == doctor.CHECKS.keys()
    assert result.json["ok"]
    assert all(one["remedy"] for one in checks.values() if one["level"] != "ok")


def test_a_lease_that_is_taken_without_news_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's list of leases must not lead into memory that is unmapped."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    monkeypatch.setattr(doctor.mmap, "mmap", lambda *_: page)
    monkeypatch.setattr(doctor.threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(doctor.threading.Thread, "join", lambda _: None)
    level, found, _ = doctor.robust_mutex()
    assert (level, "no news of it" in found) == ("error", True)
    assert _native.lease_take(_native.address(page), 0) == 0
    _native.lease_release(_native.address(page))


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

    def finding() -> str:
        checks = cli("doctor", "--json", NUMBA_CACHE_DIR=str(cli.directory)).json["checks"]
        return next(one["finding"] for one in checks if one["name"] == "Numba's cache")

    assert finding() == f"{kept}, filled"
    (kept / "stand_by.code").unlink()
    assert finding().startswith(f"{kept}, not filled: the next start compiles")


@pytest.mark.parametrize("why", ["read-only", "a file"])
def test_no_place_for_compiled_code(why: str, cli: Cli, tmp_path: Path) -> None:
    """It says where it is kept instead, and what to do."""
    runtime = str(cli.directory)
    (tmp_path / "gadei-ps").touch()
    home = Path("/proc/none") if why == "read-only" else tmp_path
    result = cli("doctor", "--json", NUMBA_CACHE_DIR=str(home), GADEI_PS_RUNTIME_DIR=runtime)
    found = next(one for one in result.json["checks"] if one["name"] == "Numba's cache")
    assert found["level"] == "warning"
    assert found["finding"].startswith(
        f"{home}/gadei-ps cannot be written: what is compiled is kept in {runtime}/.cache"
    )
    assert "NUMBA_CACHE_DIR" in found["remedy"]


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
    ("option", "found"),
    [
        ("huge=advise", "advise, in /dev/shm"),
        ("size=1m", "none in /dev/shm; large models gain: mount -o remount,huge=advise /dev/shm"),
    ],
)
def test_large_pages(option: str, found: str) -> None:
    """The mount's option decides, as the kernel does; a namespace of its own has another mount."""
    mount = f'mount -t tmpfs -o {option} tmpfs /dev/shm || exit 77; exec "$@"'
    code = "from gadei_ps.commands import doctor; print(doctor.large_pages().finding)"
    command = ["unshare", "-rm", "sh", "-c", mount, "sh", sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == 77 or "unshare" in result.stderr:
        pytest.skip(f"no namespace here: {result.stderr}")
    setting = doctor.SHMEM_ENABLED.read_text() if doctor.SHMEM_ENABLED.exists() else "[deny]"
    if "[deny]" in setting or "[force]" in setting:
        pytest.skip(f"the kernel overrides the option: {setting}")
    assert result.stdout == f"{found}\n", result.stderr


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
    """Warn if logind removes memory of a user that is not a system user and does not linger."""
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
    ("limits", "level", "message"),
    [
        ((-1, -1), "ok", "unlimited"),
        ((1024, 4096), "ok", "1024"),
        ((832, 832), "ok", "832"),
        ((364, 4096), "warning", "enough for 100 of 256 learners"),
        ((10, 500), "warning", "enough for 0 of 256 learners"),
        ((63, 63), "error", "63: no job can be served"),
    ],
)
def test_open_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], level: str, message: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    found, finding, remedy = doctor.CHECKS["open files"]()
    assert (found, message in finding) == (level, True)
    assert ("hard limit is 500" in remedy) == (limits[1] == 500)


def test_a_dead_threads_mutex_is_told() -> None:
    assert doctor.CHECKS["robust mutexes"]() == (doctor.Level.OK, "work", "")


# -- GPUs, with a fake nvidia-smi and a fake probe -------------------------------------------------

NVIDIA_SMI = """import sys
if "-L" in sys.argv:
    for index in range(2):
        print(f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})")
else:
    print("550.54.15")
"""
GPU = {
    "index": 0,
    "to_device": 55.26,
    "to_host": 54.0,
    "both_ways": 101.0,
    "memory_free": 130 << 30,
    "memory_total": 139 << 30,
    "registers": True,
    "registers_read_only": False,
    "peers": [1],
    "errors": {},
}
PROBED: dict[str, Any] = {
    "cupy": "14.2.0",
    "missing": "",
    "driver": "13.1",
    "runtime": "13.0",
    "devices": [GPU],
    "errors": {},
}


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    made = program(tmp_path / "bin/nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("PATH", f"{made.parent}:{os.environ['PATH']}")
    return made


def test_gpus(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (doctor.Level.OK, "2 x NVIDIA H200, driver 550.54.15", "")
    assert doctor.CHECKS["GPU"]() == found
    monkeypatch.setenv(gpus.VISIBLE, "1")
    assert doctor.CHECKS["GPU"]()[1].endswith("; CUDA_VISIBLE_DEVICES=1")
    assert doctor.without_cupy(support.PATIENCE_S) == (
        doctor.Level.WARNING,
        "CuPy not installed: learners compute on the host",
        "pip install 'gadei-ps[cuda12]'",
    )


def test_no_gpu(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho No devices were found; exit 6")
    level, finding, remedy = doctor.CHECKS["GPU"]()
    assert (level, remedy) == (doctor.Level.OK, "")
    assert finding == "none found; learners compute on the host"
    assert doctor.without_cupy(support.PATIENCE_S)[0] == doctor.Level.OK


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('driver and library differ')", "driver and library differ"),
        ("import time; time.sleep(1000)", "no answer within 0.1 s"),
    ],
)
def test_broken_driver(cli: Cli, nvidia_smi: Path, code: str, message: str) -> None:
    program(nvidia_smi, code)
    patience_s = 0.1 if "sleep" in code else support.PATIENCE_S
    level, finding, remedy = doctor.gpu(patience_s)
    assert level == doctor.Level.WARNING
    assert message in finding
    assert "--device host" in remedy
    if "sleep" not in code:
        result = cli("doctor", "--json")
        assert result.code == 0, "jobs run on the host"
        checks = {one["name"]: one for one in result.json["checks"]}
        assert message in checks["GPU"]["finding"]


@pytest.mark.parametrize(
    ("driver", "advice"),
    [
        ("580.65.06", "pip install 'gadei-ps[cuda13]'"),
        ("600.1", "pip install 'gadei-ps[cuda13]'"),
        ("525.60.13", "pip install 'gadei-ps[cuda12]'"),
        ("470.82", "update the NVIDIA driver to 525 or newer, then pip install 'gadei-ps[cuda12]'"),
        ("", "pip install 'gadei-ps[cuda13]', or [cuda12] for a driver before 580"),
    ],
)
def test_cupy_for_a_driver(driver: str, advice: str) -> None:
    assert doctor.cupy_for(driver) == advice


def probe(found: object) -> list[str]:
    return [sys.executable, "-c", f"print({json.dumps(found)!r})"]


def test_cuda(nvidia_smi: Path) -> None:
    level, finding, remedy = doctor.cuda(probe(PROBED), support.PATIENCE_S)
    assert (level, remedy) == (doctor.Level.OK, "")
    assert finding.startswith(
        "CuPy 14.2.0 with CUDA 13.0, driver for CUDA 13.1; GPU 0: 55.3 GB/s to it, 54.0 from it, "
        "101.0 both ways (130.0 of 139.0 GiB free) (pins no read-only memory) (reaches GPU 1); "
    )
    assert "MiB in /dev/shm to pin for running jobs (ulimit -l: " in finding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"missing": "the GPU is too old"}, "learners compute on the host: the GPU is too old"),
        ({"devices": [GPU | {"errors": {"registers": "not permitted"}}]}, "registers fails: not"),
        ({"devices": [], "errors": {"devices": "no"}}, "devices fails: no"),
        ({"cupy": None, "errors": {"cupy": "no libcudart"}}, "cannot be loaded: no libcudart"),
    ],
)
def test_cuda_with_faults(nvidia_smi: Path, changes: dict[str, Any], message: str) -> None:
    level, finding, remedy = doctor.cuda(probe(PROBED | changes), support.PATIENCE_S)
    assert level == doctor.Level.WARNING
    assert message in finding
    assert remedy


def test_cupy_without_a_gpu(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho No devices were found; exit 6")
    changes = {"missing": "no GPU", "driver": None, "devices": [], "errors": {"driver": "none"}}
    level, finding, _ = doctor.cuda(probe(PROBED | changes), support.PATIENCE_S)
    assert level == doctor.Level.OK
    assert finding == "CuPy 14.2.0 with CUDA 13.0; learners compute on the host: no GPU"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import time; time.sleep(1000)", "no answer within 0.1 s"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise SystemExit('out of order')", "fails: out of order"),
        ("print('hello')", "has printed no result"),
    ],
)
def test_probe_that_fails(code: str, message: str) -> None:
    patience_s = 0.1 if "sleep" in code else support.PATIENCE_S
    level, finding, remedy = doctor.cuda([sys.executable, "-c", code], patience_s)
    assert level == doctor.Level.WARNING
    assert message in finding
    assert remedy


def test_memory_to_pin(tmp_path: Path) -> None:
    for part, size in (("weights", 100), ("ring.0", 30), ("ring.12", 7), ("state", 5000)):
        (tmp_path / f"gadei-ps.0.demo.{part}").write_bytes(bytes(size))
    (tmp_path / "weights").write_bytes(bytes(999))
    assert doctor.to_pin(tmp_path) == 137
