"""Measures a block of `learners`, in its process: see learners_process.py.

Learners on a GPU are forked from a process that has imported torch but has not used CUDA; if CUDA
does not work in a learner that was started so, they are spawned, which takes seconds for each.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch

from gadei_ps.benchmarks import nlc_member, nlc_team
from gadei_ps.benchmarks.common import alternate
from gadei_ps.benchmarks.gpu import networks, texts
from gadei_ps.benchmarks.gpu.learners import SPREAD, WITHOUT
from gadei_ps.benchmarks.gpu.sizes import CLASSIFIER, LSTM
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
from gadei_ps.machine.cuda import first_line

WARM_UP_S = 0.03
LEAST_WINDOW_S, MOST_WINDOW_S = 0.1, 0.5
SLACK = 1.2
"""Factor by which windows exceed their time, before one was measured: the last step, messages to
processes, and a first round."""
LEAST_READY_S, READY_S, ANSWER_S = 5.0, 60.0, 20.0
"""Longer than learners take to start and to answer; what hangs must not take all the time."""
READY_SHARE = 0.6
"""Share of the time after which contenders that are not ready are left out."""
TRIAL_S = 40.0

FAILURES = (RuntimeError, GadeiError, OSError)

Contender = tuple[str, int]
"""A kind, and the number of its learners that train."""
Cell = tuple[str, int]
"""A network, and the size of the mini-batches."""

Found = dict[str, Any]
"""A line of the output."""


class Block:
    """Measures networks on some sentences within a time."""

    def __init__(self, target: Target, name: str) -> None:
        self._target, self._name = target, name
        self._begin = time.monotonic()
        self._size = target.sizes("learners")
        self._networks: dict[str, nlc_member.Network] = {
            CLASSIFIER: nlc_member.fresh,
            LSTM: functools.partial(networks.lstm, hidden=self._size["hidden"]),
        }
        self._tasks = list(self._networks)
        self._notes: list[str] = []
        self._method: Literal["forkserver", "spawn"] = "forkserver"
        self._teams: dict[str, Team] = {}
        self._tried: set[tuple[Contender, Cell]] = set()

    def run(self) -> Iterator[Found]:
        """Measure as many cells as there is time for, in order.

        All processes live at once, and take turns.
        """
        with ExitStack() as stack:
            stack.callback(nlc_team.stop_fork_server)
            trial = _trial() if self._target.on_gpu else None
            sentences = texts.first(self._target)
            if trial is not None and not _succeeds(trial):
                self._method = "spawn"
                self._notes.append("learners are spawned: CUDA does not work in forked ones")
            self._start(stack, sentences)
            self._await()
            yield from self._noted()
            yield from self._cells(sentences.name)
            for team in self._teams.values():
                team.dismiss()

    def _noted(self) -> Iterator[Found]:
        """Yield the notes since the last call."""
        notes, self._notes = self._notes, []
        yield from ({"note": note} for note in notes)

    def _kinds(self) -> dict[str, list[int]]:
        """Return the kinds of the block, each with the numbers of its learners."""
        learners, peers = self._size["learners"], self._size["peers"]
        if self._name == SPREAD:
            learners = [one for one in learners if one <= self._target.count()]
            return {OURS: learners, DDP_NCCL: learners[-1:]}
        alone = {SINGLE: [1], SINGLE_SPARSE: [1]} if self._name == WITHOUT else {}
        return {OURS: learners, **alone, HOGWILD: peers, HOGWILD_SPARSE: peers[:1], DDP: peers[:1]}

    def _start(self, stack: ExitStack, sentences: Texts) -> None:
        """Start the processes of all kinds.

        gadei-ps comes last: while its jobs start, those of the others make their places on the GPU.
        """
        kinds = self._kinds()
        for kind in sorted(kinds, key=lambda one: one == OURS):
            count = max(kinds[kind])
            devices = [self._target.torch_device]
            if self._name == SPREAD:
                devices = [f"cuda:{number}" for number in range(count)]
            self._teams[kind] = Team(
                kind,
                count,
                sentences,
                method=self._method,
                devices=devices,
                networks=list(self._networks.values()),
                answer_s=ANSWER_S,
            )
            with suppress(_Lost):
                self._try(kind, functools.partial(stack.enter_context, self._teams[kind]))

    def _await(self) -> None:
        """Wait until all processes are ready; leave out the kinds that are late."""
        until = time.monotonic()
        until += min(READY_S, max(LEAST_READY_S, READY_SHARE * self._target.left()))
        for kind, team in list(self._teams.items()):
            with suppress(_Lost):
                self._try(kind, functools.partial(team.ready, max(0.1, until - time.monotonic())))
            taken = time.monotonic() - self._begin
            print(f"{kind}: ready after {taken:.1f} s", file=sys.stderr, flush=True)

    def _try(self, kind: str, call: Callable[[], Any]) -> Any:
        """Call; a kind that fails takes no further part. Raises _Lost."""
        try:
            return call()
        except FAILURES as error:
            traceback.print_exc()
            team = self._teams.pop(kind)
            self._notes.append(f"{kind} with {team.count}: not measured: {first_line(error)}")
            team.end(0.0)
            raise _Lost from None

    def _contenders(self) -> list[Contender]:
        return [(kind, n) for kind, ns in self._kinds().items() if kind in self._teams for n in ns]

    def _cells(self, data: str) -> Iterator[Found]:
        """Measure the cells that there is time for, and profile the first after the main ones."""
        cells: list[Cell] = list(self._size["cells"])
        slack, least_s = SLACK, -math.inf  # time of a cell; the first is measured in any case
        while cells and self._teams and self._target.left() > least_s:
            windows = len(self._contenders()) * self._size["rounds"]
            least_s = windows * slack * (LEAST_WINDOW_S + WARM_UP_S)
            # As many as there is time for.
            fitting = min(len(cells), max(1, int(self._target.left() / least_s)))
            seconds = self._target.left() / fitting / windows / slack - WARM_UP_S
            seconds = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, seconds))
            begin = time.monotonic()
            cell = cells.pop(0)
            yield from self._cell(cell, data, seconds)
            taken = time.monotonic() - begin
            print(f"{cell}: {taken:.1f} s", file=sys.stderr, flush=True)
            slack = taken / windows / (seconds + WARM_UP_S)
            least_s = windows * slack * (LEAST_WINDOW_S + WARM_UP_S)
            if len(self._size["cells"]) - len(cells) == self._size["main"]:
                yield from self._profiles(self._size["cells"][0], data)
            yield from self._noted()
        for network in self._networks:
            if batches := sorted(size for name, size in cells if name == network):
                self._notes.append(f"{network}: no time for mini-batches {batches}")
        yield from self._noted()

    def _cell(self, cell: Cell, data: str, seconds: float) -> Iterator[Found]:
        """Measure one cell, again from the start if a kind fails."""
        while contenders := self._contenders():
            windows: Mapping[str, Callable[[], float]] = {
                f"{kind}, {count}": functools.partial(self._window, (kind, count), cell, seconds)
                for kind, count in contenders
            }
            with suppress(_Lost):
                found = alternate(windows, self._size["rounds"])
                break
        else:
            return
        network, size = cell
        facts = {"network": network, "set": data, "mini_batch": size}
        yield {
            "figures": [
                {"contender": kind, "learners": count, **facts, "values": values}
                for (kind, count), values in zip(contenders, found.values(), strict=True)
            ]
        }

    def _window(self, contender: Contender, cell: Cell, seconds: float) -> float:
        """Return the rate of a contender (samples/s).

        In the round that alternate() discards, it trains for a moment.
        """
        (kind, count), (network, size) = contender, cell
        if self._size["rounds"] > 1 and (contender, cell) not in self._tried:
            self._tried.add((contender, cell))
            seconds = 0.0
        train = functools.partial(
            self._teams[kind].train,
            size,
            seconds,
            WARM_UP_S,
            task=self._tasks.index(network),
            members=count,
        )
        return nlc_team.rate(self._try(kind, train))

    def _profiles(self, cell: Cell, data: str) -> Iterator[Found]:
        """Profile the host's part of a step, in the first process of each contender."""
        network, size = cell
        facts = {"network": network, "set": data, "mini_batch": size}
        for kind, count in self._contenders():
            if kind in nlc_member.REDUCED:  # most of it is backward(), in which they communicate
                continue
            call = functools.partial(
                self._teams[kind].profile,
                size,
                self._size["profiled"],
                task=self._tasks.index(network),
                members=count,
            )
            with suppress(_Lost):
                rows = self._try(kind, call)
                yield {"contender": kind, "learners": count, **facts, "profile": rows}


class _Lost(Exception):
    """A kind has failed."""


def _trial() -> BaseProcess:
    """Start a process that is forked from the fork server and uses CUDA."""
    child = multiprocessing.get_context("forkserver").Process(target=_use_cuda, daemon=True)
    child.start()
    return child


def _succeeds(child: BaseProcess) -> bool:
    child.join(TRIAL_S)
    if child.exitcode is None:
        child.kill()
        child.join()
    return child.exitcode == 0


def _use_cuda() -> None:
    torch.zeros(1, device="cuda").cpu()


def measure(device: str, quick: bool, name: str, budget_s: float) -> None:
    """Measure a block and print what is found, in its time (s)."""
    found: Iterator[Found] = Block(Target(device, quick, time.monotonic() + budget_s), name).run()
    try:
        for one in found:
            print(json.dumps(one), flush=True)
    except FAILURES as error:
        traceback.print_exc()
        print(json.dumps({"note": f"ends early: {first_line(error)}"}), flush=True)
    print(json.dumps({"end": True}), flush=True)
