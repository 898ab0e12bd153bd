"""Learners on a device, each a process: python forked_learners.py emulated|cuda

Reads requests, a JSON object on each line, and forks a learner for each: importing PyTorch takes
seconds, and happens once. No process that has initialized CUDA forks. A learner ends as a script
does: by its exception, with what Python and the libraries do at the end of a process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))

import emulator
import numpy as np
import torch

from gadei_ps import _native
from gadei_ps.learners import devices
from gadei_ps.learners.client import Client
from gadei_ps.learners.pipeline import Pipeline
from gadei_ps.learners.torch import Optimizer, casts, gpu_backend
from gadei_ps.memory import layout

KIND = sys.argv[1]
IS_EMULATED = KIND == "emulated"
NODE = "/dev/nvidia0"
BUSY_S = 0.005  # longest kernel of a usual step
PAUSE_S = 0.001  # between the gradients of a learner on the host
CHUNKS = [1 << 30, 1 << 26, 1 << 21]  # of memory that is taken (bytes)
LEAST_FREE = 32 << 20  # a learner needs twice as much
POLL_S = 0.01
QUEUED_S = 0.2  # of a kernel before one that fails, while a push is queued behind it
STILL_S = 8.0  # after which a learner that publishes nothing prints what it waits for
# Not by clock64(), a counter of each multiprocessor: a kernel that was interrupted, as by a fault
# of another process, may continue where it is lower, and would spin until it has caught up.
SPIN = """
extern "C" __global__ void spin(long long nanoseconds)
{
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begin < (unsigned long long)nanoseconds);
}
extern "C" __global__ void bad(long long address) { *(volatile int *)address = 1; }
"""

Options = SimpleNamespace
"""Keywords of test_faults.OPTIONS, and job, number, values."""


# -- processes -----------------------------------------------------------------------------------


def load() -> None:
    """Load what the learners import late. Begin again without it if that initializes CUDA."""
    if len(sys.argv) > 2:
        return
    importlib.import_module("torch._dynamo")
    if not IS_EMULATED:
        importlib.import_module("cupy")
    if any(name.startswith("/dev/nvidia") for name in opened_files()):
        os.execv(sys.executable, [sys.executable, *sys.argv, "late"])


def opened_files() -> Iterator[str]:
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            yield str(path.readlink())


def serve() -> dict[str, Any]:
    """Fork a process for each request; return the request in the fork."""
    load()
    faulthandler.register(signal.SIGUSR1)  # a fork then prints where all of its threads are
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # else the driver initializes the GPU again and again
        os.open(NODE, os.O_RDWR)
    print("ready", flush=True)
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "pid" in request:
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else None, flush=True)
            continue
        pid = os.fork()
        if not pid:
            return dict(request)
        print(pid, flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Make this fork a process of its own."""
    _native.die_with_parent(signal.SIGKILL)
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(fd, number)
    os.environ.update(request["environment"])


def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(POLL_S)


# -- devices -------------------------------------------------------------------------------------


@contextlib.contextmanager
def device(*, inline: bool) -> Iterator[emulator.Device | None]:
    """The emulated device, or none for that of CUDA. inline: PyTorch computes."""
    if not IS_EMULATED:
        yield None
        return
    with emulator.installed(inline=inline) as made:
        made.foreign = inline
        if inline:
            gpu_backend.is_on_gpu = lambda tensor: True  # type: ignore[assignment]
            gpu_backend.current_stream = lambda device: 0  # type: ignore[assignment]
        yield made


class Faults:
    """Kernels that take long, and kernels that fail.

    emulated: the device, if it is emulated.
    """

    def __init__(self, options: Options, emulated: emulator.Device | None) -> None:
        self._options = options
        self._emulated = emulated
        self._chance = random.Random(options.number)
        self._kernels: Any = None

    def before(self, step: int) -> None:
        """Launch what the stream computes before the gradient of a step."""
        options = self._options
        is_long = step == options.long_after + 1
        if is_long and self._emulated is not None:  # PyTorch computes at once there
            print("long", flush=True)
        self.spin(options.long_s if is_long else self._chance.random() * BUSY_S)
        if is_long and self._emulated is None:
            print("long", flush=True)

    def spin(self, seconds: float) -> None:
        if self._emulated is not None:
            self._emulated.compute.add(lambda: time.sleep(seconds))
        else:
            self._launch("spin", int(seconds * 1e9))

    def _launch(self, name: str, argument: int) -> None:
        import cupy

        if self._kernels is None:
            self._kernels = cupy.RawModule(code=SPIN)
        # On CUDA's default stream, on which both PyTorch and CuPy compute here.
        self._kernels.get_function(name)((1,), (1,), (np.int64(argument),))

    def fail(self) -> None:
        """Let the device fail, and wait until it has, unless a push is to be queued before."""
        if self._options.how == "queued":
            self.spin(QUEUED_S)
            if self._emulated is not None:
                failure = RuntimeError("an illegal address")
                self._emulated.compute.add(lambda: setattr(self._emulated, "failure", failure))
            else:
                self._launch("bad", 16)
            return
        if self._emulated is not None:
            self._emulated.failure = RuntimeError("an illegal address")
            casts.copy = _copy_from_failed  # PyTorch's memory is on the device as well
        elif self._options.how == "assert":
            row = torch.tensor([9], device="cuda")
            print(torch.zeros(4, device="cuda")[row].shape)
        else:
            self._launch("bad", 16)
        if self._options.how == "script":
            _raise_as_torch(self._emulated)
        with contextlib.suppress(RuntimeError):
            if self._emulated is None:
                torch.cuda.synchronize()


