"""The CUDA device when something is missing, too small, in another order, or killed."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
from support import daemon, eventually, spin, status

from gadei_ps import _native
from gadei_ps.errors import DeviceError, JobStopped, ModelMismatch, UsageError
from gadei_ps.job.control import StopJob
from gadei_ps.learners import devices
from gadei_ps.learners.client import NONE, Client, Rows, rows_at, whole_at
from gadei_ps.learners.host import Host
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.machine.cuda import missing as cuda_missing
from gadei_ps.memory import layout

VALUES = 20_000
NOT_WAITING_S = 10.0  # after so long a stream is found not to wait


@pytest.fixture
def device() -> Iterator[emulator.Device]:
    with emulator.installed() as made:
        yield made


def tensors() -> dict[str, np.ndarray]:
    return {"w": np.zeros(VALUES, np.float32)}


def on_device(array: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(array)


def ones() -> dict[str, Any]:
    return {"w": on_device(np.ones(VALUES, np.float32))}


# -- the choice of a device -----------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"device cuda: CuPy is not installed \(pip install"):
        devices.choose("cuda")
    assert isinstance(devices.choose(), Host)
    assert "this learner computes on the host: CuPy is not installed" in capsys.readouterr().err
    monkeypatch.setenv("GADEI_PS_DEVICE", "host")
    assert isinstance(devices.choose(), Host)
    assert not capsys.readouterr().err
    monkeypatch.setenv("GADEI_PS_DEVICE", "cuda")
    with pytest.raises(DeviceError):
        devices.choose()


def test_an_unknown_device() -> None:
    with pytest.raises(UsageError, match="device 'tpu': use auto, cuda or host"):
        devices.choose("tpu")


def test_cupy_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libnvrtc.so.13: no such file\\nmore')")
    script = "from gadei_ps.machine.cuda import missing as cuda_missing; print(cuda_missing())"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("CuPy cannot be loaded (libnvrtc.so.13: no such file); pip")


def test_no_gpu(device: emulator.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import runtime

    monkeypatch.setattr(runtime, "getDeviceCount", lambda: 0)
    assert cuda_missing().startswith("no GPU is visible")

    def broken() -> int:
        raise emulator.CudaError("cudaErrorInsufficientDriver: too old\nand more")

    monkeypatch.setattr(runtime, "getDeviceCount", broken)
    with pytest.raises(DeviceError, match=r"device cuda: no GPU can be used .*too old\)"):
        devices.choose("cuda")


def test_no_compiler(device: emulator.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    def lacks() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: no such file\nand more")

    monkeypatch.setattr(nvrtc, "getVersion", lacks)
    with pytest.raises(DeviceError, match=r"CuPy lacks the compiler NVRTC \(CuPy failed to load"):
        devices.choose("cuda")


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("supported", "works"), [(True, True), (True, False), (False, False)])
def test_weights_are_registered_to_be_read(
    device: emulator.Device, supported: bool, works: bool, job_name: str
) -> None:
    """A GPU that cannot do that, whatever it reports, gets a mapping that can be written."""
    device.read_only_supported, device.read_only_works = supported, works
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        registered = sorted(flags for _, flags in device.registered.values() if flags)
        assert registered == ([3, 11] if works else [3, 3])
        link.push(ones(), 0)
        link.flush()
        client.wait_applied()
        buffer = link.buffer()
        link.fill(buffer)
        import cupy

        np.testing.assert_array_equal(cupy.asnumpy(buffer)[:VALUES], client.weights["w"])
        assert client.weights["w"][0] != 0


def test_a_gpu_that_is_too_small(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        device.total = 1 << 17
        with pytest.raises(DeviceError, match=r"out of memory: .*0\.3 MiB .* of 0\.1 MiB are free"):
            devices.choose("cuda").link(client)
        assert not any(flags for _, flags in device.registered.values())
        # The job, and this learner on another device, continue.
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        device.total = 1 << 30
        link = devices.choose("cuda").link(client)
        link.push(ones(), 0)
        link.close()
        client.wait_applied()
        assert client.current_version == 2


def test_a_gpu_without_room_for_a_context(device: emulator.Device, job_name: str) -> None:
    """Not even how much is free can be read then."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        device.total = 0
        with pytest.raises(DeviceError, match=r"out of memory: .*0\.3 MiB .*CUDA's own context"):
            devices.choose("cuda").link(client)


