"""Nothing that a stop or a checkpoint has confirmed is lost or doubled, whatever befalls a unit.

WALK_ROUNDS=500 walks long; WALK_SEED=N walks as the run that has printed this seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import booted
import pytest
import versions
from lanes import Counted
from service import install
from walk import Walk

from gadei_ps.kernels import cache

ROUNDS = int(os.environ.get("WALK_ROUNDS", "15"))
SEED = int(os.environ.get("WALK_SEED", "0")) or random.randrange(1, 2**32)


@pytest.fixture
def folder(compiled: None) -> Iterator[Path]:
    if why := booted.impossible():
        pytest.skip(f"no systemd can be booted here: {why}")
    made = Path(tempfile.mkdtemp(prefix="gadei-ps-walk-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.mark.timeout(600 + 120 * ROUNDS)
def test_a_walk(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learners: list[Counted] = []
    with contextlib.ExitStack() as ending:
        ending.callback(lambda: [one.bury() for one in learners if not one.dead])
        manager = ending.enter_context(booted.Booted(cache.base(), folder))
        versions.install(Path(f"/proc/{manager.pid}/root"), tmp_path / "upgraded")
        install(manager)
        walk = Walk(manager, folder, "walk", SEED)
        learners = walk.learners
        with capsys.disabled():
            print(f"\nWALK_SEED={SEED}", flush=True)
            begun = time.monotonic()
            for number in range(ROUNDS):
                done = walk.step()
                seconds = time.monotonic() - begun
                print(f"{number + 1} {done}: {seconds:.0f} s", flush=True)
            total = walk.finish()
            print(f"{ROUNDS} rounds, {len(walk.learners)} learners, {total} gradients confirmed")
