"""Jobs whose learners on a GPU are killed, find it full, or break it; and whose servers die.

Each published gradient is in the weights exactly once: under SGD with a rate of 1, a gradient of
ones subtracts 1 from every weight. GPU_EMULATED=1 runs the same tests on the emulated device too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from shell import Cli
from support import (
    QuickDaemon,
    config,
    eventually,
    live_weights,
    quick,
    ring_of,
    segments,
    spin,
    status,
)

from gadei_ps import _native
from gadei_ps.benchmarks.gpu import mps
from gadei_ps.errors import GadeiError
from gadei_ps.job import faults
from gadei_ps.job.faults import Processes
from gadei_ps.machine.cuda import missing as cuda_missing
from gadei_ps.memory import layout

HERE = Path(__file__).parent
EMULATED = ["emulated"] if os.environ.get("GPU_EMULATED") else []
KINDS = [*EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)]
VALUES = {"emulated": 100_000, "cuda": 4_000_000}  # 16 MB: a transfer takes some 0.3 ms
ROUNDS = 3  # of three kills; two more follow
OTHERS_BYTES = 64 << 20  # device memory that other processes may take or free meanwhile
SLOW_S = 5.0  # after which a process that should end prints where it is
COMMANDS_S = 90.0  # longest time of a training command
EXAMPLE = HERE.parents[1] / "examples" / "intents.csv"
PASSED = re.compile("GADEI|CUDA_MPS")  # variables of the environment
OPTIONS = {  # of a learner
    "steps": 0,  # after which it ends
    "long_after": -2,  # steps, after which it launches a kernel of `long_s`
    "long_s": 20.0,
    "fails_after": 0,  # steps, after which the device fails
    "how": "",
    "has_buffer": False,  # whether its model has one
    "go": "",  # file that it waits for before it joins the job
    "full": False,  # whether the emulated device is
}


def driver_log() -> str:
    """Return what NVIDIA's driver has logged last, if it can be read, and what uses the GPU."""
    commands = {
        "dmesg": "NVRM|Xid",
        "nvidia-smi --query-gpu=utilization.gpu,pstate --format=csv": "",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv": "",
    }
    found = []
    for command, wanted in commands.items():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=10)
            lines = (done.stdout + done.stderr).splitlines()
            found += [command, *[line for line in lines if re.search(wanted, line)][-20:]]
    return "\n".join(found)


