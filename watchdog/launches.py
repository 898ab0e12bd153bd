"""Numbers of learners: what each command that starts learners of a job has reserved."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gadei_ps.job.control import Launch
from gadei_ps.machine import process


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

    def reserve(self, pid: int, request: Launch, attached: Collection[int]) -> dict[str, Any]:
        """The first of the reserved numbers, and how many other learners there are.

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

    def report(self) -> list[dict[str, Any]]:
        """Return the launches for the status."""
        return [
            {"pid": one.pid, **one.asked.model_dump(include=set(_REPORTED))}
            for one in self._living()
        ]

    def _living(self) -> list[_Command]:
        return [one for one in self._commands if process.alive(one.pid, one.start)]


_REPORTED = ("first", "count", "command", "directory")
