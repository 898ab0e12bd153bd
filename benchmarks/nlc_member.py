"""One process of a contender: trains the sentence classifier when it is told to, else sleeps.

All contenders compute the same gradient of the same network on the same batches, and differ in
what becomes of it. A member answers each request on its pipe and lives until the pipe is closed.

Hogwild is written as PyTorch's examples/mnist_hogwild: the model's memory is shared by the process
that spawns the members, and each steps an optimizer of its own over it. Adagrad's sums are shared
too, with the method that torch has for it. DistributedDataParallel has dense gradients: it knows
sparse ones of torch.nn.Embedding only. Other sizes of its buckets made no difference to it.

A plan may name a GPU and another network: `gadei_ps.benchmarks.gpu` has the same contenders there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
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
from gadei_ps.classifier.dataset import Encoded
from gadei_ps.classifier.network import SentenceClassifier, evaluate
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
"""Whose gradient of the embedding has the rows that a batch names, and not all."""
FOR_EVER = 2**31 - 1

Network = Callable[[str, Texts], torch.nn.Module]
"""Makes what a contender of this kind trains on these texts, on the CPU; a module's function."""


class SharedTexts:
    """A data set in memory that a process to be started can map.

    Written into its start-up pipe, it would not fit, and the writer would wait for its imports.
    """

    def __init__(self, texts: Texts) -> None:
        """Copy it there."""
        arrays = (texts.encoded.tokens, texts.encoded.lengths, texts.labels)
        self._tensors = [torch.from_numpy(array).clone() for array in arrays]
        for tensor in self._tensors:
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._rest = texts.name, texts.vocabulary_size, texts.classes

    def texts(self) -> Texts:
        """Return it as views of that memory."""
        tokens, lengths, labels = (tensor.numpy() for tensor in self._tensors)
        name, *sizes = self._rest
        return Texts(name, Encoded(tokens, lengths), labels, *sizes)


def fresh(kind: str, texts: Texts) -> SentenceClassifier:
    """Return a new network, always of the same weights."""
    sizes = texts.vocabulary_size, texts.classes
    if kind == OURS:  # as `gadei-ps train` does
        network = SentenceClassifier(
            *sizes, seed=SEED, sparse=True, linear=linear, lookup=embedding
        )
        return network.train()
    return SentenceClassifier(*sizes, seed=SEED, sparse=kind in SPARSE).train()


@dataclass
class Plan:
    """What a member is.

    model and optimizer: those of the team, where their memory is shared. device: in words of torch.
    """

    kind: str
    rank: int
    count: int
    data: SharedTexts
    update: str
    lr: float
    rendezvous: str
    job: str = ""
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    device: str = "cpu"
    network: Network = fresh


@dataclass(frozen=True)
class Run:
    """Train on mini-batches of `size` for so many seconds, or so many steps if that is not 0."""

    size: int
    seconds: float
    steps: int = 0


@dataclass(frozen=True)
class Evaluate:
    """Measure the accuracy on these sentences."""

    texts: Texts


@dataclass(frozen=True)
class Done:
    """What a run came to."""

    steps: int
    samples: int
    seconds: float
    payload_bytes: int = field(default=0)
    """Of the gradients pushed, of gadei-ps only."""


def optimizer_of(model: torch.nn.Module, update: str, lr: float) -> torch.optim.Optimizer:
    """Return torch's optimizer of this name: sgd or adagrad."""
    if update == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=lr)
    assert update == "sgd"
    return torch.optim.SGD(model.parameters(), lr=lr)