def test_links_give_their_memory_back(device: emulator.Device, job_name: str) -> None:
    """Both a link that is closed and one that could not be made; the client continues."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        used = []
        for _ in range(3):
            with Pipeline(client, devices.choose("cuda")) as pipeline:
                pipeline.push(ones())
            del pipeline
            gc.collect()
            used.append(device.used)
        assert used == [used[0]] * 3
        assert used[0] < 4 * VALUES
        device.total = device.used + 12 * VALUES  # enough for staging, too little for weights
        for _ in range(2):
            with pytest.raises(DeviceError, match="out of memory"):
                Pipeline(client, devices.choose("cuda"))
            assert not any(flags for _, flags in device.registered.values())


def test_memory_that_cannot_be_registered(
    device: emulator.Device, monkeypatch: pytest.MonkeyPatch, job_name: str
) -> None:
    from cupy.cuda import runtime

    def refuse(*arguments: int) -> None:
        raise emulator.CudaError("cudaErrorMemoryAllocation: out of memory", emulator.OUT_OF_MEMORY)

    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        monkeypatch.setattr(runtime, "hostRegister", refuse)
        with pytest.raises(DeviceError, match=r"cannot register 0\.1 MiB of gadei-ps.*weights"):
            devices.choose("cuda").link(client)
        device.total = 1 << 16  # registering takes memory of the device, too
        with pytest.raises(DeviceError, match="GPU 0 is out of memory: a learner needs"):
            devices.choose("cuda").link(client)


def test_arrays_of_the_host(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        with pytest.raises(ModelMismatch, match=r"'w' is a numpy\.ndarray, not an array on the"):
            link.push({"w": np.ones(VALUES, np.float32)}, 0)
        rows = Rows(on_device(np.zeros(1, np.float32)), on_device(np.zeros(1, np.float32)))
        with pytest.raises(ModelMismatch, match="rows of 'w': indices of float32, not integers"):
            link.push({"w": rows}, 0)
        rows = Rows(on_device(np.zeros(1, np.int64)), on_device(np.zeros((2, 1), np.float32)))
        with pytest.raises(ModelMismatch, match="rows of 'w'"):
            link.push({"w": rows}, 0)


def test_rows_beside_arrays_of_gradients(device: emulator.Device, job_name: str) -> None:
    model = tensors() | {"table": np.zeros((9, 4), np.float32)}
    with daemon(job_name), Client(job_name, tensors=model) as client:
        link = devices.choose("cuda").link(client)
        rows = Rows(on_device(np.zeros(1, np.int64)), on_device(np.ones((1, 4), np.float32)))
        with pytest.raises(UsageError, match=r"together with arrays of gradients\(\)"):
            link.push({"w": link.gradients()["w"], "table": rows}, 0)


def test_more_rows_than_kernels_can_list(device: emulator.Device, job_name: str) -> None:
    model = {"table": np.zeros((9, 4), np.float32)}
    with daemon(job_name), Client(job_name, tensors=model) as client:
        link = devices.choose("cuda").link(client)
        with pytest.raises(
            UsageError, match="names 536,870,913 rows of a tensor; at most 536,870,912"
        ):
            link.push_from([1, 1, 2**29 + 1, 0], version=0)


def test_a_model_without_parameters(device: emulator.Device, job_name: str) -> None:
    """It is refused before anything is registered, as by a learner of PyTorch."""
    buffer = [{"name": "mean", "shape": [4], "role": "buffer"}]
    with daemon(job_name, tensors=buffer), Client(job_name) as client:
        with pytest.raises(UsageError, match="has no parameters that require a gradient"):
            devices.choose("cuda").link(client)
        assert not any(flags for _, flags in device.registered.values())


def test_the_loss_of_a_model_without_values(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors={"w": np.zeros((0, 3))}) as client:
        link = devices.choose("cuda").link(client)
        loss = on_device(np.full(1, 0.5, np.float32))
        link.push_from([0] * 4, version=0, loss_at=loss.data.ptr)
        link.flush()
        client.wait_applied()
        assert status(job_name)["learners"][0]["loss"] == 0.5


# -- order ----------------------------------------------------------------------------------------


def test_a_fill_replaces_a_pull(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        link.pull(back)
        link.fill(front)
        assert not link.pulled()
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        link.pull(back)
        eventually(link.pulled)
        assert link.version == 2


def test_both_ways_wait_for_what_is_computed(device: emulator.Device, job_name: str) -> None:
    """A push waits for its gradient, a pull for the last computation that reads its buffer."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        buffer = link.buffer()
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        computed = threading.Event()
        device.compute.add(computed.wait)
        link.pull(buffer)
        link.push(ones(), 0)
        try:
            eventually(lambda: device.waiting == set(link.streams), NOT_WAITING_S)
            assert not link.pulled()
            assert client.current_version == 1
        finally:
            computed.set()
        eventually(link.pulled)
        link.flush()
        client.wait_applied()
        assert client.current_version == 2


