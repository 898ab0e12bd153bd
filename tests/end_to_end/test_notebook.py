"""Learners and jobs in interactive interpreters: python -i, IPython, and Jupyter's kernel."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import PATIENCE_S, daemon, eventually, gone, interactive, segments, status
from support.interactive import Interactive, Kernel

from gadei_ps.job import paths
from gadei_ps.memory import presence

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"python": "sys", "ipython": "IPython", "jupyter": "ipykernel"}

BEGIN = """
import sys, time, warnings
import numpy as np, torch
import gadei_ps
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
def train(steps, loud=False):
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        if loud and number == 3:
            print("un" + "der way", flush=True)
"""
UNDER_WAY = "under way"


@pytest.fixture(params=list(NEEDS))
def shell(
    request: pytest.FixtureRequest, tmp_path: Path, runtime_dir: Path
) -> Iterator[Interactive]:
    if importlib.util.find_spec(NEEDS[request.param]) is None:
        pytest.skip(f"{NEEDS[request.param]} is not installed")
    made = interactive.start(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def kernel(runtime_dir: Path) -> Iterator[Kernel]:
    pytest.importorskip("ipykernel")
    made = Kernel()
    yield made
    made.close()


def ended(job: str) -> bool:
    return not segments(job) and not paths.socket_path(job).exists()


def answer(output: str, name: str) -> str:
    """Return what `name=...` prints."""
    found = re.findall(rf"{name}=(\S+)", output)
    assert found, output
    return found[0]


def test_attach_train_interrupt_detach_again(shell: Interactive, job_name: str) -> None:
    """Twice in one process, with a job that somebody else serves. Under BSP: a learner that is left
    behind would stop the others."""
    with daemon(job_name, sync="bsp", optimizer={}):
        assert "Error" not in shell.run(BEGIN)
        for _ in range(2):
            output = shell.run(f"optimizer = Optimizer(model, {job_name!r}, lr=0.1)\ntrain(5)")
            assert "Error" not in output
            output = shell.run("train(10**9, loud=True)", interrupt_at=UNDER_WAY)
            assert "KeyboardInterrupt" in output
            before = status(job_name)["version"]
            assert "Error" not in shell.run("train(5)")
            assert status(job_name)["version"] >= before + 5
            assert [one["pid"] for one in status(job_name)["learners"]] == [shell.pid]
            assert "Error" not in shell.run("optimizer.close(); optimizer.close()")
            eventually(lambda: not status(job_name)["learners"])
            output = shell.run(
                "with torch.no_grad(): model[0].weight += 1\nprint('a=' + 'written')"
            )
            assert answer(output, "a") == "written"
            assert "detached from its job; attach again" in shell.run("train(1)")


def test_the_same_cell_twice(shell: Interactive, job_name: str) -> None:
    """Run it twice: with the same model the learner is replaced; else the old one leaves."""
    with daemon(job_name, sync="bsp", optimizer={}):
        cell = f"optimizer = Optimizer(model, {job_name!r}, lr=0.1)\ntrain(3)"
        assert "Warning" not in shell.run(BEGIN) + shell.run(cell)
        assert "Error" not in shell.run(cell)
        output = shell.run(
            "saved = optimizer.state_dict()\nsaved['param_groups'][0]['lr'] = 0.5\n"
            "optimizer.load_state_dict(saved)"
        )
        assert output.count("Warning") == 1
        assert "load_state_dict sets this learner's learning rate" in output
        assert "learners/" not in output, "it names the cell, and no file of ours"
        again = "model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))\n"
        for _ in range(2):
            assert "Error" not in shell.run(again + cell)
            eventually(lambda: len(status(job_name)["learners"]) == 1)
        client = f"client = Client({job_name!r})\nclient.push({{}})"
        for _ in range(2):
            assert "Error" not in shell.run("optimizer.close()\n" + client)
            eventually(lambda: len(status(job_name)["learners"]) == 1)
        assert "Error" not in shell.run("client.detach()")  # or the job's end waits for it


def test_a_job_of_its_own(shell: Interactive, job_name: str) -> None:
    """Served, trained, interrupted, stopped; and two of them at once."""
    one, two = f"{job_name}-1", f"{job_name}-2"
    plain = "standby=False, history=False"
    assert "Error" not in shell.run(BEGIN)
    output = shell.run(f"job = gadei_ps.serve({one!r}, sync='bsp', {plain})\nprint(job)")
    assert f"<gadei_ps job '{one}': served by this process>" in output
    assert "Error" not in shell.run("optimizer = Optimizer(model, lr=0.1)\ntrain(5)")
    assert "KeyboardInterrupt" in shell.run("train(10**9, loud=True)", interrupt_at=UNDER_WAY)
    assert status(one)["learners"], "the interrupt is not the job's"
    output = shell.run(
        f"""
with gadei_ps.serve({two!r}, {plain}):
    other = torch.nn.Linear(3, 2)
    second = Optimizer(other, lr=0.5)
    for _ in range(3):
        other(torch.ones(4, 3)).sum().backward()
        second.step()
        second.zero_grad()
    train(5)
    print("jobs=" + optimizer.client.job + "," + second.client.job)
    print("un" + "der way", flush=True)
    time.sleep(1000)