class Forks:
    """The process that forks the learners of this file's tests. kind: emulated or cuda."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self._directory = directory
        self._number = 0
        command = [sys.executable, str(HERE / "forked_learners.py"), kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "forked_learners.py has ended"
        return line.strip()

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return json.loads(self._answer().replace("None", "null"))

    def start(self, job: str, program: str, **options: Any) -> Fork:
        """Start a program of forked_learners.py."""
        self._number += 1
        output = self._directory / f"{self._number}"
        plain = {"job": job, "number": self._number, "values": VALUES[self.kind]}
        request = {
            "program": program,
            "output": str(output),
            "environment": {name: one for name, one in os.environ.items() if PASSED.search(name)},
            "options": OPTIONS | plain | options,
        }
        ends_after = options.get("steps") or options.get("fails_after") or 0
        return Fork(self, job, self.ask(request), output, ends_after)

    def free_bytes(self) -> int:
        """Return the free memory of the device."""
        asked = self.start("", "free")
        assert asked.end() == 0, asked.printed
        return int(asked.printed.split()[1])

    def close(self) -> None:
        self._process.communicate()


class Fork:
    """A learner, or another process that Forks has started."""

    def __init__(self, forks: Forks, job: str, pid: int, output: Path, ends_after: int) -> None:
        """ends_after: gradients that it publishes if it ends by itself."""
        self._forks = forks
        self._ends_after = ends_after
        self._job = job
        self.pid = pid
        self._output = output
        self._ring: Any = None
        self.code: int | None = None

    @property
    def printed(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def where(self) -> str:
        """Return where its threads are, if it runs, and what it has printed."""
        if self.has_ended():
            return f"{self.pid} has ended with {self.code}: {self.printed}"
        lines = [f"{self.pid} runs:"]
        # Before the signal, which may wake a thread.
        for path in sorted(Path(f"/proc/{self.pid}/task").glob("*/*")):
            if path.name in ("comm", "stat", "wchan", "syscall", "stack"):
                with contextlib.suppress(OSError):
                    lines.append(f"  thread {path.parent.name}, {path.name}: {path.read_text()}")
        quick.print_stacks(self.pid, lambda: self.printed)
        return "\n".join([*lines, self.printed])

    def has_printed(self, word: str) -> bool:
        assert not self.has_ended(), self.printed
        return word in self.printed.split()

    def has_ended(self) -> bool:
        if self.code is None:
            self.code = self._forks.ask({"pid": self.pid})
        return self.code is not None

    def end(self) -> int:
        """Wait for its end; return its exit code, negative for a signal."""
        with contextlib.suppress(AssertionError):
            eventually(self.has_ended, SLOW_S)
        if not self.has_ended():
            print("ends slowly:", self.where(), driver_log(), sep="\n")
        eventually(self.has_ended, what=lambda: f"{self.pid} does not end: {self.printed}")
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    @property
    def published(self) -> int:
        """Gradients that it has published, also after its death."""
        if self._ring is None:
            row = support.learner(self._job, self.pid)
            if row is None:
                return self._ends_after if self.has_ended() else 0
            self._ring = ring_of(self._job, row["row"])
        return _native.load(self._ring.word(layout.RING, "head"))

    def reaches(self, gradients: int) -> None:
        """Wait until it has published so many."""

        def reached() -> bool:
            assert not self.has_ended(), self.printed
            return self.published >= gradients

        eventually(reached, what=lambda: f"{self.published} published: {self.printed}")

    def goes_on(self, gradients: int = 10) -> None:
        self.reaches(self.published + gradients)


@pytest.fixture(scope="module", params=KINDS)
def forks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    if request.param == "cuda" and (why := cuda_missing()):
        pytest.skip(why)
    made = Forks(request.param, tmp_path_factory.mktemp("learners"))
    yield made
    made.close()


class Job:
    """A job of one tensor, and its learners, which are killed at the end."""

    def __init__(self, forks: Forks, name: str, **how: Any) -> None:
        self.forks, self.name = forks, name
        usual = {
            "tensors": [{"name": "w", "shape": [VALUES[forks.kind]]}],
            "shards": 2,
            "standby": False,
        }
        self.daemon = QuickDaemon(config(name, **(usual | how)))
        self._forked: list[Fork] = []

    def __enter__(self) -> Job:
        self.daemon.__enter__()
        self.control = Processes(self.name).control
        self.weights = live_weights(self.name)[: VALUES[self.forks.kind]]
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is not None:
                print(*(one.where() for one in self._forked), driver_log(), sep="\n")
                with contextlib.suppress(GadeiError):  # whether the server or a learner waits
                    print(json.dumps(status(self.name), indent=1))
        finally:
            for one in self._forked:
                one.kill()
            self.daemon.__exit__(None, None, None)

    def start(self, program: str, **options: Any) -> Fork:
        made = self.forks.start(self.name, program, **options)
        self._forked.append(made)
        return made

    def settle(self) -> None:
        """End all learners; check that each gradient is applied once, and that nothing is left."""
        for one in self._forked:
            one.kill()
        roster = self.control["roster"]
        eventually(lambda: (roster["retired"] == roster["generation"]).all(), what="all have left")
        eventually(lambda: not [one for one in segments(self.name) if "ring" in one])
        expected = sum(one.published for one in self._forked)
        np.testing.assert_array_equal(self.weights, -expected)
        now = status(self.name)
        assert now["gradients_applied"] == expected
        assert now["gradients_dropped"] == now["gradients_refused"] == 0
        assert expected < 2**24, "whole numbers that float32 holds"


def test_learners_killed_while_kernels_and_transfers_run(
    forks: Forks, job_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last of them while a kernel of seconds runs."""
    chance = random.Random(7)
    with Job(forks, job_name) as job:
        for _ in range(ROUNDS):
            learners = [job.start(program) for program in ("torch", "pipeline", "torch")]
            for learner in learners:
                learner.reaches(3)
            for learner in learners:
                spin(chance, 0.05)
                learner.kill()
        learners = [job.start(program, long_after=3) for program in ("torch", "pipeline")]
        for learner in learners:
            learner.reaches(3)
            eventually(lambda learner=learner: learner.has_printed("long"))
            begin = time.monotonic()
            learner.kill()
            with capsys.disabled():
                print(f"\nkilled in a long kernel: ended after {time.monotonic() - begin:.2f} s")
            assert learner.published == 3
        for learner in [job.start(program, steps=20) for program in ("torch", "pipeline")]:
            assert learner.end() == 0, learner.printed
            assert learner.published == 20
        job.settle()


