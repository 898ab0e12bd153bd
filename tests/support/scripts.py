"""Training scripts of examples/, run in forks of a process that has loaded what they import."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from support.processes import Child, fork
from support.waiting import PATIENCE_S

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"


def _run(pipe: Connection, name: str, words: list[str]) -> None:
    """Run as a child: send what the script prints, and the error that ends it."""
    os.environ |= pipe.recv()
    path = SCRIPTS / f"{name}.py"
    sys.argv = [str(path), *words]
    sys.path.insert(0, str(SCRIPTS))
    warnings.resetwarnings()  # pytest's filter is the tests', not the script's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    output = io.StringIO()
    error = ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
            traceback.print_exc()
    pipe.send((output.getvalue(), error))


def outputs(
    name: str, words: list[str], learners: list[Mapping[str, str]]
) -> list[tuple[str, str]]:
    """Run a script once for each set of variables, all at once; return output and error.

    If it is killed, the error is its exit code.
    """
    with fork(len(learners), _run, name, words) as team:
        for child, variables in zip(team, learners, strict=True):
            child.send(dict(variables))
        return [_output(child) for child in team]


def _output(child: Child) -> tuple[str, str]:
    try:
        found: tuple[str, str] = child.receive(4 * PATIENCE_S)
    except EOFError:
        return "", f"ended with {child.join()}"
    return found


class Loaded:
    """A fork of this process with more that is loaded, in a framework's tests: so this stays small.

    imports: statements.
    """

    def __init__(self, imports: str) -> None:
        self._child = Child(_serve, imports)

    def outputs(
        self, name: str, words: list[str], learners: list[Mapping[str, str]]
    ) -> list[tuple[str, str]]:
        """Run like the function of this name; it sees this process's variables."""
        self._child.send((name, words, [os.environ | one for one in learners]))
        found: list[tuple[str, str]] = self._child.receive(8 * PATIENCE_S)
        return found

    def close(self) -> None:
        self._child.kill()


def _serve(pipe: Connection, imports: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)  # threads would be missing in its forks
    warnings.resetwarnings()
    exec(imports, {})
    while True:
        pipe.send(outputs(*pipe.recv()))


def figures(name: str, words: list[str], learners: list[Mapping[str, str]]) -> list[float]:
    """The figures that the runs end with. Raises AssertionError where one ends with an error."""
    found = []
    for output, error in outputs(name, words, learners):
        assert not error, output
        found.append(float(output.split()[-1]))
    return found
