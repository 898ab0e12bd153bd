"""`--device` and `--gpus`: the environment of learners. No GPU is needed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import support
from shell import FOREVER, Cli, is_running, learning, program

from gadei_ps.machine import gpus
from gadei_ps.machine.cuda import has_cupy

pytestmark = pytest.mark.usefixtures("compiled", "two_gpus")

NAMES = ("GADEI_PS_LEARNER", "GADEI_PS_DEVICE", gpus.VISIBLE, gpus.ORDER)
# One write, so that the output of learners does not mix.
SHOW = (
    f"import json, os; found = [os.environ.get(name) for name in {NAMES}]; "
    "os.write(1, json.dumps(found).encode() + bytes([10]))"
)
LISTED = "GPU 0: NVIDIA H200 (UUID: GPU-a)\nGPU 1: NVIDIA H200 (UUID: GPU-b)"
BUS = "PCI_BUS_ID"


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, by a fake nvidia-smi."""
    for name in NAMES[1:]:
        monkeypatch.delenv(name, raising=False)
    tool = program(tmp_path / "bin/nvidia-smi", f"print({LISTED!r})")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def shown(out: str) -> list[list[str | None]]:
    """The output of learners, in their order, without the numbers before it."""
    lines = [re.sub(r"^\[\d+\] ", "", line) for line in out.splitlines()]
    return sorted(json.loads(line) for line in lines if line.startswith("["))


@pytest.mark.parametrize(
    ("flags", "env", "seen"),
    [
        ("", {}, [["auto", "0", BUS], ["auto", "1", BUS], ["auto", "0", BUS]]),
        ("--gpus 1", {}, [["auto", "1", BUS]] * 3),
        (
            "--gpus 1,0",
            {gpus.VISIBLE: "2,GPU-b"},
            [["auto", "GPU-b", None], ["auto", "2", None], ["auto", "GPU-b", None]],
        ),
        ("--device host", {gpus.VISIBLE: "1"}, [["host", "", None]] * 3),
        ("", {"GADEI_PS_DEVICE": "host"}, [["host", "", None]] * 3),
        ("", {gpus.VISIBLE: ""}, [["auto", "", None]] * 3),
    ],
    ids=["all in turn", "one", "among the callers", "host", "host by variable", "hidden"],
)
def test_learners_get_gpus_in_turn(
    cli: Cli, job_name: str, flags: str, env: dict[str, str], seen: list[list[str | None]]
) -> None:
    command = ["run", job_name, "--learners", 3, *flags.split()]
    result = cli(*command, "--", sys.executable, "-c", SHOW, **env)
    assert "no learner joined" in result.err
    assert shown(result.out) == [[str(index), *one] for index, one in enumerate(seen)]
    if not has_cupy():
        assert ("learners compute on the host" in result.err) == (seen[0][0] == "auto")


STAGES = """
import torch
from gadei_ps.learners.virtual import VirtualWorker

layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
with VirtualWorker(layers, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) as worker:
    worker.train(torch.ones(2, 3), torch.ones(2, 1), torch.nn.functional.mse_loss)
    print([f"{one.place.device}:{one.place.cores}" for one in worker._stages])
"""


def test_devices_for_the_stages_of_a_virtual_worker(cli: Cli, job_name: str) -> None:
    """Hide both GPUs from PyTorch: the worker uses shares of its CPU threads."""
    pytest.importorskip("torch")
    run = ["run", job_name, "--devices-per-learner", 2, "--sync", "wsp:D=0,s_local=1"]
    (cli.directory / "stages.py").write_text(STAGES)
    one = cli(*run, "--", sys.executable, "stages.py", OMP_NUM_THREADS="2")
    assert one.code == 0, one
    assert one.out == "['cpu:1', 'cpu:1']\n"
    assert "this learner computes on the host: of its GPUs (0,1) PyTorch" in one.err
    several = cli(*run, "--learners", 2, "--gpus", "1,0", "--", sys.executable, "-c", SHOW)
    assert shown(several.out) == [["0", "auto", "1,0", BUS], ["1", "auto", "1,0", BUS]]
    assert "gadei-ps: 2 x 2 devices on 2 GPUs: some are shared" in several.err
    run[3] = 3
    assert cli(*run, "--", "true").error == (
        "--devices-per-learner 3: GPUs that a learner can get are 0, 1; give at most 2, or "
        "--device host"
    )
    assert not is_running(job_name)


def test_started_again_it_keeps_its_gpu(cli: Cli, job_name: str) -> None:
    die = "; i = os.environ['GADEI_PS_LEARNER']; i == '1' and os.kill(os.getpid(), 9)"
    command = ["run", job_name, "--learners", 2, "--restart", 2]
    result = cli(*command, "--", sys.executable, "-c", SHOW + die)
    assert "started again" in result.err
    assert shown(result.out) == [["0", "auto", "0", BUS]] + [["1", "auto", "1", BUS]] * 3


def test_attach_goes_on_in_turn(cli: Cli, job_name: str, learner: list[str]) -> None:
    show = ["--", sys.executable, "-c", SHOW]
    cli.serve(job_name)
    assert shown(cli("attach", job_name, *show).out) == [["0", "auto", "0", BUS]]
    running = cli.start("run", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 1))
    assert shown(cli("attach", job_name, *show).out) == [["1", "auto", "1", BUS]]
    given = cli("attach", job_name, "--gpus", "0", "--json", *show)
    assert shown(given.err) == [["1", "auto", "0", BUS]]
    hidden = cli("attach", job_name, "--device", "host", *show)
    assert shown(hidden.out) == [["1", "host", "", None]]
    both = cli("attach", job_name, "--devices-per-learner", 2, *show)
    assert shown(both.out) == [["1", "auto", "1,0", BUS]]
    assert cli("attach", job_name, "--gpus", "2", *show).error == (
        "--gpus 2: there is no GPU 2; nvidia-smi shows 0, 1"
    )
    running.signal(signal.SIGINT)


def test_broken_driver(cli: Cli, job_name: str, tmp_path: Path) -> None:
    program(tmp_path / "bin/nvidia-smi", "raise SystemExit('driver and library differ')")
    show = ["--", sys.executable, "-c", SHOW]
    result = cli("run", job_name, *show)
    assert "warning: nvidia-smi fails: driver and library differ" in result.err
    assert shown(result.out) == [["0", "auto", None, None]]
    for flags in (["--gpus", "0"], ["--device", "cuda"]):
        refused = cli("run", job_name, "--json", *flags, *show)
        assert refused.error == "nvidia-smi fails: driver and library differ"
        assert refused.json["kind"] == "DeviceError"


@pytest.mark.parametrize("command", ["run {} --json -- true", "train none.csv --json --job {}"])
@pytest.mark.parametrize("flags", ["--device cuda", "--device cuda --gpus 1"])
def test_cuda_that_cannot_be_used(cli: Cli, job_name: str, command: str, flags: str) -> None:
    """The error comes before any process starts and before the data is read."""
    (cli.directory / "cupy").mkdir()
    (cli.directory / "cupy/__init__.py").write_text("raise ImportError('libcudart is gone')")
    first, *rest = command.format(job_name).split()
    result = cli(first, *flags.split(), *rest, PYTHONPATH=str(cli.directory))
    assert result.code == 1
    assert result.error.startswith("device cuda: ")
    assert "libcudart is gone" in result.error
    assert result.json["kind"] == "DeviceError"
    assert not is_running(job_name)
