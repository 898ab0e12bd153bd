"""Training scripts of examples/scripts/, run in forks of this process, which has loaded torch."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch  # noqa: F401  (a fork need not load it)

from support.processes import fork
from support.waiting import PATIENCE_S

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"


def _run(pipe: Connection, name: str, words: list[str]) -> None:
    """A child: sends what the script prints, and the error that ends it. It is told variables."""
    os.environ |= pipe.recv()
    path = SCRIPTS / f"{name}.py"
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(SCRIPTS))
    warnings.resetwarnings()  # pytest's filter is the tests', not the script's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    said = io.StringIO()
    error = ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
            traceback.print_exc()
    pipe.send((said.getvalue(), error))


def outputs(
    name: str, words: list[str], learners: list[Mapping[str, str]]
) -> list[tuple[str, str]]:
    """Of one script, once for each of these sets of variables and all at once: output and error."""
    with fork(len(learners), _run, name, words) as team:
        for child, variables in zip(team, learners, strict=True):
            child.send(dict(variables))
        return [child.receive(4 * PATIENCE_S) for child in team]


def figures(name: str, words: list[str], learners: list[Mapping[str, str]]) -> list[float]:
    """The figures that the runs end with. Raises AssertionError where one ends with an error."""
    found = []
    for output, error in outputs(name, words, learners):
        assert not error, output
        found.append(float(output.split()[-1]))
    return found
