"""The count of instructions: a shard dies at each one, and so does each server that recovers it.

What SIGKILL may leave is known without a sample: the memory after each instruction that stores into
it. Every such image is recovered once, and must become what an undisturbed run leaves, to the last
bit. What the recovery stores gives further images, those of second and later deaths, until none is
new. steps.c says how.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection

import numpy as np
import paths
import pytest
import stepper
from paths import EVERY, SECOND, Path
from stepper import DIFFERENT, Stepper
from support import Child, Rig

from gadei_ps.kernels.optimizers import WireType
from gadei_ps.memory.layout import CHUNK, IDLE, NO_BATCH
from gadei_ps.server import recover

SUBSET = [
    Path("dense", "sgd", WireType.FLOAT32),
    Path("dense", "adam", WireType.FLOAT16),
    Path("rows", "momentum", WireType.BFLOAT16),
    Path("rows", "adamw", WireType.FLOAT32),
    Path("rows", "add", WireType.FLOAT16),
    Path("superstep", "nesterov", WireType.FLOAT16),
    Path("superstep", "adagrad", WireType.BFLOAT16),
    Path("refused", "adam", WireType.FLOAT32),
    Path("dropped", "sgd", WireType.BFLOAT16),
    Path("leaves", "adam", WireType.FLOAT32),
    Path("last", "nesterov", WireType.BFLOAT16),
    Path("after1", "momentum", WireType.FLOAT16),
    Path("after2", "sgd", WireType.FLOAT32),
    Path("assign", "sgd", WireType.FLOAT32),
    Path("assign", "adam", WireType.FLOAT32, 2, 1),
    Path("add", "adam", WireType.FLOAT32),
    Path("reset", "adam", WireType.FLOAT32),
    Path("last slot", "adamw", WireType.FLOAT32),
    Path("alone", "nesterov", WireType.FLOAT32),
    Path("dense", "nesterov", WireType.BFLOAT16, 2, 1),
]
WHOLE = bool(os.environ.get("CRASH_ALL"))
ENOUGH = 50  # wrong images; each may lead to more for ever


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if platform.machine() != "x86_64" or not shutil.which("cc"):
        pytest.skip("needs an x86-64 processor and a C compiler")
    return stepper.build(tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def figures(report: list[str]) -> Iterator[Counter[str]]:
    """Yield the counts of all paths; the line is printed at the end."""
    counted: Counter[str] = Counter()
    yield counted
    report.append(
        "instructions: {paths} paths, {instructions} instructions, {first} images of first deaths, "
        "{later} of second and later ones, {recovered} recovered, {wrong} wrong".format_map(counted)
    )


@pytest.mark.parametrize("path", [*EVERY, *SECOND] if WHOLE else SUBSET, ids=str)
def test_every_death_is_recovered(
    path: Path, library: ctypes.CDLL, figures: Counter[str], job_name: str
) -> None:
    with paths.rig_of(job_name, path) as rig:
        right = paths.by_numpy(rig, path, paths.set_out(rig, path))
        with Stepper(library, rig, path.index) as steps:
            steps.first(every=True)
            for mine, wanted in zip(rig.kept(), right, strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=2e-5, atol=2e-6)
            instructions = steps.told.instructions
            wrong = list(islice(steps.wrong(), ENOUGH))
            totals = steps.told
    figures.update(
        paths=1,
        instructions=instructions,
        first=totals.deaths[1],
        later=totals.images - totals.deaths[1],
        recovered=totals.runs - 1,
        wrong=totals.wrong,
    )
    assert not wrong, f"{len(wrong)} of {totals.runs - 1} images:\n" + "\n".join(wrong[:5])


LOST = [
    Path("dense", "adam", WireType.FLOAT32),
    Path("dense", "momentum", WireType.FLOAT16),
    Path("rows", "sgd", WireType.FLOAT32),
    Path("rows", "adamw", WireType.BFLOAT16),
]
PIECES = {"dense": range(0, 128, CHUNK), "rows": [0, 48, 96]}  # where they begin


class Accounts:
    """Counts of a rig's gradients, and the batches that are to be answered."""

    def __init__(self, rig: Rig) -> None:
        control, entry, record = rig.control, rig.roster[0], rig.state["record"][0]
        self.applied = int(control["past_applied"]) + int(entry["applied"])
        self.refused = int(control["past_refused"]) + int(entry["refused"])
        self.consumed = int(rig.state["applied"][0, 0])
        self.version = int(control["version"])
        self.steps, self.torn = int(record["steps"]), int(record["torn"])
        batches = rig.roster["outstanding"]
        waiting = control["requeue"][: int(control["requeued"])]
        self.batches = sorted([*batches[batches != NO_BATCH].tolist(), *waiting.tolist()])


