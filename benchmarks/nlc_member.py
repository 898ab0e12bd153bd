"""One process of a contender. It trains the sentence classifier on request, and sleeps otherwise.

All contenders compute the same gradient of the same network on the same batches. They differ in how
they use the gradient. A member answers each request on its pipe, and ends when the pipe is closed.

Hogwild follows PyTorch's examples/mnist_hogwild: the process that spawns the members shares the
model's memory, and each member uses its own optimizer on it. Adagrad's sums are shared too, with
torch's method for that. DistributedDataParallel gets dense gradients, because it supports sparse
ones of torch.nn.Embedding only. Other sizes of its buckets made no difference.

A plan may name a GPU and other networks, for the same contenders in `gadei_ps.benchmarks.gpu`. Its
member trains the one that a request names; its place on the GPU takes a second to make.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gadei_ps import _native
from gadei_ps.benchmarks.common import cores
from gadei_ps.benchmarks.nlc_texts import SEED, Texts
from gadei_ps.classifier.network import SentenceClassifier, evaluate
from gadei_ps.classifier.words import Encoded
from gadei_ps.learners.torch import Optimizer, embedding, linear

OURS = "gadei-ps"
OURS_DENSE = "gadei-ps dense"
SINGLE = "torch single"
SINGLE_SPARSE = "torch single sparse"
HOGWILD = "Hogwild"
HOGWILD_SPARSE = "Hogwild sparse"
DDP = "DDP gloo"
DDP_NCCL = "DDP NCCL"
LIMIT = "limit"
"""Forward and backward alone."""

SHARED = (HOGWILD, HOGWILD_SPARSE)
REDUCED = (DDP, DDP_NCCL)
SPARSE = (OURS, SINGLE_SPARSE, HOGWILD_SPARSE, LIMIT)
"""Contenders whose gradient of the embedding has only the rows that a batch names."""
FOR_EVER = 2**31 - 1

Network = Callable[[str, Texts], torch.nn.Module]
"""Makes the network of a contender for these texts, on the CPU. Must be a module's function."""


class SharedTexts:
    """A data set in memory that a new process can map.

    It does not fit into the process's start-up pipe, where the writer would wait for its imports.
    """

    def __init__(self, texts: Texts) -> None:
        """Copy the texts into shared memory."""
        arrays = (texts.encoded.tokens, texts.encoded.lengths, texts.labels)
        self._tensors = [torch.from_numpy(array).clone() for array in arrays]
        for tensor in self._tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._rest = texts.name, texts.vocabulary_size, texts.classes

    def texts(self) -> Texts:
        """Return the texts as views of the shared memory."""
        tokens, lengths, labels = (tensor.numpy() for tensor in self._tensors)
        name, *sizes = self._rest
        return Texts(name, Encoded(tokens, lengths), labels, *sizes)


def fresh(kind: str, texts: Texts) -> SentenceClassifier:
    """Return a new network, always with the same weights."""
    sizes = texts.vocabulary_size, texts.classes
    if kind == OURS:  # as `gadei-ps train` does
        network = SentenceClassifier(
            *sizes, seed=SEED, sparse=True, linear=linear, lookup=embedding
        )
        return network.train()
    return SentenceClassifier(*sizes, seed=SEED, sparse=kind in SPARSE).train()


@dataclass
class Task:
    """A network to train.

    job: that of gadei-ps. model, optimizer: those of the team, if their memory is shared.
    """

    network: Network = fresh
    job: str = ""
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass
class Plan:
    """The plan of a member. device: as torch names it."""

    kind: str
    rank: int
    count: int
    data: SharedTexts
    update: str
    lr: float
    rendezvous: str
    tasks: Sequence[Task]
    device: str = "cpu"


@dataclass(frozen=True)
class Run:
    """Train on mini-batches of `size` for `seconds`, or for `steps` steps if that is not 0.

    task: the number of the network.
    """

    size: int
    seconds: float
    steps: int = 0
    task: int = 0


@dataclass(frozen=True)
class Profile:
    """Train so many steps on mini-batches of `size`, and measure the parts of the host's time."""

    size: int
    steps: int
    task: int = 0


@dataclass(frozen=True)
class Evaluate:
    """Measure the accuracy on these sentences."""

    texts: Texts


@dataclass(frozen=True)
class Done:
    """The result of a run."""

    steps: int
    samples: int
    seconds: float
    payload_bytes: int = field(default=0)
    """Bytes of the gradients pushed; gadei-ps only."""


def optimizer_of(model: torch.nn.Module, update: str, lr: float) -> torch.optim.Optimizer:
    """Return torch's optimizer of this name: sgd or adagrad."""
    if update == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=lr)
    assert update == "sgd"
    return torch.optim.SGD(model.parameters(), lr=lr)