@pytest.mark.alone
def test_a_gpu_that_another_process_has_filled(forks: Forks, job_name: str, tmp_path: Path) -> None:
    """New learners end with a line, those that are there continue; then there is room again.

    Killed learners have also freed their memory.
    """
    free = forks.free_bytes()
    with Job(forks, job_name) as job:
        others = [job.start("torch"), job.start("host")]
        for other in others:
            other.reaches(3)
        waiting = job.start("torch", go=str(tmp_path / "go"), full=True)
        eventually(lambda: waiting.has_printed("waiting"))  # its model is on the GPU
        hog = forks.start(job_name, "hog")
        try:
            eventually(lambda: hog.has_printed("full"))
            (tmp_path / "go").touch()
            late = job.start("pipeline", full=True)
            for learner in (waiting, late):
                assert learner.end() == 1, learner.printed
                line = learner.printed.splitlines()[-1]
                assert re.search(
                    r"DeviceError: GPU 0 is out of memory: a learner needs [\d.,]+ MiB for", line
                ), learner.printed
                assert learner.printed.count("Error: ") == 1, learner.printed
            for other in others:
                other.goes_on()
        finally:
            hog.kill()
        for learner in [job.start(program, steps=10) for program in ("torch", "pipeline")]:
            assert learner.end() == 0, learner.printed
        for other in others:
            other.goes_on()
        job.settle()
    eventually(lambda: forks.free_bytes() >= free - OTHERS_BYTES)


FAILING = {
    "assert": ("torch", r"DeviceError: GPU 0 has failed \(.*"),
    "address": ("pipeline", r"DeviceError: GPU 0 has failed \(.*"),
    "queued": ("pipeline", r"DeviceError: GPU 0 has failed \(.*"),
    "script": ("torch", r"(Runtime|Accelerator|Cuda)Error: "),
}


@pytest.mark.parametrize("sync", ["asp", "bsp"])
def test_learners_that_break_the_device(forks: Forks, sync: str, job_name: str) -> None:
    """They end with an exit code. Their gradients of before count, and the others continue."""
    tensors: list[dict[str, Any]] = [{"name": "w", "shape": [VALUES[forks.kind]]}]
    tensors.append({"name": "seen", "shape": [8], "role": "buffer"})
    with Job(forks, job_name, sync=sync, tensors=tensors) as job:
        other = job.start("pipeline" if sync == "asp" else "torch", has_buffer=True)
        failing = {
            how: job.start(program, how=how, fails_after=5, has_buffer=True)
            for how, (program, _) in FAILING.items()
            if sync == "asp" or program == "torch"  # a pipeline would be ahead of the barrier
        }
        other.reaches(3)
        for how, learner in failing.items():
            line = FAILING[how][1]
            assert learner.end() == 1, learner.printed
            assert re.search(line, learner.printed), learner.printed
            ignored = re.findall("Exception ignored in.*", learner.printed)
            # CuPy says so of each module that it cannot unload from a device that has failed.
            assert all("cupy.cuda.function.Module" in one for one in ignored), learner.printed
            assert "terminate called" not in learner.printed, learner.printed
        other.goes_on()
        if sync == "asp":
            job.settle()
        else:  # a superstep applies the mean
            other.kill()
            roster = job.control["roster"]
            eventually(lambda: (roster["retired"] == roster["generation"]).all())
            assert (job.weights == job.weights[0]).all()
            assert job.weights[0] == np.rint(job.weights[0]) <= -5
            assert not status(job_name)["gradients_refused"]


