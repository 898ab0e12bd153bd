"""A block of `learners`: python -m gadei_ps.benchmarks.gpu.learners_block [DEVICE, QUICK, BLOCK, S]

Its argument is a JSON list. Each line of its output is a JSON object with what was just measured,
or a note; the last one is {"end": true}. It is a process of its own because a process decides at
its first use of CUDA whether it uses the Multi-Process Service.

Learners on a GPU are forked from a process that has imported torch but has not used CUDA; if CUDA
does not work in a learner that was started so, they are spawned, which takes seconds for each.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch

from gadei_ps.benchmarks import nlc_member, nlc_team
from gadei_ps.benchmarks.common import alternate
from gadei_ps.benchmarks.gpu import networks, texts
from gadei_ps.benchmarks.gpu.learners import CLASSIFIER, LSTM, SPREAD, WITH, WITHOUT
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
from gadei_ps.machine.cuda import first_line

WARM_UP_S = 0.03
LEAST_WINDOW_S, MOST_WINDOW_S = 0.1, 0.5
SLACK = 1.4
"""Factor by which a window may exceed its time: the last step, and messages to processes."""
LEAST_READY_S, READY_S, ANSWER_S = 5.0, 60.0, 20.0
"""Longer than learners take to start and to answer; what hangs must not take all the time."""
READY_SHARE = 0.6
"""Share of a network's time after which learners that are not ready are left out."""
TRIAL_S = 40.0

FAILURES = (RuntimeError, GadeiError, OSError)

Contender = tuple[str, int]
"""A contender and its number of learners."""


Found = dict[str, Any]
"""A line of the output."""


class Block:
    """Measures some networks on some sentences within a time."""

    def __init__(self, target: Target, name: str) -> None:
        self._target, self._name = target, name
        self._size = target.sizes("learners")
        self._notes: list[str] = []
        self._method: Literal["forkserver", "spawn"] = "forkserver"

    def run(self) -> Iterator[Found]:
        """Measure as many of the networks as there is time for, in order."""
        sentences = texts.first(self._target)
        lstm = functools.partial(networks.lstm, hidden=self._size["hidden"])
        cells: list[tuple[str, nlc_member.Network]] = [
            (CLASSIFIER, nlc_member.fresh),
            (LSTM, lstm),
        ]
        if self._name == WITH:  # what it is for
            cells.reverse()
        with ExitStack() as stack:
            stack.callback(nlc_team._stop_fork_server)
            if self._target.on_gpu and not _forks():
                self._method = "spawn"
                self._notes.append("learners are spawned: CUDA does not work in forked ones")
            for number, (name, network) in enumerate(cells):
                begin = time.monotonic()
                until = begin + self._target.left() / (len(cells) - number)
                with suppress(_Lost):
                    yield from self._cell(name, network, sentences, until)
                print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
                yield from self._noted()

    def _noted(self) -> Iterator[Found]:
        """Yield the notes since the last call."""
        notes, self._notes = self._notes, []
        yield from ({"note": note} for note in notes)

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
        return Team(
            kind,
            count,
            sentences,
            method=self._method,
            devices=devices,
            network=network,
            answer_s=ANSWER_S,
        )

    def _cell(
        self, name: str, network: nlc_member.Network, sentences: Texts, until: float
    ) -> Iterator[Found]:
        """Measure one network: all processes live at once, and take turns."""
        teams: dict[Contender, Team] = {}
        facts = {"network": name, "set": sentences.name}
        with ExitStack() as stack:
            for contender in self._contenders():
                with suppress(_Lost):
                    teams[contender] = self._team(contender, network, sentences)
                    enter = functools.partial(stack.enter_context, teams[contender])
                    self._try(teams, contender, enter)
            begin = time.monotonic()
            ready_until = begin + min(READY_S, max(LEAST_READY_S, READY_SHARE * (until - begin)))
            for contender in list(teams):
                with suppress(_Lost):
                    ready_s = max(0.1, ready_until - time.monotonic())
                    ready = functools.partial(teams[contender].ready, ready_s)
                    self._try(teams, contender, ready)
            batches = list(self._size["batches"])
            while batches and teams:
                batch = batches[0]
                windows = len(teams) * (self._size["rounds"] + 1)
                left = until - time.monotonic()
                # As many sizes as there is time for, at least the first.
                fitting = int(left / (windows * SLACK * (LEAST_WINDOW_S + WARM_UP_S)))
                if fitting < 1 and len(batches) < len(self._size["batches"]):
                    break
                each_s = left / min(len(batches), max(1, fitting))
                seconds = each_s / windows / SLACK - WARM_UP_S
                seconds = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, seconds))
                yield from self._row({**facts, "mini_batch": batch}, batch, teams, seconds)
                if batch == self._size["batches"][0]:
                    yield from self._profiles({**facts, "mini_batch": batch}, batch, teams)
                yield from self._noted()
                del batches[0]
            if batches:
                self._notes.append(f"{name}: no time for mini-batches {sorted(batches)}")
            for team in teams.values():
                team.dismiss()

    def _try(
        self, teams: dict[Contender, Team], contender: Contender, call: Callable[[], Any]
    ) -> Any:
        """Call; a contender that fails takes no further part. Raises _Lost."""
        try:
            return call()
        except FAILURES as error:
            traceback.print_exc()
            kind, count = contender
            self._notes.append(f"{kind} with {count}: not measured: {first_line(error)}")
            teams.pop(contender)._end(0.0)
            raise _Lost from None

    def _row(
        self, facts: Found, batch: int, teams: dict[Contender, Team], seconds: float
    ) -> Iterator[Found]:
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
        yield {
            "figures": [
                {"contender": kind, "learners": count, **facts, "values": values}
                for (kind, count), values in zip(teams, found.values(), strict=True)
            ]
        }

    def _window(
        self, teams: dict[Contender, Team], contender: Contender, batch: int, seconds: float
    ) -> float:
        train = functools.partial(teams[contender].train, batch, seconds, WARM_UP_S)
        return nlc_team.rate(self._try(teams, contender, train))

    def _profiles(self, facts: Found, batch: int, teams: dict[Contender, Team]) -> Iterator[Found]:
        """Profile the host's part of a step, in the first process of each contender."""
        for contender in list(teams):
            kind, count = contender
            if kind in nlc_member.REDUCED:  # most of it is backward(), in which they communicate
                continue
            call = functools.partial(teams[contender].profile, batch, self._size["profiled"])
            with suppress(_Lost):
                rows = self._try(teams, contender, call)
                yield {"contender": kind, "learners": count, **facts, "profile": rows}


class _Lost(Exception):
    """A contender has failed."""


def _forks() -> bool:
    """Return whether CUDA works in a process that is forked from the fork server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*nlc_team.PRELOAD, "gadei_ps.benchmarks.gpu.step_profile"])
    child = context.Process(target=_use_cuda)
    child.start()
    child.join(TRIAL_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    return child.exitcode == 0


def _use_cuda() -> None:
    torch.zeros(1, device="cuda").cpu()


def main() -> None:
    """Measure the block of the argument."""
    device, quick, name, budget_s = json.loads(sys.argv[1])
    interrupts.install()
    found: Iterator[Found] = Block(Target(device, quick, time.monotonic() + budget_s), name).run()
    try:
        for one in found:
            print(json.dumps(one), flush=True)
    except FAILURES as error:
        traceback.print_exc()
        print(json.dumps({"note": f"ends early: {first_line(error)}"}), flush=True)
    except interrupts.Interrupted:
        sys.exit(1)
    print(json.dumps({"end": True}), flush=True)


if __name__ == "__main__":
    main()