def _copy_from_failed(tensor: torch.Tensor, dtype: str = "") -> NoReturn:
    raise emulator.CudaError("cudaErrorUnknown")


def _raise_as_torch(emulated: emulator.Device | None) -> None:
    """Raise what PyTorch raises at the first call that notices."""
    if emulated is not None:
        emulated.check()
    print(torch.ones(1, device="cuda").item())


# -- learners ------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """One parameter, whose gradient is one everywhere. has_buffer: and a buffer that changes."""

    def __init__(self, values: int, *, has_buffer: bool) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(values))
        if has_buffer:
            self.register_buffer("seen", torch.zeros(8))

    def forward(self) -> torch.Tensor:
        for buffer in self.buffers():
            buffer += 1
        return self.w.sum()


def watch(client: Client, link: Any) -> None:
    """Have a thread print, while the learner publishes nothing, how far CUDA is.

    0 is done, 600 is not; else it is CUDA's error.
    """

    def look() -> None:
        from cupy.cuda import runtime

        before = -1
        while not client.left:
            head = _native.load(client.place.ring.word(layout.RING, "head"))
            if head == before:
                events = f"published {link._cuda.published()}, arrived {link._cuda.arrived()}"
                streams = [runtime.streamQuery(one) for one in (0, *link.streams)]
                line = f"head {head} of {client.published}, events: {events}"
                print(f"still: {line}, compute, push, pull: {streams}", flush=True)
            before = head
            time.sleep(STILL_S)

    if not IS_EMULATED:
        threading.Thread(target=look, daemon=True).start()


def learn_by_torch(options: Options) -> None:
    with device(inline=True) as emulated:
        model = Model(options.values, has_buffer=options.has_buffer)
        model.to("cpu" if IS_EMULATED else "cuda")
        if options.go:
            print("waiting", flush=True)
            wait_for(options.go)
        if options.full and emulated is not None:
            emulated.has_context, emulated.total = True, 1 << 17
        optimizer = Optimizer(model, options.job)
        watch(optimizer.client, optimizer.backend._link)  # type: ignore[attr-defined]
        faults = Faults(options, emulated)
        for step in steps(options):
            optimizer.zero_grad()
            faults.before(step)
            model().backward()
            optimizer.step()
            if step == options.fails_after:
                optimizer.client.wait_applied()
                faults.fail()
                optimizer.step()
        optimizer.close()


def learn_by_pipeline(options: Options) -> None:
    with device(inline=False) as emulated:
        if options.full and emulated is not None:
            emulated.total = 0
        client = Client(options.job)
        faults = Faults(options, emulated)
        with client, Pipeline(client, devices.choose("cuda")) as pipeline:
            watch(client, pipeline._link)
            for step in steps(options):
                pipeline.weights()
                gradients = pipeline.gradients()
                faults.before(step)
                gradients["w"].fill(1)
                pipeline.push(gradients)
                if step == options.fails_after:
                    pipeline.flush()
                    client.wait_applied()
                    faults.fail()
                    pipeline.push(gradients)
                    pipeline.flush()


def learn_on_the_host(options: Options) -> None:
    client = Client(options.job)
    ones = {"w": np.ones(options.values, np.float32)}
    for _ in steps(options):
        client.push(ones)
        time.sleep(PAUSE_S)
    client.detach()


def steps(options: Options) -> Iterator[int]:
    """Count from 1, to options.steps unless that is 0."""
    return iter(range(1, options.steps + 1)) if options.steps else itertools.count(1)


def fill_the_device(options: Options) -> NoReturn:
    """Take all memory of the device but a few MiB, until this process is killed."""
    if not IS_EMULATED:
        from cupy.cuda import runtime

        for size in CHUNKS:
            with contextlib.suppress(runtime.CUDARuntimeError):
                while True:
                    runtime.malloc(size)
        free, _ = runtime.memGetInfo()
        assert free <= LEAST_FREE, f"{free} bytes are free"
    print("full", flush=True)
    while True:
        signal.pause()


def report_free_memory(options: Options) -> None:
    free = 0
    if not IS_EMULATED:
        from cupy.cuda import runtime

        free, _ = runtime.memGetInfo()
    print(f"free {free}", flush=True)


PROGRAMS: dict[str, Callable[[Options], None]] = {
    "torch": learn_by_torch,
    "pipeline": learn_by_pipeline,
    "host": learn_on_the_host,
    "hog": fill_the_device,
    "free": report_free_memory,
}

request = serve()
become(request)
PROGRAMS[request["program"]](Options(**request["options"]))