class Peer:
    """Trains with torch alone."""

    def __init__(self, plan: Plan, texts: Texts) -> None:
        """Join the others, where there is something to join."""
        model = plan.model
        if model is None:
            model = plan.network(plan.kind, texts).to(plan.device)
        self.model = model
        self._network: torch.nn.Module = self.model
        self._texts, self._device = texts, torch.device(plan.device)
        self._number, self._stride = plan.rank, plan.count
        self._optimizer = plan.optimizer
        if plan.kind in REDUCED:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            distributed.init_process_group(
                "gloo" if plan.kind == DDP else "nccl",
                f"file://{plan.rendezvous}",
                rank=plan.rank,
                world_size=plan.count,
            )
            # Gradients stay where they were reduced: a copy of the embedding less.
            self._network = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if self._optimizer is None and plan.kind != LIMIT:
            self._optimizer = optimizer_of(self.model, plan.update, plan.lr)

    def step(self, size: int) -> int:
        """Train on one mini-batch. Returns bytes pushed: none."""
        if self._optimizer is None:
            self.model.zero_grad()
        else:
            self._optimizer.zero_grad()
        rows = self._texts.rows(self._number, size)
        self._number += self._stride
        loss = loss_of(self._network, self._texts, rows, self._device)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return 0

    def finish(self) -> None:
        """Wait for the device; on the CPU each step leaves the weights moved."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Leave the others."""
        if distributed.is_initialized():
            distributed.destroy_process_group()


class Learner:
    """Trains as a learner of `gadei-ps train` does, on batches that the server hands out.

    The server numbers the batches of an epoch and knows nothing of their size. So that the size
    can change, there is a number for each sentence, and what is in a batch is told from it here.
    """

    def __init__(self, plan: Plan, texts: Texts) -> None:
        """Attach."""
        self.model = plan.network(plan.kind, texts).to(plan.device)
        self._texts, self._device = texts, torch.device(plan.device)
        self._optimizer = Optimizer(self.model, plan.job)
        self._batches: Iterator[Any] = self._optimizer.batches(len(texts), 1, FOR_EVER, SEED)

    def step(self, size: int) -> int:
        """Train on one mini-batch. Returns the bytes of the gradient; 0 where they come later."""
        batch = next(self._batches)
        rows = self._texts.rows(batch.epoch * len(self._texts) + batch.index, size)
        self._optimizer.zero_grad()
        loss = loss_of(self.model, self._texts, rows, self._device)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.report(loss=loss, samples=len(rows))
        self._optimizer.step()
        if self._device.type != "cpu":
            return 0
        return int(self._optimizer.client.last_frame["payload_bytes"][0])

    def finish(self) -> None:
        """Wait until all that was pushed is in the weights."""
        self._optimizer.client.wait_applied(timeout_s=60.0)

    def close(self) -> None:
        """Detach."""
        self._optimizer.client.detach()


def loss_of(
    network: torch.nn.Module, texts: Texts, rows: Any, device: torch.device
) -> torch.Tensor:
    """Return the loss of one mini-batch, its sentences padded to their longest."""
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


def answer(trainer: Peer | Learner, request: Run | Evaluate) -> Done | float:
    """Do as asked."""
    if isinstance(request, Run):
        return run(trainer, request)
    assert isinstance(trainer.model, SentenceClassifier)
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())  # the others sleep
    try:
        return evaluate(trainer.model, request.texts.encoded.tokens, request.texts.labels)[0]
    finally:
        torch.set_num_threads(threads)


def main(plan: Plan, pipe: Connection) -> None:
    """Be a member until the pipe is closed."""
    # Should the other end die in the middle of a run, what has started this process dies with it.
    _native.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    torch.set_num_threads(max(1, cores() // plan.count))
    # Torch warns of Adagrad's own sparse tensors unless it is told so.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    if (device := torch.device(plan.device)).type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(SEED * 1_000_003 + plan.rank)  # units are not dropped in the same order
    texts = plan.data.texts()
    trainer = Learner(plan, texts) if plan.kind in (OURS, OURS_DENSE) else Peer(plan, texts)
    with suppress(EOFError, ConnectionError):
        pipe.send(None)
        while True:
            pipe.send(answer(trainer, pipe.recv()))
    trainer.close()