class Peer:
    """Trains with torch alone."""

    def __init__(self, plan: Plan, task: Task, texts: Texts) -> None:
        """Join the other members, if the kind has a group."""
        model = task.model
        if model is None:
            model = task.network(plan.kind, texts).to(plan.device)
        self.model = model
        self._network: torch.nn.Module = self.model
        self._texts, self._device = texts, torch.device(plan.device)
        self._number, self._stride = plan.rank, plan.count
        self.optimizer = task.optimizer
        if plan.kind in REDUCED:
            if not distributed.is_initialized():
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                distributed.init_process_group(
                    "gloo" if plan.kind == DDP else "nccl",
                    f"file://{plan.rendezvous}",
                    rank=plan.rank,
                    world_size=plan.count,
                )
            # Gradients stay in the buckets: this saves a copy of the embedding.
            self._network = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if self.optimizer is None and plan.kind != LIMIT:
            self.optimizer = optimizer_of(self.model, plan.update, plan.lr)

    def step(self, size: int) -> int:
        """Train on one mini-batch. Returns bytes pushed: none."""
        if self.optimizer is None:
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad()
        rows = self._texts.rows(self._number, size)
        self._number += self._stride
        loss = loss_of(self._network, self._texts, rows, self._device)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        return 0

    def finish(self) -> None:
        """Wait for the device. On the CPU, a step returns after the weights have changed."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


class Learner:
    """Trains as a learner of `gadei-ps train` does, on batches that the server hands out.

    The server numbers the batches of an epoch, and does not know their size. To allow any size, it
    hands out one number for each sentence, and this class chooses the sentences of the batch.
    """

    def __init__(self, plan: Plan, task: Task, texts: Texts) -> None:
        """Attach."""
        self.model = task.network(plan.kind, texts).to(plan.device)
        self._texts, self._device = texts, torch.device(plan.device)
        self.optimizer = Optimizer(self.model, task.job)
        self._batches: Iterator[Any] = self.optimizer.batches(len(texts), 1, FOR_EVER, SEED)

    def step(self, size: int) -> int:
        """Train on one mini-batch. Returns the bytes of the gradient, 0 if known later."""
        batch = next(self._batches)
        rows = self._texts.rows(batch.epoch * len(self._texts) + batch.index, size)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, self._texts, rows, self._device)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.report(loss=loss, samples=len(rows))
        self.optimizer.step()
        if self._device.type != "cpu":
            return 0
        return int(self.optimizer.client.last_frame["payload_bytes"][0])

    def finish(self) -> None:
        """Wait until all pushed gradients are applied."""
        self.optimizer.client.wait_applied(timeout_s=60.0)

    def close(self) -> None:
        """Detach."""
        self.optimizer.client.detach()


def loss_of(
    network: torch.nn.Module, texts: Texts, rows: Any, device: torch.device
) -> torch.Tensor:
    """Return the loss of one mini-batch, padded to its longest sentence."""
    logits = network(torch.from_numpy(texts.encoded.batch(rows)).to(device))
    return functional.cross_entropy(logits, torch.from_numpy(texts.labels[rows]).to(device))


def run(trainer: Peer | Learner, what: Run) -> Done:
    """Train for a time or for a number of steps, at least one."""
    begin = time.perf_counter()
    until = begin + what.seconds
    steps = payload = 0
    while True:
        payload += trainer.step(what.size)
        steps += 1
        if steps == what.steps or (not what.steps and time.perf_counter() >= until):
            break
    trainer.finish()
    return Done(steps, steps * what.size, time.perf_counter() - begin, payload)


def profile(trainer: Peer | Learner, what: Profile) -> list[dict[str, Any]]:
    """Train for a number of steps; return the parts of the time, see gpu.step_profile."""
    from gadei_ps.benchmarks.gpu.step_profile import StepParts

    optimizer = trainer.optimizer
    if optimizer is None:
        return []
    with StepParts(optimizer, trainer.model) as parts:
        run(trainer, Run(what.size, 0.0, what.steps))
    return parts.rows(what.steps)


def answer(trainers: Sequence[Peer | Learner], request: Run | Evaluate | Profile) -> Any:
    """Carry out a request."""
    if isinstance(request, Run):
        return run(trainers[request.task], request)
    if isinstance(request, Profile):
        return profile(trainers[request.task], request)
    trainer = trainers[0]
    assert isinstance(trainer.model, SentenceClassifier)
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())  # the other members sleep
    try:
        return evaluate(trainer.model, request.texts.encoded, request.texts.labels)[0]
    finally:
        torch.set_num_threads(threads)


def main(plan: Plan, pipe: Connection) -> None:
    """Run a member until the pipe is closed."""
    # If the other end dies during a run, the process that started this one dies too.
    _native.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    torch.set_num_threads(max(1, cores() // plan.count))
    # Without this, torch warns of Adagrad's own sparse tensors.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    if (device := torch.device(plan.device)).type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(SEED * 1_000_003 + plan.rank)  # members drop different units
    texts = plan.data.texts()
    made = Learner if plan.kind in (OURS, OURS_DENSE) else Peer
    trainers = [made(plan, task, texts) for task in plan.tasks]
    with suppress(EOFError, ConnectionError):
        pipe.send(None)
        while True:
            pipe.send(answer(trainers, pipe.recv()))
    for trainer in trainers:
        trainer.close()
