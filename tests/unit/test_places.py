"""Devices and cores of a virtual worker's stages, and of the learner itself."""

from __future__ import annotations

import threading

import pytest
import torch
from support.torch_models import one_thread as one_thread

from gadei_ps.errors import UsageError
from gadei_ps.learners.virtual import stage_devices
from gadei_ps.learners.virtual.stage_devices import StageDevice

CPU = torch.device("cpu")


def test_a_thread_has_the_cores_of_its_place() -> None:
    """Even if another thread sets its own before this one computes for the first time."""
    seen: list[int] = []
    used, other = threading.Event(), threading.Event()

    def run() -> None:
        StageDevice(CPU, 2).use()
        used.set()
        other.wait()
        torch.ones(8).add_(1)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    used.wait()
    torch.set_num_threads(3)
    other.set()
    thread.join()
    assert seen == [2]


def test_the_cores_of_a_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return its share, if `gadei-ps run` or another launcher has set one."""
    monkeypatch.setattr(stage_devices.process, "cores", lambda: 8)
    for share, cores in (("", 8), ("3", 3), ("99", 8), ("4,2", 8)):
        monkeypatch.setenv("OMP_NUM_THREADS", share)
        assert stage_devices.cores() == cores


def test_what_stages_leave_is_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_devices, "cores", lambda: 8)
    gpu = StageDevice(torch.device("cuda:0"), 8)
    torch.set_num_threads(6)
    for where, threads in (([3, 2], 3), ([1, 1], 6), ([4, 4], 1), ([8, 8], 1)):
        given = [StageDevice(CPU, one) for one in where]
        assert stage_devices.remaining_threads([*given, gpu]) == threads


def test_devices_that_run_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("", "0", "-1", "x", "9999"):
        monkeypatch.setenv("GADEI_PS_DEVICES", wrong)
        with pytest.raises(UsageError, match="devices: give one for each stage"):
            stage_devices.parse(None)
    monkeypatch.setenv("GADEI_PS_DEVICES", "2")
    monkeypatch.setattr(stage_devices, "cores", lambda: 5)
    seen = 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    for device, found in {
        "": ["cuda:0", "cuda:1"],
        "auto": ["cuda:0", "cuda:1"],
        "cuda": ["cuda:0", "cuda:1"],
        "host": ["host:2", "host:2"],
    }.items():
        monkeypatch.setenv("GADEI_PS_DEVICE", device)
        assert stage_devices.devices_from_launcher() == found
    monkeypatch.setenv("GADEI_PS_DEVICE", "auto")
    seen = 1
    assert stage_devices.devices_from_launcher() == ["host:2", "host:2"]
    monkeypatch.setenv("GADEI_PS_DEVICE", "cuda")
    with pytest.raises(UsageError, match="device 'cuda:0': PyTorch"):
        stage_devices.parse(None)


def test_shares_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_devices.process, "cores", lambda: 8)
    assert [one.cores for one in stage_devices.parse(["host:3", "host", "host"])] == [3, 2, 2]
    assert [one.cores for one in stage_devices.parse(["host"] * 9)] == [1] * 9
