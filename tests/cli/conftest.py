"""Fixtures for tests of the command line."""

from __future__ import annotations

import sys
import textwrap

import pytest
from shell import Cli

LEARNER = """
    import os, pathlib, signal, sys, time
    import numpy as np
    from gadei_ps.learners.client import Client

    epochs, lost = int(sys.argv[1]), sys.argv[2:]
    index, learners = (os.environ.get(f"GADEI_PS_LEARNER{s}", s) for s in ("", "S"))
    here = pathlib.Path(__file__).parent
    with Client(tensors={"w": np.zeros(8)}) as client:
        (here / f"attached.{index}").touch()
        while learners.isdigit() and len(list(here.glob("attached.*"))) < int(learners):
            time.sleep(0.001)
        for batch in client.batches(samples=40, batch_size=4, epochs=epochs):
            client.push({"w": -np.ones(8)}, samples=len(batch.indices), loss=1.0)
            time.sleep(0.001)  # what starts meanwhile needs the cores
            if client.published == 3 and index in lost:
                os.kill(os.getpid(), signal.SIGKILL)
    print("done", client.published)
"""


@pytest.fixture
def learner(cli: Cli) -> list[str]:
    """A command, python learner.py. Append the epochs and the indices of learners to kill.

    Learners of `run` wait for each other before they begin, so that each of them gets work.
    """
    file = cli.directory / "learner.py"
    file.write_text(textwrap.dedent(LEARNER))
    return [sys.executable, str(file)]
