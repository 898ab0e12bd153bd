"""Learners that a run brings along: a module of gadei-ps, and the data that it is started with."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import UsageError
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


class Data:
    """A file in memory: it ends with the processes that have it open, and only its owner can."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def of(cls, data: Bytes) -> Data:
        """Make a file with these bytes."""
        made = cls(os.memfd_create("gadei-ps-data", os.MFD_CLOEXEC))
        with os.fdopen(os.dup(made._file), "wb") as stream:
            stream.write(np.ascontiguousarray(data).data)
        return made

    @classmethod
    def at(cls, path: str) -> Data:
        """Open the file of another process. Raises UsageError if that has ended."""
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise UsageError(f"the data of the replica are gone: {error.strerror}") from None

    @property
    def path(self) -> str:
        """Path of the file for other processes of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> Bytes:
        """Return the bytes."""
        return np.fromfile(self.path, np.uint8)
