"""The state of a job that outlives its processes, and the manifest that describes it."""

from __future__ import annotations

import json
import operator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
    model_validator,
)

import gadei_ps
from gadei_ps import metrics
from gadei_ps.errors import UsageError, invalid
from gadei_ps.memory import layout, shm, weights
from gadei_ps.memory.layout import Role, Work
from gadei_ps.memory.owned import EPOCH_AT, INDEX
from gadei_ps.storage import files

KIND: Final = "gadei-ps checkpoint"
FORMAT: Final = 1
GROUPED: Final = 2
"""The format of a job with groups of parameters: its tensors have a `group`."""
TYPED: Final = 3
"""Format of GROUPED for a job with frozen tensors or buffers of other types than float32."""
MOST_REQUEUED: Final = layout.MAX_LEARNERS * layout.AHEAD
"""Batches that all learners of a job can hold; its memory has room for as many."""
SAVED: Final = (
    *("job", "version", "steps", "supersteps", "work", "counts", "loss_sum", "clocks", "config"),
    "changes",
)
"""Fields of Snapshot that a manifest has as they are."""

Count = Annotated[int, Field(ge=0, lt=2**63)]
Word = Annotated[int, Field(ge=0, lt=2**64)]


class _Object(BaseModel):
    """An object of a manifest. A later release may add fields, which are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class WorkRow(_Object):
    """The batch ledger. `next`: the epoch in the upper 32 bits, the index of the batch below."""

    batches: Annotated[int, Field(ge=0, lt=2**31)]
    epochs: Annotated[int, Field(ge=0, lt=2**31)]
    seed: Count
    next: Word
    epochs_done: Annotated[int, Field(ge=0, lt=2**31)]
    state: Annotated[int, Field(ge=0, le=max(Work))]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.state == Work.NONE:
            if any(self.model_dump().values()):
                raise ValueError("there are numbers of batches, but no work has begun")
            return self
        if not (self.batches and self.epochs):
            raise ValueError("work has begun, but there are no batches or no epochs")
        epoch, index = divmod(self.next, 1 << EPOCH_AT)
        if epoch >= self.epochs or index > self.batches:
            raise ValueError(f"next is batch {index} of epoch {epoch}, and there is none")
        if self.epochs_done > self.epochs:
            raise ValueError(f"{self.epochs_done} of {self.epochs} epochs are done")
        return self

    def check(self, requeue: np.ndarray) -> None:
        """Raise ValueError if one of these batches does not belong to the work."""
        wrong = requeue[
            (requeue >> np.uint64(EPOCH_AT) >= self.epochs)
            | (requeue & np.uint64(INDEX) >= self.batches)
        ]
        if len(wrong):
            epoch, index = divmod(int(wrong[0]), 1 << EPOCH_AT)
            raise ValueError(f"requeue has batch {index} of epoch {epoch}, and there is none")


class TensorRow(_Object):
    """A tensor of the model. group: from the format GROUPED on; dtype: from TYPED on."""

    name: str
    role: Literal["parameter", "buffer", "frozen"]
    shape: list[Count]
    start: Count
    aliases: list[str] = []
    group: int | None = None
    dtype: str = weights.F32

    def tensor(self, grouped: bool) -> weights.Tensor:
        """Raise ValueError if its group is missing, or for a type that it cannot have."""
        if grouped and self.group is None:
            raise ValueError(f"tensor {self.name!r} has no group")
        if self.dtype not in (weights.DTYPES if self.role != "parameter" else (weights.F32,)):
            raise ValueError(f"tensor {self.name!r} is of type {self.dtype[:80]!r}")
        role, group = Role[self.role.upper()], self.group if grouped else None
        shape, aliases = tuple(self.shape), tuple(self.aliases)
        return weights.Tensor(self.name, shape, role, self.start, aliases, group or 0, self.dtype)


class Manifest(_Object):
    """The contents of manifest.json, as far as they are read.

    config: of the job that wrote it; whoever uses it decides which of its settings count.
    """

    format: Literal[1, 2, 3]
    job: str = Field(pattern=shm.WHOLE_JOB_NAME)
    version: Count
    steps: Count
    supersteps: Count
    work: WorkRow
    counts: dict[str, Count]
    loss_sum: FiniteFloat = 0.0
    clocks: dict[str, Word]
    slots: int = Field(ge=0, lt=layout.MAX_STREAMS)
    requeue: int = Field(ge=0, le=MOST_REQUEUED)
    elements: int = Field(ge=0, le=weights.MAX_ELEMENTS)
    parameters: int = Field(ge=0, le=weights.MAX_ELEMENTS)
    config: dict[str, Any]
    changes: dict[str, Any] = {}
    tensors: list[TensorRow]

    @field_validator("counts")
    @classmethod
    def _metrics(cls, counts: dict[str, int]) -> dict[str, int]:
        """Those of metrics.JOB. An older checkpoint lacks metrics that were added later."""
        saved = [one for one in metrics.JOB if one.is_saved]
        missing = [one.word for one in saved if one.word not in counts and not one.added]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return {one.word: counts.get(one.word, 0) for one in saved}

    def snapshot(self, model: weights.Model) -> Snapshot:
        """The job, with zeros in the arrays."""
        return Snapshot(
            model=model,
            weights=np.zeros(model.elements, np.float32),
            slots=tuple(np.zeros(model.elements, np.float32) for _ in range(self.slots)),
            requeue=np.zeros(self.requeue, np.uint64),
            frozen=np.zeros(model.words - model.elements, np.float32),
            **self.model_dump(include=set(SAVED)),
        )


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A job between two gradients. Padding between tensors is zero once it has been on a disk."""

    job: str
    config: dict[str, Any]  # JobConfig.model_dump(mode="json")
    model: weights.Model
    weights: np.ndarray  # float32 (model.elements,)
    slots: tuple[np.ndarray, ...]  # of the optimizer, each float32 (model.elements,)
    version: int  # gradients applied
    steps: int  # of the optimizer, equal in all shards
    supersteps: int
    work: dict[str, int]  # batches, epochs, seed, next, epochs_done, state
    requeue: np.ndarray  # uint64 (n,), batches to be handed out again, with those outstanding
    counts: dict[str, int]  # by word of the metrics that a checkpoint keeps
    clocks: dict[str, int]  # of learners, for information
    changes: dict[str, Any] = field(default_factory=dict)  # job.changes.Changes, as JSON
    frozen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """Values after the weights, float32 (model.words - model.elements,)."""
    loss_sum: float = 0.0
    """Sum of the losses that the word `loss_count` of `counts` counts."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Each tensor by name; views, of the types in weights.DTYPES."""
        model = self.model
        return {one.name: one.of(self.weights) for one in model.tensors} | {
            one.name: one.of(self.frozen, model.elements) for one in model.frozen
        }

    def weight_tensors(self) -> files.Tensors:
        """Return the content of weights.safetensors; views."""
        return {name: (one.shape, one.reshape(-1)) for name, one in self.arrays().items()}

    def state_tensors(self) -> files.Tensors:
        """Return the content of state.safetensors; views. Integers first: 8-byte values aligned."""
        return {"requeue": (self.requeue.shape, self.requeue)} | {
            f"{index}/{one.name}": (shape, slot[one.start : one.start + one.count])
            for index, slot in enumerate(self.slots)
            for one in self.model.tensors
            for shape in [one.shape if one.dtype == weights.F32 else (one.count,)]
        }

    def check(self) -> None:
        """Raise ValueError for what cannot be written so that it can be read."""
        for flat in (self.weights, *self.slots):
            if flat.dtype != np.float32 or flat.shape != (self.model.elements,):
                raise ValueError(f"an array is {flat.dtype} {flat.shape}, not one of the model's")
        if self.frozen.shape != (self.model.words - self.model.elements,):
            raise ValueError(f"the frozen tensors are {self.frozen.shape}, not those of the model")
        if self.requeue.dtype != np.uint64 or self.requeue.ndim != 1:
            raise ValueError(f"requeue is {self.requeue.dtype} {self.requeue.shape}")
        if not all(one.flags.c_contiguous for one in (self.weights, *self.slots, self.requeue)):
            raise ValueError("an array is not contiguous")
        parse(self.manifest())[0].work.check(self.requeue)

    def manifest(self) -> bytes:
        """All but the arrays. Raises ValueError for a configuration that is not JSON."""
        optimizer = self.config.get("optimizer")
        grouped = isinstance(optimizer, dict) and bool(optimizer.get("groups"))
        grouped = grouped or any(one.group for one in self.model.tensors)
        typed = any(one.dtype != weights.F32 for one in self.model.tensors) or self.model.frozen
        fields = {
            "kind": KIND,
            "format": TYPED if typed else GROUPED if grouped else FORMAT,
            "gadei_ps": gadei_ps.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            **{name: getattr(self, name) for name in SAVED},
            "slots": len(self.slots),
            "requeue": len(self.requeue),
            "elements": self.model.elements,
            "parameters": self.model.parameters,
            "tensors": [
                {
                    "name": one.name,
                    "role": one.role.name.lower(),
                    "shape": one.shape,
                    "start": one.start,
                }
                | ({"aliases": one.aliases} if one.aliases else {})
                | ({"group": one.group} if grouped or typed else {})
                | ({"dtype": one.dtype} if typed else {})
                for one in self.model.every
            ],
        }
        try:
            # In ASCII: a path in the configuration need not be Unicode. index: of NumPy's integers.
            text = json.dumps(fields, allow_nan=False, indent=1, default=operator.index)
        except TypeError as error:
            raise ValueError(f"config: {error}") from None
        return text.encode() + b"\n"