@pytest.mark.parametrize("path", LOST, ids=str)
def test_the_ring_is_lost_with_the_server(path: Path, library: ctypes.CDLL, job_name: str) -> None:
    """The frame is in the weights up to a piece, counts once, and its batch is answered or not."""
    with paths.rig_of(job_name, path) as rig:
        paths.set_out(rig, path)
        rig.roster[0]["wanted"] = 0
        batch, old, before = paths.batch_of(rig, 0), rig.kept(), Accounts(rig)
        with Stepper(library, rig) as steps:
            steps.first(every=False)
            new, ends = rig.kept(), Counter[str]()
            for outcome in steps.without_ring():
                assert outcome.endswith("came to rest"), outcome
                now = Accounts(rig)
                begun, torn = now.consumed - before.consumed, now.torn - before.torn
                applied, refused = now.applied - before.applied, now.refused - before.refused
                refused -= refused > 0  # the departure from a broken ring counts as one
                assert applied + refused == begun == now.version - before.version, outcome
                assert begun == now.steps - before.steps and torn <= refused <= 1, outcome
                answered = {batch} if applied else set()
                assert now.batches == sorted(set(before.batches) - answered), outcome
                assert int(rig.state["record"]["cursor"][0]) == IDLE, outcome
                done = _changed(rig.kept(), old, new, PIECES[path.way])
                ends[done, applied, refused, torn] += 1
            partly = {end for end in ends if end[0].startswith("below")}
            assert partly == {(f"below {at}", 0, 1, 1) for at in PIECES[path.way][1:]}, ends
            # Counted before the death; all of it changed, but not counted yet; not begun.
            whole = {("all", 1, 0, 0), ("all", 0, 1, 0), ("none", 0, 0, 0), ("none", 0, 1, 1)}
            assert set(ends) - partly == whole, ends


def _changed(
    now: list[np.ndarray], old: list[np.ndarray], new: list[np.ndarray], pieces: Iterable[int]
) -> str:
    """Return which pieces have changed: all, none, or those before one; others are unchanged."""
    for first in [0, *pieces, now[0].size]:
        if all(
            (one[:first] == after[:first]).all() and (one[first:] == before[first:]).all()
            for one, before, after in zip(now, old, new, strict=True)
        ):
            rest = any(
                (before[first:] != after[first:]).any()
                for before, after in zip(old, new, strict=True)
            )
            return "none" if first == 0 else f"below {first}" if rest else "all"
    raise AssertionError("a piece is neither old nor new")


def _die(pipe: Connection, steps: Stepper, store: int) -> None:
    steps.first(every=False, die=store)


def test_images_are_what_sigkill_leaves(library: ctypes.CDLL, job_name: str) -> None:
    """A process that is killed after a store leaves the image that was noted for that store."""
    path = Path("dense", "adam", WireType.FLOAT32)
    with paths.rig_of(job_name, path) as rig:
        paths.set_out(rig, path)
        with Stepper(library, rig) as steps:
            trail = np.zeros((1000, 2), np.uint64)
            steps.first(every=True, trail=trail)
            changed = np.flatnonzero(trail.any(axis=1))
            assert changed.size > 50
            for store in changed[:: changed.size // 8]:
                child = Child(_die, steps, int(store) + 1)
                assert child.join() == -signal.SIGKILL
                assert steps.hash() == trail[store].tolist()


def test_a_server_that_does_not_recover_is_noticed(library: ctypes.CDLL, job_name: str) -> None:
    path = Path("dense", "momentum", WireType.FLOAT32)
    with paths.rig_of(job_name, path) as rig:
        paths.set_out(rig, path)
        with Stepper(library, rig, code=recover.can_recover) as steps:
            steps.first(every=False)
            wrong = list(islice(steps.wrong(), ENOUGH))
            assert steps.told.wrong == len(wrong) == ENOUGH
            assert any(stepper.ENDS[DIFFERENT] in one for one in wrong), wrong
