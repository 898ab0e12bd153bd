"""A gradient in its slot: where its values lie, how it is written, how it is published.

Nothing here waits; client.py waits for the turn and for a slot. native/ps_learner.h makes the
frames, for this client and for the one for C.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import GadeiError, ModelMismatch, UsageError
from gadei_ps.learners.attach import Place
from gadei_ps.learners.work import Taken
from gadei_ps.memory import layout
from gadei_ps.memory.layout import RING, Role
from gadei_ps.memory.weights import FloatArray, Model, Tensor

UNKNOWN = math.nan  # loss


class Rows(NamedTuple):
    """The gradient of some rows of a tensor, as mini-batches touch an embedding's.

    indices: int64 of shape (n,), in any order; the values of repeated ones are added up. values:
    float32 of shape (n, and the tensor's without its first dimension). Where rows are single
    values, a list of more than a third of them would take more room than all values: then all are
    pushed, and rows that are not named move as by a gradient of zero.
    """

    indices: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


Gradients = Mapping[str, npt.NDArray[Any] | Rows | None]

Where = tuple[int, int, int, int]
"""A tensor's gradient by its addresses: values, indices, count, factors (struct ps_gradient)."""

NONE: Where = (0, 0, 0, 0)
"""For Client.push_from: a tensor without a gradient."""


def whole_at(values: int) -> Where:
    """For Client.push_from: all of a tensor, by its address."""
    return values, 0, 0, 0


def rows_at(indices: int, values: int, count: int) -> Where:
    """For Client.push_from: int64 indices and their float32 rows, by address."""
    # No rows are also rows, not a whole tensor; an empty array may have no address.
    return (values, indices, count, 0) if count else (1, 1, 0, 0)


def product_at(factors: int, vectors: int, count: int) -> Where:
    """For Client.push_from: the transposed of `factors` times `vectors`, by address.

    factors: float32 of shape (count, rows of the tensor). vectors: (count, values of a row).
    """
    return (vectors, 0, count, factors) if count else NONE


UNTOUCHED = rows_at(0, 0, 0)
"""For Client.push_from: none of its rows. The tensor stays as it is, with the optimizer's state."""


def row_indices(tensor: str, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Raises ModelMismatch for what are no whole numbers."""
    given = np.asarray(indices)
    if given.size and given.dtype.kind not in "iu":
        raise ModelMismatch(f"rows of {tensor!r}: indices of {given.dtype}, not integers")
    return np.ascontiguousarray(given, np.int64)


def addresses(model: Model, gradients: Gradients | FloatArray, kept: list[object]) -> list[int]:
    """Gradients as Client.push_from() takes them.

    kept: receives the arrays, which must live as long as the addresses are used. Raises
    ModelMismatch.
    """
    if isinstance(gradients, np.ndarray):
        if gradients.shape != (model.elements,):
            raise ModelMismatch(
                f"gradient has shape {list(gradients.shape)}, the model [{model.elements}]"
            )
        flat = np.ascontiguousarray(gradients, np.float32)
        kept.append(flat)
        return [_native.address(flat)]
    if not isinstance(gradients, Mapping):
        raise ModelMismatch(
            f"gradients are a {type(gradients).__name__}, not arrays by name or one flat array"
        )
    where: list[int] = []
    named = 0
    for tensor in model.tensors:
        gradient = gradients.get(tensor.name)
        named += tensor.name in gradients
        if gradient is None:
            where += NONE
        elif tensor.role is Role.BUFFER:
            raise no_gradient(tensor)
        elif isinstance(gradient, Rows):
            indices, values = _rows(tensor, gradient)
            kept += (indices, values)
            where += rows_at(_native.address(indices), _native.address(values), indices.size)
        else:
            source = _source(tensor, gradient)
            kept.append(source)
            where += whole_at(_native.address(source))
    if named < len(gradients):
        unknown = gradients.keys() - {tensor.name for tensor in model.tensors}
        raise ModelMismatch(f"the job's model has no tensor {sorted(unknown)[0]!r}")
    return where


def no_gradient(buffer: Tensor) -> ModelMismatch:
    """For a gradient of a buffer."""
    return ModelMismatch(
        f"{buffer.name!r} is a buffer, which no gradient moves: write it with assign()"
    )


def _rows(tensor: Tensor, given: Rows) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """Rows as C reads them. Raises ModelMismatch."""
    indices = row_indices(tensor.name, given.indices)
    values = np.ascontiguousarray(given.values, np.float32)
    if indices.ndim != 1 or values.shape != (indices.size, *tensor.shape[1:]):
        raise ModelMismatch(
            f"rows of {tensor.name!r}: {list(indices.shape)} indices and values of shape "
            f"{list(values.shape)}; the tensor has shape {list(tensor.shape)}"
        )
    return indices, values


def _source(tensor: Tensor, gradient: npt.NDArray[Any]) -> FloatArray:
    """The gradient of a whole tensor as C reads it. Raises ModelMismatch."""
    if not hasattr(gradient, "shape"):
        raise ModelMismatch(
            f"gradient of {tensor.name!r} is a {type(gradient).__name__}, not an array or Rows"
        )
    if gradient.shape != tensor.shape:
        raise ModelMismatch(
            f"gradient of {tensor.name!r} has shape {list(gradient.shape)}, "
            f"the tensor {list(tensor.shape)}"
        )
    return np.ascontiguousarray(gradient, np.float32)


class Frames(ABC):
    """The part of a client that fills slots and publishes them."""

    model: Model
    place: Place
    _taken: Taken
    _learner: _native.Learner
    _by_pieces: set[int] | None = None
    """Tensors that append() has written into the claimed slot; None if it holds none of them."""

    @abstractmethod
    def check_process(self) -> None:
        """Raises UsageError in a child process of the one that attached."""

    @abstractmethod
    def _counted(self, batch: int) -> None:
        """Notes that a gradient is published, which answers `batch`."""

    @abstractmethod
    def _evicted(self) -> GadeiError:
        """What a learner is told whose job has let it go."""

    @abstractmethod
    def _ended(self) -> GadeiError:
        """What a learner is told when its job has ended."""

    def _wrong(self, error: Exception) -> GadeiError:
        """An error of the native half as the user reads it."""
        if isinstance(error, IndexError):
            number, row = error.args
            tensor = self.model.tensors[number]
            return ModelMismatch(f"{tensor.name!r} has no row {row} of {tensor.rows}")
        return UsageError(str(error))

    def write_named(self, payload: int, gradients: Gradients | FloatArray) -> None:
        """Writes all tensors' gradients, as push() takes them, into a claimed slot."""
        kept: list[object] = []
        where = addresses(self.model, gradients, kept)
        self._by_pieces = None
        try:
            self._learner.write_frame(payload, where)
        except (IndexError, ValueError) as error:
            raise self._wrong(error) from None

    def append(self, payload: int, number: int, where: Sequence[int]) -> None:
        """Writes one tensor into a claimed slot: any of them, in any order, once.

        number: in the model. where: four numbers as push_from() takes them. Tensors that are
        not appended are left as they are. Raises ModelMismatch for a row outside the tensor.
        """
        if tuple(where) == NONE:
            return
        if not self._learner.kind:
            try:
                self._learner.begin(payload)
            except ValueError as error:
                raise self._wrong(error) from None
            self._by_pieces = set()
        if self._by_pieces is None:
            raise UsageError("append() begins with a slot that holds nothing")
        if self.model.tensors[number].role is Role.BUFFER:
            raise no_gradient(self.model.tensors[number])
        if number in self._by_pieces:
            raise UsageError(f"{self.model.tensors[number].name!r} is written already")
        try:
            self._learner.append(number, where)
        except (IndexError, ValueError) as error:
            raise self._wrong(error) from None
        self._by_pieces.add(number)

    def publish(
        self,
        *,
        loss: float = UNKNOWN,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
        version: int | None = None,
    ) -> int:
        """Makes the claimed and written slot visible; returns the gradient's sequence number."""
        self.check_process()
        if not self._learner.kind:
            raise UsageError("nothing is written into the claimed slot")
        answers = self._taken.begin(batch)
        if version is None:
            version = self._learner.version
        before = self.published
        try:
            sequence = self._learner.publish((version, answers, samples, rate_scale, loss))
        except BaseException as error:
            self._settle(error, before, batch, answers)
            if isinstance(error, ValueError):
                raise self._wrong(error) from None
            raise
        if sequence < 0:
            self._taken.put_back(batch, answers)
            raise self._evicted() if sequence == _native.PS_EVICTED else self._ended()
        self._counted(answers)
        return sequence

    def _settle(self, error: BaseException, before: int, batch: int | None, answers: int) -> None:
        """After an error in a push; before: `published` then. Interrupts come afterwards, too."""
        if isinstance(error, Exception) or self.published == before:
            self._taken.put_back(batch, answers)
        else:
            self._taken.remove(answers)

    def check_facts(
        self,
        *,
        version: int,
        loss: float | None = None,
        samples: int = 0,
        rate_scale: _native.Scales = 1.0,
        batch: int | None = None,
    ) -> _native.Facts:
        """What publish_landed() says of a gradient, for use before anything of it is on its way.

        Raises UsageError for facts that no frame may say.
        """
        batch = self._taken.answered(batch)
        facts = version, batch, samples, rate_scale, 0.0 if loss is None else loss
        try:
            self._learner.check(facts)
        except ValueError as error:
            raise self._wrong(error) from None
        return facts

    def publish_landed(
        self,
        landing: int,
        sums: int,
        parts: int,
        frame: tuple[int, int, int],
        launch: Callable[[], None],
        facts: _native.Facts,
        *,
        loss_there: bool,
    ) -> None:
        """Lets a device's driver publish the claimed slot, once transfers into it are through.

        Prepares `landing`, _native.LANDING_BYTES of memory. launch: has the driver call
        _native.LAND with it; the gradient counts as published from then on. sums: address of what
        is transferred beside the payload (native/ps_land.h), parts: of the sum of squares in it.
        frame: kind, blocks, bytes of the payload. facts: of check_facts(). loss_there: whether the
        loss is among the sums.
        """
        try:
            self._learner.land(landing, (sums, parts, int(loss_there), *frame), facts)
        except ValueError as error:
            raise self._wrong(error) from None
        launch()
        self._learner.counted()
        self._counted(facts[1])

    @property
    def wanted(self) -> bool:
        """Whether the gradient of the iteration in hand may still be applied.

        False once the synchronization model has gone on without it (Cutoff): what is computed now
        will be dropped, and give_up() is the quicker way to the next iteration.
        """
        return self._learner.wanted()

    @property
    def published(self) -> int:
        """Gradients published so far, with those given up."""
        return self._learner.published

    @property
    def version(self) -> int:
        """Of the weights that the next gradient is computed from, unless push() is told."""
        return self._learner.version

    @property
    def last_frame(self) -> npt.NDArray[np.void]:
        """Header (layout.FRAME, shape (1,)) of the gradient published last."""
        ring = self.place.ring.view(RING)
        slot = (self.published - 1) % int(ring["slots"])
        at = int(ring["slots_at"]) + slot * int(ring["slot_bytes"])
        return self.place.ring.array(layout.FRAME, 1, at)