def parse(text: bytes) -> tuple[Manifest, weights.Model]:
    """A manifest, checked, and the model. Raises ValueError for anything else."""
    fields = files.parse_object(text)
    if fields.get("kind") != KIND:
        raise ValueError("not the manifest of a gadei-ps checkpoint")
    if fields.get("format") not in (FORMAT, GROUPED, TYPED):
        raise ValueError(
            f"it has format {fields.get('format')!r}, this gadei-ps reads {FORMAT} to {TYPED}"
        )
    try:
        found = Manifest.model_validate(fields)
    except ValidationError as error:
        raise ValueError(invalid(error)) from None
    every = tuple(one.tensor(found.format >= GROUPED) for one in found.tensors)
    frozen = tuple(one for one in every if one.role is Role.FROZEN)
    tensors = every[: len(every) - len(frozen)]
    model = weights.Model(tensors, found.elements, found.parameters, frozen)
    _check_placement(model)
    return found, model


def _check_placement(model: weights.Model) -> None:
    """Raise ValueError unless the tensors lie as weights.place lays them.

    That also bounds the elements by the values and the padding.
    """
    for one in model.every:
        groups = layout.MAX_GROUPS if one.role is Role.PARAMETER else 1
        if not 0 <= one.group < groups:
            raise ValueError(f"tensor {one.name!r} is in group {one.group}, where it cannot be")
    try:
        placed = weights.place(model.every)
    except UsageError as error:
        raise ValueError(str(error)) from None
    for one, other in zip(model.every, placed.every, strict=True):
        if one != other:
            raise ValueError(f"tensor {one.name!r} starts at {one.start}, where it cannot be")
    if model != placed:
        raise ValueError(f"the model has {model.elements} elements, its tensors {placed.elements}")
