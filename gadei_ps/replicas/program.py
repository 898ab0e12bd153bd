"""Learners that a run brings along: a module of gadei-ps, and the data that it is started with."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import UsageError
from gadei_ps.job.control import memory_file
from gadei_ps.machine import process

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Program:
    """The program that every replica of the run starts.

    module: is started with the path of the data, whose form it knows. needs: a package that it
    imports. device: auto, cuda or host. digest: of the data, and of all settings of the module.
    """

    module: str
    needs: str
    device: str
    digest: str

    def as_dict(self) -> dict[str, Any]:
        """Return the program, for JSON."""
        return asdict(self)

    def mistake(self) -> str | None:
        """Return why this host cannot start the program, in one line, or None."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed there: pip install 'gadei-ps[{self.needs}]'"
        return None

    def command(self, data: str) -> list[str]:
        """Return the command of one learner. data: path of the data on this host."""
        return process.module_command(self.module, data)


def kept(data: Bytes) -> str:
    """Keep the bytes in memory; return a path for processes of this user, while this one lives."""
    return _path(memory_file(data.nbytes, [(0, data.data)]))


def opened(path: str) -> str:
    """Open the file of another process, and return a path as `kept` does.

    Raises UsageError if that process has ended.
    """
    try:
        return _path(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise UsageError(f"the data of the replica are gone: {error.strerror}") from None


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"