def test_servers_killed_while_learners_push(forks: Forks, job_name: str) -> None:
    with Job(forks, job_name, standby=True) as job:
        processes = Processes(job_name)
        learners = [job.start(program) for program in ("torch", "pipeline")]
        for learner in learners:
            learner.reaches(3)
        chance = random.Random(3)
        for both in (False, False, False, True):
            standby = eventually(processes.standby)
            spin(chance, 0.02)
            sent = faults.send(eventually(processes.server), signal.SIGKILL)
            assert sent
            if both:
                faults.send(standby, signal.SIGKILL)
            for learner in learners:
                learner.goes_on()
        assert status(job_name)["server_deaths"] >= 4
        job.settle()


SCRIPT = """
import os, torch
from gadei_ps.learners.torch import Optimizer

device = "cuda" if os.environ["GADEI_PS_DEVICE"] == "cuda" else "cpu"
torch.manual_seed(0)
inputs = torch.randn(512, 10, device=device)
targets = (inputs.sum(1) > 0).long()
layers = torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 2)
model = torch.nn.Sequential(*layers)
model.to(device)
optimizer = Optimizer(model, lr=0.1)
for batch in optimizer.batches(len(inputs), 16, epochs=10):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs[batch.indices]), targets[batch.indices])
    loss.backward()
    optimizer.report(loss=loss)
    optimizer.step()
optimizer.close()
model.eval()
right = (model(inputs).argmax(1) == targets).float().mean().item()
assert right > 0.8, right
"""


