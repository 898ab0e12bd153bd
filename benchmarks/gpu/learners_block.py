"""A block of `learners`: python -m gadei_ps.benchmarks.gpu.learners_block [DEVICE, QUICK, BLOCK, S]

Its argument is a JSON list; the last line of its output is a JSON object with the figures. It is a
process of its own because a process decides at its first use of CUDA whether it uses the
Multi-Process Service.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Literal

from gadei_ps.benchmarks import nlc_member, nlc_team
from gadei_ps.benchmarks.common import alternate
from gadei_ps.benchmarks.gpu import networks, texts
from gadei_ps.benchmarks.gpu.learners import CLASSIFIER, LSTM, SPREAD, WITHOUT
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.nlc_member import (
    DDP,
    DDP_NCCL,
    HOGWILD,
    HOGWILD_SPARSE,
    OURS,
    SINGLE,
    SINGLE_SPARSE,
)
from gadei_ps.benchmarks.nlc_team import Team
from gadei_ps.benchmarks.nlc_texts import Texts
from gadei_ps.errors import GadeiError
from gadei_ps.machine import interrupts

WARM_UP_S = 0.05
LEAST_WINDOW_S, MOST_WINDOW_S = 0.1, 1.0
SLACK = 1.3
"""Factor by which a window may exceed its time: the last step, and messages to processes."""

FAILURES = (RuntimeError, GadeiError, OSError)

Contender = tuple[str, int]
"""A contender and its number of learners."""


class Block:
    """Measures some networks on some sentences within a time."""

    def __init__(self, target: Target, name: str, budget_s: float) -> None:
        self._target, self._name = target, name
        self._size = target.sizes("learners")
        self._until = time.monotonic() + budget_s
        self.figures: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._taken = 0.0  # seconds, by the cell before

    def run(self) -> None:
        """Measure as many of the networks and sentences as there is time for, in order."""
        sets, notes = texts.found(self._target)
        self.notes += notes
        lstm = functools.partial(networks.lstm, hidden=self._size["hidden"])
        cells: list[tuple[str, nlc_member.Network, Texts]] = [
            (CLASSIFIER, nlc_member.fresh, sets[0]),
            (LSTM, lstm, sets[0]),
            *((CLASSIFIER, nlc_member.fresh, one) for one in reversed(sets[1:])),
        ]
        for number, (name, network, sentences) in enumerate(cells):
            rest_s = self._until - time.monotonic()
            # Processes of a cell take a while to start, however little there is to measure.
            if number and rest_s < self._taken:
                self.notes.append(f"{name} on {sentences.name}: not measured: no time")
                continue
            begin = time.monotonic()
            self._cell(name, network, sentences, begin + rest_s / min(3, len(cells) - number))
            self._taken = time.monotonic() - begin

    def _contenders(self) -> list[Contender]:
        """Return the contenders of the block."""
        count = self._size["peers"]
        if self._name == SPREAD:
            learners = [one for one in self._size["learners"] if one <= self._target.count()]
            return [*((OURS, one) for one in learners), (DDP_NCCL, learners[-1])]
        alone = [(SINGLE, 1), (SINGLE_SPARSE, 1)] if self._name == WITHOUT else []
        peers = [(HOGWILD, count), (HOGWILD_SPARSE, count), (DDP, count)]
        return [*((OURS, one) for one in self._size["learners"]), *alone, *peers]

    def _team(self, contender: Contender, network: nlc_member.Network, sentences: Texts) -> Team:
        kind, count = contender
        devices = [self._target.torch_device]
        if self._name == SPREAD:
            devices = [f"cuda:{number}" for number in range(count)]
        method: Literal["forkserver", "spawn"] = "spawn" if self._target.on_gpu else "forkserver"
        return Team(kind, count, sentences, method=method, devices=devices, network=network)

    def _cell(self, name: str, network: nlc_member.Network, sentences: Texts, until: float) -> None:
        """Measure one network on one set: all processes live at once, and take turns."""
        with ExitStack() as stack:
            stack.callback(nlc_team._stop_fork_server)
            teams: dict[Contender, Team] = {}
            for contender in self._contenders():
                with suppress(_Lost):
                    teams[contender] = self._team(contender, network, sentences)
                    enter = functools.partial(stack.enter_context, teams[contender])
                    self._try(teams, contender, enter)
            for contender in list(teams):
                with suppress(_Lost):
                    self._try(teams, contender, teams[contender].ready)
            for number, batch in enumerate(self._size["batches"]):
                each_s = (until - time.monotonic()) / (len(self._size["batches"]) - number)
                windows = len(teams) * (self._size["rounds"] + 1)
                seconds = each_s / windows / SLACK - WARM_UP_S
                if seconds < LEAST_WINDOW_S / 2 or not teams:
                    self.notes.append(f"{name} on {sentences.name}: no time from {batch} on")
                    break
                seconds = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, seconds))
                self._row(name, sentences.name, batch, teams, seconds)
            for team in teams.values():
                team.dismiss()

    def _try(
        self, teams: dict[Contender, Team], contender: Contender, call: Callable[[], Any]
    ) -> Any:
        """Call; a contender that fails takes no further part. Raises _Lost."""
        try:
            return call()
        except FAILURES as error:
            if contender[0] == OURS:
                raise
            self.notes.append(f"{contender[0]} with {contender[1]}: not measured: {error}")
            del teams[contender]
            raise _Lost from None

    def _row(
        self, name: str, sentences: str, batch: int, teams: dict[Contender, Team], seconds: float
    ) -> None:
        """Measure one size of mini-batch, again from the start if a contender fails."""
        while teams:
            contenders: Mapping[str, Callable[[], float]] = {
                f"{kind}, {count}": functools.partial(
                    self._window, teams, (kind, count), batch, seconds
                )
                for kind, count in teams
            }
            with suppress(_Lost):
                found = alternate(contenders, self._size["rounds"])
                break
        else:
            return
        for (kind, count), values in zip(teams, found.values(), strict=True):
            self.figures.append(
                {
                    "contender": kind,
                    "learners": count,
                    "network": name,
                    "set": sentences,
                    "mini_batch": batch,
                    "values": values,
                }
            )

    def _window(
        self, teams: dict[Contender, Team], contender: Contender, batch: int, seconds: float
    ) -> float:
        train = functools.partial(teams[contender].train, batch, seconds, WARM_UP_S)
        return nlc_team.rate(self._try(teams, contender, train))


class _Lost(Exception):
    """A contender has failed."""


def main() -> None:
    """Measure the block of the argument."""
    device, quick, name, budget_s = json.loads(sys.argv[1])
    interrupts.install()
    block = Block(Target(device, quick), name, budget_s)
    try:
        block.run()
    except FAILURES as error:
        block.notes.append(f"ends early: {error}")
    except interrupts.Interrupted:
        sys.exit(1)
    print("\n" + json.dumps({"figures": block.figures, "notes": block.notes}))


if __name__ == "__main__":
    main()
