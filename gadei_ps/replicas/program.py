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
    """What every replica of the run starts.

    module: is started with the path of the data, whose form it knows. needs: a package that it
    imports. device: auto, cuda or host. digest: of the data, and of all that the module is told.
    """

    module: str
    needs: str
    device: str
    digest: str

    def told(self) -> dict[str, Any]:
        """As JSON knows it."""
        return asdict(self)

    def mistake(self) -> str | None:
        """Why this host cannot start it, in one line."""
        if importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed there: pip install 'gadei-ps[{self.needs}]'"
        return None

    def command(self, data: str) -> list[str]:
        """Of one learner. data: path of the data on this host."""
        return process.module_command(self.module, data)


class Data:
    """A file in memory: it ends with the processes that have it open, and only its owner can."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def of(cls, data: Bytes) -> Data:
        """With these bytes."""
        made = cls(os.memfd_create("gadei-ps-data", os.MFD_CLOEXEC))
        with os.fdopen(os.dup(made._file), "wb") as stream:
            stream.write(np.ascontiguousarray(data).data)
        return made

    @classmethod
    def at(cls, path: str) -> Data:
        """The same file as another process has. Raises UsageError if that has ended."""
        try:
            return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise UsageError(f"the data of the replica are gone: {error.strerror}") from None

    @property
    def path(self) -> str:
        """For other processes of this user, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def read(self) -> Bytes:
        """The bytes."""
        return np.fromfile(self.path, np.uint8)
