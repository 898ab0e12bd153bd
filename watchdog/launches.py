"""Numbers of learners: what each command that starts learners of a job has reserved."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypedDict

from gadei_ps.job.control import Launch
from gadei_ps.machine import process


class Numbers(TypedDict):
    """First of the reserved numbers, and the count of other learners."""

    first: int
    others: int


class Started(TypedDict):
    """Learners that a command has started, for the status."""

    pid: int
    first: int
    count: int
    command: str
    directory: str


@dataclass(frozen=True)
class _Command:
    """A command that starts learners, and its reservation."""

    pid: int
    start: int
    asked: Launch

    @property
    def numbers(self) -> range:
        return range(self.asked.first, self.asked.first + self.asked.count)


class Launches:
    """Reservations of one job. A number is free again when its command has ended.

    own: learners that the watchdog itself starts; their numbers begin at 0.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._commands: list[_Command] = []

    def reserve(self, pid: int, request: Launch, attached: Collection[int]) -> Numbers:
        """Reserve numbers for a command's learners.

        pid: of the command. attached: rows of the learners that are attached; a learner has the row
        of its number if that was free.
        """
        self._commands = [
            one for one in self._living() if (one.pid, one.asked.first) != (pid, request.first)
        ]
        taken = {*range(self._own), *attached}
        taken.update(*(one.numbers for one in self._commands))
        first = request.first
        if first < 0:
            first = 0
            while clash := taken.intersection(range(first, first + request.count)):
                first = max(clash) + 1
        if request.count:
            asked = request.model_copy(update={"first": first})
            self._commands.append(_Command(pid, process.start_ticks(pid), asked))
        return {
            "first": first,
            "others": len(taken.difference(range(first, first + request.count))),
        }

    def report(self) -> list[Started]:
        """Return the launches for the status."""
        return [
            {
                "pid": one.pid,
                "first": one.asked.first,
                "count": one.asked.count,
                "command": one.asked.command,
                "directory": one.asked.directory,
            }
            for one in self._living()
        ]

    def _living(self) -> list[_Command]:
        return [one for one in self._commands if process.alive(one.pid, one.start)]