def test_a_gradient_that_is_not_wanted(device: emulator.Device, job_name: str) -> None:
    """Cutoff continues with the first of two learners; the other one abandons its gradient."""
    with (
        daemon(job_name, sync="cutoff:c=1"),
        Client(job_name, tensors=tensors()) as client,
        Client(job_name) as other,
    ):
        link = devices.choose("cuda").link(client)
        client.wait_turn()
        other.wait_turn()
        other.push({"w": np.ones(VALUES, np.float32)})
        other.wait_applied()
        eventually(lambda: not client.wanted)
        link.push(ones(), 0)
        client.wait_applied()
        report = status(job_name)
        assert (report["gradients_applied"], report["gradients_dropped"]) == (1, 1)
        link.close()


def test_nothing_is_claimed_while_a_push_is_on_its_way(
    device: emulator.Device, job_name: str
) -> None:
    """Check that what the client itself publishes comes after the push."""
    with (
        daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}),
        Client(job_name, tensors=tensors()) as client,
    ):
        link = devices.choose("cuda").link(client)
        for number, value in enumerate((1, 10, 100, 1000)):
            link.push({"w": on_device(np.full(VALUES, value, np.float32))}, 0)
            if number == 1:
                client.push({"w": np.full(VALUES, 10_000, np.float32)})
        client.abandon()
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["w"], -11_111)
        report = status(job_name)
        assert (report["gradients_applied"], report["gradients_dropped"]) == (5, 1)


@pytest.mark.parametrize("wrong", [{"rate_scale": -1.0}, {"samples": -1}])
def test_facts_are_refused_before_anything_moves(
    device: emulator.Device, job_name: str, wrong: dict[str, Any]
) -> None:
    """The slot stays as it is, and so does what rounding has left over."""
    from cupy.cuda import runtime

    with (
        daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}, slots=1),
        Client(job_name, tensors=tensors(), wire="bfloat16", error_feedback=True) as client,
    ):
        link = devices.choose("cuda").link(client)
        third = {"w": on_device(np.full(VALUES, 1 / 3, np.float32))}
        link.push(third, 0)
        link.flush()
        client.wait_applied()
        slot = client.claim()
        before = ctypes.string_at(slot + layout.PAYLOAD_AT, 2 * VALUES)
        with pytest.raises(UsageError, match=next(iter(wrong))):
            link.push({"w": on_device(np.full(VALUES, 1000.3, np.float32))}, 0, **wrong)
        runtime.deviceSynchronize()
        assert ctypes.string_at(slot + layout.PAYLOAD_AT, 2 * VALUES) == before
        for _ in range(2):
            link.push(third, 0)
        link.flush()
        client.wait_applied()
        np.testing.assert_allclose(client.weights["w"], -1, atol=2**-9)
        assert client.current_version == 3


