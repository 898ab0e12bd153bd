"""DataLoader with the job's batches: every sample once an epoch, whoever dies."""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from shell import Cli
from support import PATIENCE_S, daemon, eventually, fork, live_weights, status
from support.processes import gone
from support.torch_models import one_thread as one_thread
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gadei_ps.errors import UsageError
from gadei_ps.learners.torch import Optimizer

ROWS, BATCH, EPOCHS = 63, 4, 3
BATCHES = -(-ROWS // BATCH)


class Rows(Dataset[torch.Tensor]):
    """Row n has a one at n, so that its gradient counts it at weight n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(number), ROWS).float()


def counting_model() -> nn.Module:
    model = nn.Linear(ROWS, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def train(model: nn.Module, optimizer: Optimizer, loader: Iterable[torch.Tensor]) -> list[int]:
    """One pass. Returns the rows that it has answered."""
    seen: list[int] = []
    for rows in loader:
        optimizer.zero_grad()
        model(rows).sum().backward()
        optimizer.step()
        seen += rows.argmax(1).tolist()
    return seen


def each_row_was_counted(job: str, times: int) -> None:
    counted = live_weights(job)[:ROWS]
    np.testing.assert_array_equal(counted, np.full(ROWS, -times, np.float32))


def _learn(pipe: Connection, job: str, workers: int, fixed: bool, slowly: bool) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = counting_model()
    optimizer = Optimizer(model, job)
    sampler = optimizer.sampler(Rows(), BATCH, epochs=EPOCHS, seed=5)
    loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)
    pids: list[int] = []
    counts: list[Counter[int]] = []
    for _ in range(EPOCHS) if fixed else sampler.passes():
        counts.append(Counter())
        batches = iter(loader)
        pids += [one.pid for one in getattr(batches, "_workers", [])]
        if slowly:
            pipe.send(pids)
        for rows in batches:
            if slowly and len(counts) == 2:
                pipe.recv()  # it is killed here, with batches in flight
            counts[-1].update(train(model, optimizer, [rows]))
    optimizer.close()
    pipe.send(counts)


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:2"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_row_once_an_epoch(workers: int, sync: str, job_name: str) -> None:
    """Also with loops of a fixed number of passes, as frameworks have them."""
    with (
        daemon(job_name, sync=sync) as job,
        fork(2, _learn, job_name, workers, True, False) as learners,
    ):
        found = [one.receive() for one in learners]
        assert all(len(one) == EPOCHS for one in found)
        total = sum((count for one in found for count in one), Counter())
        assert total == Counter(dict.fromkeys(range(ROWS), EPOCHS))
        if sync != "bsp":  # where a gradient is the mean of those of both
            each_row_was_counted(job_name, EPOCHS)
        report = status(job_name)
        assert (report["gradients_applied"], report["samples"]) == (EPOCHS * BATCHES, EPOCHS * ROWS)
        job.check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_whoever_dies(workers: int, sync: str, job_name: str) -> None:
    """Killed with batches in flight, which its DataLoader has asked for ahead."""
    with daemon(job_name, sync=sync) as job:
        with fork(1, _learn, job_name, workers, False, True) as (victim,):
            victim.receive()
            pids = victim.receive()
            eventually(lambda: status(job_name)["gradients_applied"] >= BATCHES)
            with fork(1, _learn, job_name, workers, False, False) as (other,):
                eventually(lambda: len(status(job_name)["learners"]) == 2)
                victim.kill()
                other.receive()
            if sync != "bsp":
                each_row_was_counted(job_name, EPOCHS)
            assert status(job_name)["gradients_applied"] == EPOCHS * BATCHES
        # DataLoader's workers see by themselves that their parent is dead.
        eventually(lambda: all(map(gone, pids)))
        job.check()


def test_a_learner_that_dies_after_the_others_were_done(job_name: str) -> None:
    """passes() waits for it, and does what it has left."""
    with daemon(job_name, ahead=2) as job, fork(1, _learn, job_name, 2, False, True) as (victim,):
        victim.receive()
        pids = victim.receive()
        with fork(1, _learn, job_name, 2, False, False) as (other,):
            # All that is left is in the victim's hands.
            eventually(lambda: status(job_name)["gradients_applied"] >= EPOCHS * BATCHES - 5)
            assert not other.has_sent
            victim.kill()
            other.receive()
        each_row_was_counted(job_name, EPOCHS)
        eventually(lambda: all(map(gone, pids)))
        job.check()


def test_a_loop_that_is_left_early(job_name: str) -> None:
    """Check that batches that DataLoader had requested come again, here or at another learner."""
    with daemon(job_name) as job:
        model = counting_model()
        optimizer = Optimizer(model, job_name)
        sampler = optimizer.sampler(Rows(), BATCH, epochs=EPOCHS)
        assert len(sampler) == BATCHES
        sampler.set_epoch(7)
        for workers in (0, 2, 0):
            loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)
            assert len(loader) == BATCHES
            first = next(iter(loader))  # as a script that looks at the shapes does
            assert first.shape == (BATCH, ROWS)
        seen: list[int] = []
        for _ in sampler.passes():
            seen += train(model, optimizer, DataLoader(Rows(), batch_sampler=sampler))
        assert Counter(seen) == Counter(dict.fromkeys(range(ROWS), EPOCHS))
        optimizer.close()
        each_row_was_counted(job_name, EPOCHS)
        job.check()


@pytest.mark.parametrize(("sync", "steps"), [("asp", 3), ("wsp:D=0,s_local=2", 1)])
def test_a_loop_that_is_left_between_two_steps(sync: str, steps: int, job_name: str) -> None:
    """The mini-batches that no push has answered come again, and count once."""
    with daemon(job_name, sync=sync) as job:
        model = counting_model()
        optimizer = Optimizer(model, job_name)
        sampler = optimizer.sampler(Rows(), BATCH, epochs=EPOCHS, accumulate=steps)
        passes = 0
        for _ in sampler.passes():
            passes += 1
            for number, rows in enumerate(DataLoader(Rows(), batch_sampler=sampler), 1):
                model(rows).sum().backward()
                if number % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                if passes == 1 and number == 5:
                    break
        assert passes == EPOCHS + 1
        optimizer.close()
        each_row_was_counted(job_name, EPOCHS)
        job.check()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("sync", "steps"), [("asp", 3), ("wsp:D=0,s_local=2", 1)])
def test_several_mini_batches_a_step(workers: int, sync: str, steps: int, job_name: str) -> None:
    """Accumulate in the script, or in a wave; the rest of an epoch is cut into as many."""
    with daemon(job_name, sync=sync) as job:
        model = counting_model()
        optimizer = Optimizer(model, job_name)
        sampler = optimizer.sampler(Rows(), BATCH, epochs=EPOCHS, accumulate=steps)
        loader = DataLoader(Rows(), batch_sampler=sampler, num_workers=workers)
        assert len(loader) == 3 * 6
        for _ in sampler.passes():
            for number, rows in enumerate(loader, 1):
                model(rows).sum().backward()
                if number % steps == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            assert number == 3 * 6
        optimizer.close()
        each_row_was_counted(job_name, EPOCHS)
        job.check()


def test_rows_that_fill_no_batch(job_name: str) -> None:
    with daemon(job_name) as job:
        model = counting_model()
        optimizer = Optimizer(model, job_name)
        sampler = optimizer.sampler(Rows(), BATCH, epochs=EPOCHS, drop_last=True)
        loader = DataLoader(Rows(), batch_sampler=sampler)
        assert len(loader) == ROWS // BATCH
        for _ in sampler.passes():
            seen = train(model, optimizer, loader)
            assert len(seen) == len(set(seen)) == ROWS - 3
        train(model, optimizer, [torch.zeros(1, ROWS)])  # data of its own, after all batches
        optimizer.close()
        job.check()


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(int, 1)


def test_what_is_refused(job_name: str) -> None:
    """Refuse it in one line that says what to do."""
    with daemon(job_name):
        model = counting_model()
        optimizer = Optimizer(model, job_name)
        with pytest.raises(UsageError, match=r"sampler\(Endless\): give a dataset that has"):
            optimizer.sampler(Endless(), BATCH, epochs=1)
        with pytest.raises(UsageError, match="the last 1 of 63 samples do not fill 2 mini-batches"):
            optimizer.sampler(Rows(), 31, epochs=1, accumulate=2)
        sampler = optimizer.sampler(Rows(), 2, epochs=1, sized=False)
        with pytest.raises(TypeError, match="has no length"):
            len(DataLoader(Rows(), batch_sampler=sampler))
        with pytest.raises(UsageError, match="16 batches of the sampler wait for their steps"):
            iter(DataLoader(Rows(), batch_sampler=sampler, num_workers=2, prefetch_factor=9))
        train(model, optimizer, DataLoader(Rows(), batch_sampler=sampler))
        optimizer.close()
        each_row_was_counted(job_name, 1)


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import gadei_ps.learners.torch

if __name__ == "__main__":
    model = torch.nn.Linear(4, 2)
    optimizer = gadei_ps.learners.torch.Optimizer(model, kind="sgd", lr=0.01)
    data = TensorDataset(torch.randn(40, 4), torch.zeros(40, dtype=torch.long))

    def train(epochs, workers=2, **how):
        loader = DataLoader(data, num_workers=workers, **how)
        for _ in range(epochs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

    train(1, batch_size=4, shuffle=True, multiprocessing_context="fork")
    kept = {"persistent_workers": True}
    # Each imports PyTorch, so there is one.
    train(2, 1, batch_size=4, shuffle=True, multiprocessing_context="spawn", **kept)
    train(2, batch_sampler=optimizer.sampler(data, 4, epochs=2), **kept)
"""


@pytest.mark.timeout(5 * PATIENCE_S)
def test_workers_under_run(cli: Cli, job_name: str) -> None:
    """Start workers of DataLoader, forked, spawned and persistent: they are not learners."""
    (cli.directory / "script.py").write_text(SCRIPT)
    script = [sys.executable, "script.py"]
    result = cli(
        "run", job_name, "--learners", 2, "--json", "--", *script, patience_s=4 * PATIENCE_S
    )
    assert result.code == 0, result
    assert result.json["gradients_applied"] == 2 * 10 * (1 + 2) + 10 * 2
    assert [one["exit_code"] for one in result.json["ended"]] == [0, 0]