@pytest.mark.parametrize(
    "device", [*(["host"] if EMULATED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_commands_from_start_to_end(
    cli: Cli, device: str, job_name: str, interpreters: None
) -> None:
    """Three learners on one GPU, and the classifier, at the same time."""
    if device == "cuda" and (why := cuda_missing()):
        pytest.skip(why)
    cli.patience_s = max(cli.patience_s, COMMANDS_S)
    (cli.directory / "script.py").write_text(SCRIPT)
    run = ["run", job_name, "--device", device, "--learners", 3, "--json"]
    running = [cli.start(*run, "--", sys.executable, "script.py")]
    for model in ("ensemble", "cnn"):
        train = ["train", EXAMPLE, "--device", device, "--epochs", 1, "--model", model, "--json"]
        job = f"{job_name}-{model}"
        running.append(cli.start(*train, "--out", cli.directory / model, "--job", job))
    results = [one.wait() for one in running]
    for result in results:
        assert result.code == 0, result
    ran, *trained = [result.json for result in results]
    assert [one["exit_code"] for one in ran["ended"]] == [0, 0, 0]
    assert (ran["gradients_applied"], ran["restarts"]) == (320, 0)
    assert ran["gradients_refused"] == ran["gradients_dropped"] == 0
    for summary in trained:
        assert summary["device"] == device
        assert summary["gradients_applied"] > 0
        assert summary["gradients_refused"] == summary["gradients_dropped"] == 0


# -- NVIDIA MPS ----------------------------------------------------------------------------------

CONTINUES, HANGS = "continues", "hangs"
FATE_S = 10.0  # in which a learner publishes FATE_GRADIENTS, or fails
FATE_GRADIENTS = 50
MPS_LONG_S = 5.0  # of a kernel: it cannot be interrupted, perhaps
TERMINATED = "terminated by terminate_client"
KILLED, KILLED_LONG = "killed in short kernels", "killed in a long kernel"
BY_ERROR = re.compile(
    r"ends with 1: \S*(DeviceError: GPU 0 has failed|(Runtime|Accelerator|CUDA\w+)Error: )"
)


def fate(learner: Fork) -> str:
    """Return whether a learner continues, hangs, or how it ends."""
    begin, until = learner.published, time.monotonic() + FATE_S
    while time.monotonic() < until:
        if learner.has_ended():
            errors = re.findall(r"^[\w.]+Error: .*", learner.printed, re.MULTILINE)
            return f"ends with {learner.code}: {errors[-1] if errors else learner.printed}"
        if learner.published >= begin + FATE_GRADIENTS:
            return CONTINUES
        time.sleep(0.01)
    return HANGS


def kill_under_mps(job: Job, how: str, service: dict[str, str], seen: dict[str, str]) -> None:
    """Kill one of three learners on a GPU; add to `seen` what becomes of all."""
    target = job.start("torch", long_after=3 if how == KILLED_LONG else -2, long_s=MPS_LONG_S)
    others = {program: job.start(program) for program in ("torch", "pipeline")}
    for learner in (target, *others.values()):
        learner.reaches(3)
    server = mps.ask(service, "get_server_list").strip()
    clients = mps.ask(service, f"get_client_list {server}").split()
    seen[f"{how}: it uses the service"] = str(str(target.pid) in clients)
    begin = time.monotonic()
    if how == TERMINATED:
        answer = mps.ask(service, f"terminate_client {server} {target.pid}")
        seen[f"{how}: the service"] = answer.strip()
        seen[f"{how}: it"] = fate(target)
    elif how == KILLED_LONG:
        eventually(lambda: target.has_printed("long"))
    target.kill()
    seen[f"{how}: it has ended"] = f"after {time.monotonic() - begin:.1f} s"
    for program, other in others.items():
        seen[f"{how}: another, {program}"] = fate(other)
    late = job.start("torch")
    seen[f"{how}: a new one"] = fate(late)
    for program, other in others.items():
        if other.code is None:
            seen[f"{how}: another, {program}, later"] = fate(other)
    for learner in (late, *others.values()):
        learner.kill()


@pytest.mark.timeout(120)
def test_a_learner_killed_under_mps(
    forks: Forks, job_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others continue, or end with an error and can be started again.

    Their gradients count exactly once. NVIDIA promises nothing for the others after a kill, but
    after terminate_client.
    """
    if forks.kind == "emulated":
        pytest.skip("the emulated device has no MPS")
    if why := mps.missing():
        pytest.skip(why)
    ran_before = mps.running()
    seen: dict[str, str] = {}
    try:
        with Job(forks, job_name) as job:
            host = job.start("host")
            for how in (TERMINATED, KILLED, KILLED_LONG):
                with mps.directories() as service, mps.started(service):
                    for name, path in service.items():
                        monkeypatch.setenv(name, path)
                    kill_under_mps(job, how, service, seen)
                host.goes_on()
            with mps.directories() as service, mps.started(service):
                for name, path in service.items():
                    monkeypatch.setenv(name, path)
                job.start("pipeline").reaches(3)
                job.settle()
    finally:
        with capsys.disabled():
            print("", *(f"{what}: {one}" for what, one in seen.items()), sep="\n")
    assert BY_ERROR.match(seen[f"{TERMINATED}: it"])
    fates = [one for what, one in seen.items() if "another" in what or "a new one" in what]
    assert not [one for one in fates if one != CONTINUES and not BY_ERROR.match(one)]
    assert {one for what, one in seen.items() if "uses" in what} == {"True"}
    assert ran_before or not mps.running()
