"""The processes of a contender. They stay alive and sleep while others are measured."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Self

from torch import multiprocessing  # shares the memory of tensors

from gadei_ps.benchmarks import nlc_member
from gadei_ps.benchmarks.nlc_member import (
    Done,
    Evaluate,
    Plan,
    Profile,
    Run,
    SharedTexts,
    Task,
)
from gadei_ps.benchmarks.nlc_texts import Texts
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.machine import interrupts

READY_S = 240.0
ANSWER_S = 120.0
"""Seconds added to a request's own time before it counts as failed."""
END_S = 5.0
LR = 0.01
PRELOAD = ["gadei_ps.benchmarks.nlc_member", "torch._dynamo"]
"""Modules that take seconds to import. The first step of a torch optimizer imports the second."""
NUMBERS = itertools.count(1)
"""Numbers of jobs, so that each has a name of its own."""


class Team:
    """A contender with `count` learners, on one data set.

    A with-block starts it; ready() waits until all its processes are ready. Use it from a thread
    that lives as long as the team.

    Members are forked from one process that has imported torch, so that many start within seconds.
    They share only the program with it. With `method` "spawn" they do not share that either, which
    matters when their memory is measured.
    """

    def __init__(
        self,
        kind: str,
        count: int,
        texts: Texts,
        *,
        update: str = "sgd",
        lr: float = LR,
        method: Literal["forkserver", "spawn"] = "forkserver",
        devices: Sequence[str] = ("cpu",),
        networks: Sequence[nlc_member.Network] = (nlc_member.fresh,),
        answer_s: float = ANSWER_S,
    ) -> None:
        """update: the optimizer, as jobs name it. devices: torch's names, for the members in turn.
        networks: each has a job of its own, or shared memory; requests name one by its number.
        answer_s: see ANSWER_S.

        Members on a GPU cannot be forked from a process that has used CUDA.
        """
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(PRELOAD)
        self.kind, self.count, self.texts = kind, count, texts
        self.daemons: list[Daemon] = []
        self._update, self._lr = update, lr
        self._devices, self._networks = devices, networks
        self._answer_s = answer_s
        self._tasks: list[Task] = []
        self._members: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._pace: dict[tuple[int, int], float] = {}  # seconds of a step, by task and mini-batch
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        """Start, without waiting for the members."""
        with ExitStack() as undo:
            undo.callback(self.end, 0.0)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """End all processes. After an error, end them at once."""
        self.end(END_S if kind is None else 0.0)

    def _start(self) -> None:
        rendezvous = ""
        if self.kind in nlc_member.REDUCED:
            scratch = tempfile.TemporaryDirectory(prefix="gadei-ps-nlc-")
            rendezvous = str(Path(self._cleanup.enter_context(scratch)) / "rendezvous")
        # Kept, because the memory of a GPU belongs to the process that made it.
        self._tasks = [self._task(network) for network in self._networks]
        data = SharedTexts(self.texts)
        for rank in range(self.count):
            self._spawn(
                Plan(
                    self.kind,
                    rank,
                    self.count,
                    data,
                    self._update,
                    self._lr,
                    rendezvous,
                    self._tasks,
                    self._devices[rank % len(self._devices)],
                )
            )

    def _task(self, network: nlc_member.Network) -> Task:
        """Make what the members share of a network: its job, or its memory."""
        if self.kind in (nlc_member.OURS, nlc_member.OURS_DENSE):
            name = f"nlc-{os.getpid()}-{self.texts.name}-{self.count}-{next(NUMBERS)}"
            values = {"name": name, "optimizer": {"kind": self._update, "lr": self._lr}}
            daemon = self._cleanup.enter_context(Daemon(from_mapping(values, "nlc")))
            self.daemons.append(daemon)
            return Task(network, job=str(daemon.socket))
        if self.kind not in nlc_member.SHARED:
            return Task(network)
        model = network(self.kind, self.texts).to(self._devices[0])
        model.share_memory()
        optimizer = None
        if self._update == "adagrad":
            optimizer = nlc_member.optimizer_of(model, self._update, self._lr)
            optimizer.share_memory()  # type: ignore[attr-defined]
        return Task(network, model=model, optimizer=optimizer)

    def _spawn(self, plan: Plan) -> None:
        """Start a member, with signals held: a signal here could leave an unknown process."""
        with interrupts.held():
            ours, theirs = self._context.Pipe()
            self._pipes.append(ours)
            member = self._context.Process(target=nlc_member.main, args=(plan, theirs), daemon=True)
            member.start()
            self._members.append(member)
            theirs.close()

    def ready(self, timeout_s: float = READY_S) -> None:
        """Wait until each member is ready to train."""
        for rank in range(self.count):
            self._receive(rank, timeout_s)

    def run(
        self, size: int, seconds: float, steps: int = 0, *, task: int = 0, members: int = 0
    ) -> list[Done]:
        """Let members train. If steps are given, `seconds` is only an estimate.

        task: the number of the network. members: how many train, the others sleep; 0: all.
        """
        ranks = range(members or self.count)
        for rank in ranks:
            self._pipes[rank].send(Run(size, seconds, steps, task))
        return [self._receive(rank, seconds + self._answer_s) for rank in ranks]

    def go_on(self, size: int, seconds: float, *, task: int = 0, members: int = 0) -> list[Done]:
        """Let members train for about `seconds`.

        Members of DistributedDataParallel must end together, so they get a number of steps, which
        follows from their last pace. The first time, they make only a few steps.
        """
        if self.kind not in nlc_member.REDUCED:
            return self.run(size, seconds, task=task, members=members)
        pace = self._pace.get((task, size))
        steps = 3 if pace is None else max(2, round(seconds / pace))
        done = self.run(size, seconds, steps, task=task)
        self._pace[task, size] = done[0].seconds / done[0].steps
        return done

    def train(
        self, size: int, seconds: float, warm_up_s: float, *, task: int = 0, members: int = 0
    ) -> list[Done]:
        """Let members train for about `seconds`, after an unmeasured warm-up."""
        if self.kind in nlc_member.REDUCED:
            self.run(size, warm_up_s, 2, task=task)
            self._pace.pop((task, size), None)
        self.go_on(size, warm_up_s, task=task, members=members)
        return self.go_on(size, seconds, task=task, members=members)

    def profile(
        self, size: int, steps: int, *, task: int = 0, members: int = 0
    ) -> list[dict[str, Any]]:
        """Let members train so many steps; return where the first one's time goes."""
        ranks = range(members or self.count)
        for rank in ranks:
            self._pipes[rank].send(Profile(size, steps, task))
        found: list[list[dict[str, Any]]] = [self._receive(rank, self._answer_s) for rank in ranks]
        return found[0]

    def accuracy(self, held_out: Texts) -> float:
        """Return the accuracy of the first member on these sentences."""
        self._pipes[0].send(Evaluate(held_out))
        accuracy: float = self._receive(0, self._answer_s)
        return accuracy

    @property
    def pids(self) -> list[int]:
        """Return the pids of the members."""
        return [member.pid for member in self._members if member.pid is not None]

    def _receive(self, rank: int, timeout_s: float) -> Any:
        """Return a member's answer. Raises RuntimeError if it has ended or takes too long."""
        who = f"{self.kind}, learner {rank + 1} of {self.count}"
        if not self._pipes[rank].poll(timeout_s):
            raise RuntimeError(f"{who}: no answer within {timeout_s:.0f} s")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{who} has ended; read its messages above") from None

    def dismiss(self) -> None:
        """Let the members end, without waiting for it."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()

    def end(self, grace_s: float) -> None:
        """End all processes; kill those that have not ended after `grace_s`."""
        with interrupts.held():
            self.dismiss()
            until = time.monotonic() + grace_s
            for member in self._members:
                member.join(max(0.0, until - time.monotonic()))
                if member.exitcode is None:
                    member.kill()
                    member.join()
            self._members.clear()
            self._pipes.clear()
            self._tasks.clear()
            self._cleanup.close()


def rate(done: Iterable[Done]) -> float:
    """Return the samples per second of all members together."""
    return sum(one.samples / one.seconds for one in done)


@contextmanager
def started(teams: Iterable[Team]) -> Iterator[None]:
    """Start all teams at once, because most of the time is the import of torch. End all teams."""
    with ExitStack() as stack:
        stack.callback(stop_fork_server)
        entered = [stack.enter_context(team) for team in teams]
        for team in entered:
            team.ready()
        try:
            yield
        finally:
            for team in entered:
                team.dismiss()


def stop_fork_server() -> None:
    """End the process from which members are forked. It would stay until this process ends."""
    with interrupts.held(), suppress(AttributeError):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