def test_a_gpu_that_fails_ends_waits(device: emulator.Device, job_name: str) -> None:
    """Check that what was on its way never arrives; waits end with an error."""
    with (
        daemon(job_name, sync="bsp"),
        Client(job_name, tensors=tensors()) as client,
        Client(job_name) as other,  # the barrier waits for it
    ):
        link = devices.choose("cuda").link(client)
        client.wait_turn()
        other.wait_turn()
        link.push(ones(), 0)
        link.flush()
        device.failure = RuntimeError("an illegal address")
        with pytest.raises(DeviceError, match=r"GPU 0 has failed \(CUDA_ERROR_UNKNOWN"):
            client.wait_turn()
        with pytest.raises(DeviceError, match="GPU 0 has failed"):
            link.push(ones(), 0)
        with pytest.raises(DeviceError, match="GPU 0 has failed"):
            link.pulled()
        link.abandon()
        device.failure = None
        device.registered.clear()  # a context that has failed takes them with it


def test_a_gpu_that_fails_while_a_push_is_queued(device: emulator.Device, job_name: str) -> None:
    """Nothing is published of a gradient that has not arrived, even if the driver calls ps_land."""
    failed = threading.Event()
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        link.push(ones(), 0)
        link.flush()
        client.wait_applied()
        before = client.weights["w"].copy()
        device.compute.add(failed.wait)
        link.push(ones(), 0)
        device.failure = RuntimeError("an illegal address")
        failed.set()
        with pytest.raises(emulator.CudaError):
            device.stream(link.streams[0]).synchronize()
        head = _native.load(client.place.ring.word(layout.RING, "head"))
        assert head == 1
        np.testing.assert_array_equal(client.weights["w"], before)
        for failure in (device.failure, None):
            device.failure = failure
            with pytest.raises(DeviceError, match="719" if failure is None else "999"):
                link.flush()
        link.abandon()


def fail(device: emulator.Device, function: str = "", status: int = emulator.UNKNOWN) -> None:
    """Let a function of the driver fail, and the others work."""
    device.fails = lambda name: status if name == function else 0


@pytest.mark.parametrize(
    "function",
    ["cuLaunchKernel", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2", "cuLaunchHostFunc"],
)
def test_a_driver_that_refuses_a_push(
    device: emulator.Device, job_name: str, function: str
) -> None:
    """Nothing is published, and the next push takes the same slot."""
    with (
        daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}, slots=1),
        Client(job_name, tensors=tensors()) as client,
    ):
        link = devices.choose("cuda").link(client)
        link.push(ones(), 0)
        link.flush()
        client.wait_applied()
        fail(device, function)
        with pytest.raises(DeviceError, match=r"GPU 0 has failed \(CUDA_ERROR_UNKNOWN"):
            link.push(ones(), 0)
        fail(device, function, emulator.OUT_OF_MEMORY)
        with pytest.raises(DeviceError, match="GPU 0 is out of memory"):
            link.push(ones(), 0)
        assert client.published == 1
        fail(device)
        link.push(ones(), 0)
        link.close()
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["w"], -2)


def test_a_push_that_fails_behind_its_transfer(device: emulator.Device, job_name: str) -> None:
    """The slot is not claimed again while the device still writes into it."""
    from cupy.cuda import runtime

    computed = threading.Event()

    def fails(name: str) -> int:
        if name == "cuEventSynchronize":  # the host waits
            computed.set()
        return emulator.UNKNOWN if name == "cuLaunchHostFunc" else 0

    with daemon(job_name, slots=1), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        device.compute.add(computed.wait)
        device.fails = fails
        with pytest.raises(DeviceError, match="GPU 0 has failed"):
            link.push(ones(), 0)
        slot = client.claim()
        before = ctypes.string_at(slot + layout.PAYLOAD_AT, 4 * VALUES)
        computed.set()
        runtime.deviceSynchronize()
        assert ctypes.string_at(slot + layout.PAYLOAD_AT, 4 * VALUES) == before
        fail(device)


