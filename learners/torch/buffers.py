"""The buffers of a model: each learner has its own, and one learner's are the job's copy.

As in a process under DDP without SyncBatchNorm, forward() may change a buffer in place or replace
it, by values of any kind. The job's copy is what new learners, checkpoints, exports and evaluations
get. The attached learner with the lowest row writes it, from time to time and when it leaves.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Iterable
from multiprocessing import util

import numpy as np
import torch

from gadei_ps.errors import GadeiError, UsageError
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import casts, hooks
from gadei_ps.learners.torch.model import Trained
from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import F32

FIRST, MEAN, OWN = "first", "mean", "own"

WRITE_INTERVAL_S = 0.5  # between two writes of the job's copy, at least
SHARE = 100  # times the duration of a write: training is not slower by more than 1%
LAST_WRITE_S = 5.0  # for the last write
CHANGED = (
    "buffer {!r} has another shape than when Optimizer(model) was made: training continues, but "
    "checkpoints and exports keep what it was then; run one forward pass before Optimizer(model)"
)
FROZEN = (
    "frozen parameter {!r} has other values than when the job's model was made: this learner "
    "computes with them, but checkpoints and exports keep the old ones; load before "
    "Optimizer(model), or give it frozen=False"
)


def check(rule: str) -> None:
    """Raise UsageError unless the rule is known."""
    if rule not in (FIRST, MEAN, OWN):
        raise UsageError(f"buffers={rule!r}: use 'first', 'mean' or 'own'")


class Buffers:
    """One learner's buffers, and the job's copy of them. Of the thread that trains.

    rule: see Optimizer.
    """

    def __init__(self, client: Client, trained: Trained, rule: str) -> None:
        self._client = client
        self._trained = trained
        self._tensors = {
            tensor.name: tensor
            for tensor in client.model.tensors
            if tensor.role is Role.BUFFER and tensor.name in trained.buffers
        }
        self._means = rule == MEAN
        self._has_warned = False  # of a buffer whose shape is not the job's
        self._learners = 1
        """The most that were attached since the last write."""
        self._has_written = False
        self._next = time.monotonic() + WRITE_INTERVAL_S
        self._frozen = [one for one in client.model.frozen if one.name in trained.fixed]
        for tensor in self._frozen:  # as DDP has them, too, of its first process
            parameter = trained.fixed[tensor.name]
            values = casts.tensor(client.weights[tensor.name], tensor.dtype)
            if not torch.equal(parameter, values.to(parameter.device, parameter.dtype)):
                parameter.data.copy_(values)
        self.load()
        self._exit = hooks.weakly(self.close)
        atexit.register(self._exit)  # before the client's own, which leaves the job
        # A process of multiprocessing ends by these, and not by those of atexit. This comes before
        # HostBackend's own, which writes to memory that other processes see.
        self._ending = util.Finalize(None, self._exit, exitpriority=1)

    def warn_of_frozen(self, names: Iterable[str]) -> None:
        """Warn of loaded frozen parameters that differ from the job's, which nothing writes."""
        for tensor in self._frozen:
            if tensor.name not in names:
                continue
            own = casts.bits(self._trained.fixed[tensor.name])
            if not np.array_equal(_bits(own), _bits(self._client.weights[tensor.name])):
                warn(FROZEN.format(tensor.name))
                return

    def current(self) -> dict[str, torch.Tensor]:
        """Return the model's buffers that the job has, too, by name."""
        found = {name: self._own(name) for name in self._tensors}
        return {name: one for name, one in found.items() if one is not None}

    # -- from the job ---------------------------------------------------------------------------

    def load(self, names: Iterable[str] | None = None) -> None:
        """Copy the job's buffers to the model's. names: only of these."""
        shared = self._client.weights
        for name, tensor in self._tensors.items():
            if (names is None or name in names) and (own := self._own(name)) is not None:
                put(self._trained, name, own, casts.tensor(shared[name], tensor.dtype))

    def _own(self, name: str) -> torch.Tensor | None:
        """Return the model's buffer; None, with one warning, if it has another shape now."""
        own = self._trained.buffer(name)
        if own is not None and own.shape == self._tensors[name].shape:
            return own
        if not self._has_warned:
            self._has_warned = True
            warn(CHANGED.format(name))
        return None

    # -- to the job -----------------------------------------------------------------------------

    def write_if_due(self) -> None:
        """Write after a step if it is time. Raises what Client.assign raises."""
        if self._tensors and time.monotonic() >= self._next:
            self.write()

    def write(self, timeout_s: float | None = None) -> None:
        """Write the job's copy if this learner has to, and it differs. Does not wait until it is
        there. Raises what Client.assign raises."""
        begun = time.monotonic()
        rows = self._client.rows_with_buffers()
        leads = rows[:1] == [self._client.row]
        self._learners = max(self._learners, len(rows))
        if self._tensors and (leads or self._means):
            self._write(leads, timeout_s)
        now = time.monotonic()
        self._next = now + max(WRITE_INTERVAL_S, SHARE * (now - begun))

    def _write(self, leads: bool, timeout_s: float | None) -> None:
        shared = self._client.weights
        # What the job has before a learner has written is not what was trained.
        means = self._means and self._learners > 1 and (self._has_written or not leads)
        whole: dict[str, np.ndarray] = {}
        moves: dict[str, np.ndarray] = {}
        for name, tensor in self._tensors.items():
            if (own := self._own(name)) is None:
                continue
            values, copy = casts.copy(own, tensor.dtype), shared[name]
            if np.array_equal(_bits(values), _bits(copy)):
                continue
            move = None
            if means and tensor.dtype == F32:
                move = toward(values, copy, self._learners)
            if move is not None:
                moves[name] = move
            elif leads:
                whole[name] = values
        if moves:
            self._client.add(moves, timeout_s=timeout_s, wait=False)
        if whole:
            self._client.assign(whole, timeout_s=timeout_s, wait=False)
        self._learners = 1
        self._has_written = self._has_written or leads

    def close(self, *, write: bool = True) -> None:
        """End with the learner. write: whether the job's copy is written once more."""
        atexit.unregister(self._exit)
        self._ending.cancel()
        if write and not self._client.left:
            with contextlib.suppress(GadeiError):  # the job has ended, or the GPU has failed
                self._client.check_publisher()
                self.write(LAST_WRITE_S)
        self._tensors = {}


def toward(own: np.ndarray, copy: np.ndarray, learners: int) -> np.ndarray | None:
    """Return the step of the job's copy to one learner's values by its share; None where there is
    no mean.

    If all learners write at once, each having seen the same copy, the copy becomes their mean. If
    fewer do, it lies between that and what it was. So it never leaves the range of their values.
    """
    with np.errstate(all="ignore"):
        move: np.ndarray = (own - copy) / np.float32(learners)
    return move if np.isfinite(move).all() else None


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def put(trained: Trained, name: str, own: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a buffer of the model, or replace it if it cannot be written to."""
    values = values.to(own.device, own.dtype)
    if torch.equal(own, values):
        return
    if own.is_inference() or _overlaps(own):
        trained.replace(name, values)
    else:
        own.data.copy_(values)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements are one in memory, as expand() makes them."""
    return any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