""",
        interrupt_at=UNDER_WAY,
    )
    assert "KeyboardInterrupt" in output
    assert answer(output, "jobs") == f"{one},{two}"
    assert ended(two)
    output = shell.run("print('gone=' + str(second.client.left) + str(optimizer.client.left))")
    assert answer(output, "gone") == "TrueFalse"
    assert "Error" not in shell.run("other.weight.data += 1\ntrain(5)")
    assert "serves job" in shell.run(f"gadei_ps.serve({one!r})"), "the cell once more"
    assert "Error" not in shell.run("job.stop()")
    assert ended(one)


def test_a_shell_that_is_killed(shell: Interactive, job_name: str) -> None:
    """Restart a kernel: the other learners continue, and a job that it serves ends."""
    own = f"{job_name}-own"
    with daemon(job_name, sync="bsp", optimizer={}):
        assert "Error" not in shell.run(BEGIN)
        cells = f"""
job = gadei_ps.serve({own!r}, standby=False, history=False)
other = Optimizer(torch.nn.Linear(3, 2))
optimizer = Optimizer(model, {job_name!r}, lr=0.1)
train(5)
"""
        assert "Error" not in shell.run(cells)
        pids = [status(own)["watchdog_pid"], *presence.server_pids(own)]
        shell.kill()
        for pid in pids:
            eventually(lambda pid=pid: gone(pid))
        eventually(lambda: ended(own))
        eventually(lambda: not status(job_name)["learners"])
        assert status(job_name)["learner_deaths"] == 1


@pytest.mark.parametrize("now", [True, False], ids=["killed", "asked"])
def test_a_kernel_is_restarted(kernel: Kernel, now: bool, job_name: str) -> None:
    """A job that it serves ends; one that is kept continues, though a kernel that is asked to end
    first ends all processes that it has started."""
    kept = f"{job_name}-kept"
    plain = "standby=False, history=False"
    serve_kept = f"job = gadei_ps.serve({kept!r}, keep=True, {plain})"
    assert "Error" not in kernel.run(BEGIN)
    output = kernel.run(f"{serve_kept}\noptimizer = Optimizer(model, lr=0.1)\ntrain(5)")
    assert "Error" not in output
    assert "Error" not in kernel.run(f"own = gadei_ps.serve({job_name!r}, {plain})")
    pids = [status(kept)["watchdog_pid"], *presence.server_pids(kept)]
    kernel.restart(now=now)
    eventually(lambda: not segments(f"{job_name}.") and not paths.socket_path(job_name).exists())
    eventually(lambda: not status(kept)["learners"])
    assert [status(kept)["watchdog_pid"], *presence.server_pids(kept)] == pids
    assert "Error" not in kernel.run(BEGIN)
    assert "Error" not in kernel.run(f"{serve_kept}\noptimizer = Optimizer(model)\ntrain(5)")
    assert status(kept)["gradients_applied"] == 10
    assert "Error" not in kernel.run("job.stop()")
    assert ended(kept)


def test_autoreload(kernel: Kernel, tmp_path: Path, job_name: str) -> None:
    """A module of the user's is changed while its model is trained."""
    source = tmp_path / "mine_of_a_notebook.py"
    text = (
        "import torch\nclass Net(torch.nn.Linear):\n    factor = {}\n"
        "    def forward(self, x):\n        return super().forward(x) * self.factor\n"
    )
    source.write_text(text.format(1))
    with daemon(job_name, optimizer={}):
        kernel.run("%load_ext autoreload\n%autoreload 2")
        assert "Error" not in kernel.run(BEGIN)
        begin = (
            f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport mine_of_a_notebook as mine"
        )
        make = (
            f"model = mine.Net(3, 2)\noptimizer = Optimizer(model, {job_name!r}, lr=0.1)\ntrain(2)"
        )
        assert "Error" not in kernel.run(f"{begin}\n{make}")
        source.write_text(text.format(10))
        output = kernel.run("train(2); print(f'factor={model.factor}')")
        assert answer(output, "factor") == "10"
        optimizer_of = "print('client=' + str(type(optimizer.client) is Client))"
        assert answer(kernel.run(optimizer_of), "client") == "True"
        assert "Error" not in kernel.run(make)
        assert len(status(job_name)["learners"]) == 1
        assert "Error" not in kernel.run("optimizer.close()")


def test_the_example(job_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """examples/notebook.ipynb, in short, from its first cell to its last."""
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setenv("STEPS", "20")
    folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear it before you commit"
    resources = {"metadata": {"path": str(tmp_path)}}
    # Its time-outs are whole seconds.
    nbclient.NotebookClient(
        notebook, resources=resources, startup_timeout=int(PATIENCE_S)
    ).execute()
    output = "".join(
        one.get("text", "") for cell in notebook.cells for one in cell.get("outputs", ())
    )
    assert "after 60 gradients" in output