def test_a_call_that_waits_for_the_function_of_the_driver(
    device: emulator.Device, job_name: str
) -> None:
    """A driver may hold up calls while it calls a function: that publishes without the caller."""
    called: list[str] = []
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:

        def fails(name: str) -> int:
            if called == ["cuLaunchHostFunc"] and name == "cuEventRecord":
                called.append(name)
                with contextlib.suppress(AssertionError):  # which ctypes would drop
                    eventually(lambda: client.current_version, NOT_WAITING_S)
                    called.append("published")
            called.extend([name] if name == "cuLaunchHostFunc" else [])
            return 0

        link = devices.choose("cuda").link(client)
        device.fails = fails
        link.push(ones(), 0)
        assert called == ["cuLaunchHostFunc", "cuEventRecord", "published"]
        assert client.published == 1


def test_another_thread_that_pushes_while_the_driver_is_called(
    device: emulator.Device, job_name: str
) -> None:
    refused: list[str] = []
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:

        def push() -> None:
            with pytest.raises(UsageError) as raised:
                client.push({"w": np.ones(VALUES, np.float32)})
            refused.append(str(raised.value))

        def fails(name: str) -> int:
            if name == "cuLaunchHostFunc":
                other = threading.Thread(target=push)
                other.start()
                other.join()
            return 0

        link = devices.choose("cuda").link(client)
        device.fails = fails
        link.push(ones(), 0)
        link.flush()
        client.wait_applied()
        assert "another thread has claimed a slot" in refused[0]
        assert (client.published, client.current_version) == (1, 1)


def test_a_push_inside_a_call_that_pushes(device: emulator.Device, job_name: str) -> None:
    """Check that it is refused: ps_land would wait for the outer call, as of a signal handler."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        with client._pushing, pytest.raises(UsageError, match="is in a call of this learner"):
            link.push(ones(), 0)
        assert not client.published
        link.push(ones(), 0)
        link.flush()
        client.wait_applied()


def test_a_push_whose_end_cannot_be_recorded(device: emulator.Device, job_name: str) -> None:
    """It is published, and counts; the next call raises."""
    launched: list[str] = []

    def fails(name: str) -> int:
        launched.extend([name] if name == "cuLaunchHostFunc" else [])
        return emulator.UNKNOWN if launched and name == "cuEventRecord" else 0

    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        device.fails = fails
        link.push(ones(), 0)
        assert client.published == 1
        for call in (link.flush, link.check, link.close):
            with pytest.raises(DeviceError, match="GPU 0 has failed"):
                call()
        eventually(lambda: client.current_version == 1)


class Interrupted:
    """A client's native half: Ctrl-C comes when it has given a gradient to the device."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def land(self, *arguments: Any) -> int:
        assert self._learner.land(*arguments) == 0
        raise KeyboardInterrupt


