"""A contender's processes, kept alive and asleep while others are measured."""

from __future__ import annotations

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

import torch
from torch import multiprocessing  # shares the memory of tensors

from gadei_ps.benchmarks import nlc_member
from gadei_ps.benchmarks.nlc_member import Done, Evaluate, Plan, Run, SharedTexts
from gadei_ps.benchmarks.nlc_texts import Texts
from gadei_ps.commands.daemon import Daemon
from gadei_ps.job.config import from_mapping
from gadei_ps.machine import interrupts

READY_S = 240.0
ANSWER_S = 120.0
"""More than a request is to take."""
END_S = 5.0
LR = 0.01
PRELOAD = ["gadei_ps.benchmarks.nlc_member", "torch._dynamo"]
"""What takes seconds to import, the second with the first step of any optimizer of torch."""


class Team:
    """A contender with so many learners, on one data set.

    In a with-block it is started; ready() waits until all its processes are. Use it from a thread
    that lives as long.

    Members are forked off one process that has imported torch, so that many start within seconds;
    nothing of it but the program is shared. With `method` "spawn" they share not even that, which
    matters to what is counted as theirs.
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
        network: nlc_member.Network = nlc_member.fresh,
    ) -> None:
        """update: the optimizer, as jobs name it. devices: of the members in turn, as torch has it.

        A member on a GPU must be spawned: CUDA does not outlive a fork.
        """
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(PRELOAD)
        self.kind, self.count, self.texts = kind, count, texts
        self.daemon: Daemon | None = None
        self._update, self._lr = update, lr
        self._devices, self._network = devices, network
        self._shared: torch.nn.Module | None = None
        self._members: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._pace: dict[int, float] = {}  # seconds of a step, by the size of its mini-batch
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        """Start, without waiting for the members."""
        with ExitStack() as undo:
            undo.callback(self._end, 0.0)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """End all of it, at once where something has gone wrong."""
        self._end(END_S if kind is None else 0.0)

    def _start(self) -> None:
        job = rendezvous = ""
        if self.kind in nlc_member.REDUCED:
            scratch = tempfile.TemporaryDirectory(prefix="gadei-ps-nlc-")
            rendezvous = str(Path(self._cleanup.enter_context(scratch)) / "rendezvous")
        if self.kind in (nlc_member.OURS, nlc_member.OURS_DENSE):
            name = f"nlc-{os.getpid()}-{self.texts.name}-{self.count}-{id(self) % 10_000}"
            values = {"name": name, "optimizer": {"kind": self._update, "lr": self._lr}}
            self.daemon = self._cleanup.enter_context(Daemon(from_mapping(values, "nlc")))
            job = str(self.daemon.socket)
        optimizer = None
        if self.kind in nlc_member.SHARED:
            # Kept: memory of a GPU is that of the process which made it.
            self._shared = self._network(self.kind, self.texts).to(self._devices[0])
            self._shared.share_memory()
            if self._update == "adagrad":
                optimizer = nlc_member.optimizer_of(self._shared, self._update, self._lr)
                optimizer.share_memory()  # type: ignore[attr-defined]
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
                    job,
                    self._shared,
                    optimizer,
                    self._devices[rank % len(self._devices)],
                    self._network,
                )
            )

    def _spawn(self, plan: Plan) -> None:
        """Start a member. A signal in the middle of it could leave one that nobody knows."""
        with interrupts.held():
            ours, theirs = self._context.Pipe()
            self._pipes.append(ours)
            member = self._context.Process(target=nlc_member.main, args=(plan, theirs), daemon=True)
            member.start()
            self._members.append(member)
            theirs.close()

    def ready(self) -> None:
        """Wait until each member could begin to train."""
        for rank in range(self.count):
            self._receive(rank, READY_S)

    def run(self, size: int, seconds: float, steps: int = 0) -> list[Done]:
        """Let all members train; seconds is a guess only where steps are given."""
        for pipe in self._pipes:
            pipe.send(Run(size, seconds, steps))
        return [self._receive(rank, seconds + ANSWER_S) for rank in range(self.count)]

    def go_on(self, size: int, seconds: float) -> list[Done]:
        """Let all members train about so long.

        Those of DistributedDataParallel must agree on when to end, so they are told a number of
        steps, by the pace of the last time; the first time they make a few only.
        """
        if self.kind not in nlc_member.REDUCED:
            return self.run(size, seconds)
        pace = self._pace.get(size)
        done = self.run(size, seconds, 3 if pace is None else max(2, round(seconds / pace)))
        self._pace[size] = done[0].seconds / done[0].steps
        return done

    def train(self, size: int, seconds: float, warm_up_s: float) -> list[Done]:
        """Do that after a warm-up that does not count."""
        if self.kind in nlc_member.REDUCED:
            self.run(size, warm_up_s, 2)
            self._pace.pop(size, None)
        self.go_on(size, warm_up_s)
        return self.go_on(size, seconds)

    def accuracy(self, held_out: Texts) -> float:
        """Return the first member's on these sentences."""
        self._pipes[0].send(Evaluate(held_out))
        accuracy: float = self._receive(0, ANSWER_S)
        return accuracy

    @property
    def pids(self) -> list[int]:
        """Return the members'."""
        return [member.pid for member in self._members if member.pid is not None]

    def _receive(self, rank: int, timeout_s: float) -> Any:
        """Return a member's answer. Raises RuntimeError if it has ended or takes too long."""
        who = f"{self.kind}, learner {rank + 1} of {self.count}"
        if not self._pipes[rank].poll(timeout_s):
            raise RuntimeError(f"{who}: no answer within {timeout_s:.0f} s")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{who} has ended; its messages stand above") from None

    def dismiss(self) -> None:
        """Tell the members to end, without waiting for it."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()

    def _end(self, grace_s: float) -> None:
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
            self._shared = None
            self._cleanup.close()


def rate(done: Iterable[Done]) -> float:
    """Return the samples per second of all members together."""
    return sum(one.samples / one.seconds for one in done)


@contextmanager
def started(teams: Iterable[Team]) -> Iterator[None]:
    """Start the teams all at once, for most of it is importing torch; end them all."""
    with ExitStack() as stack:
        stack.callback(_stop_fork_server)
        entered = [stack.enter_context(team) for team in teams]
        for team in entered:
            team.ready()
        try:
            yield
        finally:
            for team in entered:
                team.dismiss()


def _stop_fork_server() -> None:
    """End the process that the members came from. It would stay until this one ends."""
    with interrupts.held(), suppress(AttributeError):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