def test_an_interrupt_behind_a_push(
    device: emulator.Device, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient counts, and no other one answers its batch."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        batches = client.batches(samples=4, batch_size=2, epochs=1)
        next(batches)
        with monkeypatch.context() as patch:
            patch.setattr(client, "_learner", Interrupted(client._learner))
            with pytest.raises(KeyboardInterrupt):
                link.push(ones(), 0)
        assert (client.published, client.unanswered) == (1, 0)
        for _ in batches:
            link.push(ones(), 0)
        link.close()
        client.wait_applied()
        assert status(job_name)["gradients_applied"] == 2


def test_a_push_copies_pulled_weights_in_its_launch(device: emulator.Device, job_name: str) -> None:
    given = tensors() | {"table": np.zeros((40, 6), np.float32)}
    with daemon(job_name), Client(job_name, tensors=given) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()
        kept = [on_device(np.arange(3)), on_device(np.ones((3, 6), np.float32)), *ones().values()]
        indices, values, whole = (array.data.ptr for array in kept)
        where = [*whole_at(whole), *rows_at(indices, values, 3)]
        called: list[str] = []

        def refreshed() -> bool:
            link.refresh(back, front)
            return link.current == client.base_version

        def step() -> bool:
            called.clear()
            before = link.current
            link.push_from(where, version=before, kept=kept, refresh=(back, front))
            copied = link.current > before
            link.refresh(back, front)
            return copied and called.count("cuLaunchKernel") == 1

        device.fails = lambda name: called.append(name) or 0  # type: ignore[func-returns-value]
        eventually(step)
        link.flush()
        client.wait_applied()
        eventually(refreshed)
        link.close()
        for name, view in link.views(front).items():
            np.testing.assert_array_equal(view, client.weights[name])


def test_a_driver_that_refuses_a_pull(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()
        fail(device, "cuMemcpyHtoDAsync_v2")
        for call in (link.fill, link.pull):
            client.push({"w": np.ones(VALUES, np.float32)})
            client.wait_applied()
            with pytest.raises(DeviceError, match="GPU 0 has failed"):
                call(back)
        fail(device, "cuLaunchKernel")
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        with pytest.raises(DeviceError, match="GPU 0 has failed"):
            eventually(lambda: link.refresh(back, front))
        fail(device)


def test_pulled_weights_beside_a_push_that_fails(device: emulator.Device, job_name: str) -> None:
    """Unless the launch was made they come with the next one."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()
        link.fill(front)
        client.push({"w": np.ones(VALUES, np.float32)})
        client.wait_applied()
        for function, comes in (("cuLaunchKernel", False), ("cuLaunchHostFunc", True)):
            before = link.current
            link.pull(back)
            device.compute.synchronize()
            eventually(lambda: link._cuda.arrived() == 0)
            fail(device, function)
            with pytest.raises(DeviceError, match="GPU 0 has failed"):
                link.push_from(NONE, version=0, refresh=(back, front))
            assert (link.current > before) == comes
            fail(device)
        link.close()
        assert link.current == client.base_version


def test_a_thread_in_which_another_device_is_current(
    device: emulator.Device, job_name: str
) -> None:
    """The calls of a step have the link's device, and leave the thread with its own."""
    with daemon(job_name), Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        buffer = link.buffer()
        device.contexts.push(9)
        link.fill(buffer)
        link.push_from([buffer.data.ptr, 0, 0, 0], version=0, kept=[buffer])
        link.flush()
        client.wait_applied()
        link.pull(buffer)
        eventually(link.pulled)
        assert device.contexts.current == 9
        device.contexts.pop()


def test_a_job_that_ends_meanwhile(device: emulator.Device, job_name: str) -> None:
    with daemon(job_name) as job, Client(job_name, tensors=tensors()) as client:
        link = devices.choose("cuda").link(client)
        link.push(ones(), 0)
        job.request(StopJob(drain=False))
        with pytest.raises(JobStopped):
            for _ in range(20):
                link.push(ones(), 0)
        link.close()


# -- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_learners_killed_at_any_moment(kind: str, job_name: str) -> None:
    """Each gradient is applied once and whole, or not at all; the next learner finds its place."""
    if kind == "cuda" and (why := cuda_missing()):
        pytest.skip(why)
    command = [sys.executable, str(Path(__file__).with_name("pusher.py")), job_name, kind]
    chance = random.Random(5)
    with (
        daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}, shards=2),
        Client(job_name, tensors=tensors()) as client,
    ):
        for _ in range(4):
            learners = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
            try:
                for learner in learners:
                    assert learner.stdout is not None
                    assert learner.stdout.readline() == b"going\n"
                spin(chance, 0.05)
            finally:
                for learner in learners:
                    learner.send_signal(signal.SIGKILL)
                    learner.wait()
                    assert learner.stdout is not None
                    learner.stdout.close()
            eventually(
                lambda: [row["pid"] for row in status(job_name)["learners"]] == [os.getpid()]
            )
            report = status(job_name)
            np.testing.assert_array_equal(client.weights["w"], -report["gradients_applied"])
            assert report["gradients_applied"] >= 6
            assert not report["gradients_refused"]
