"""The state of a job that outlives its processes, and the manifest that describes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np

import gadei_ps
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import Role
from gadei_ps.storage import files

KIND: Final = "gadei-ps checkpoint"
FORMAT: Final = 1
GROUPED: Final = 2
"""The format of a job with groups of parameters: its tensors have a `group`."""
MOST_REQUEUED: Final = 1 << 20  # far above what all learners of a job can hold


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
    counts: dict[str, int]  # applied, dropped, refused, samples, requeued_total
    clocks: dict[str, int]  # of learners, for information
    changes: dict[str, Any] = field(default_factory=dict)  # job.changes.Changes, as JSON

    def weight_tensors(self) -> files.Tensors:
        """What weights.safetensors holds; views."""
        return {
            one.name: (one.shape, self.weights[one.start : one.start + one.count])
            for one in self.model.tensors
        }

    def state_tensors(self) -> files.Tensors:
        """What state.safetensors holds; views. The integers first: 8-byte values begin aligned."""
        return {"requeue": (self.requeue.shape, self.requeue)} | {
            f"{index}/{one.name}": (one.shape, slot[one.start : one.start + one.count])
            for index, slot in enumerate(self.slots)
            for one in self.model.tensors
        }

    def check(self) -> None:
        """Raises ValueError for what cannot be written so that it can be read."""
        for flat in (self.weights, *self.slots):
            if flat.dtype != np.float32 or flat.shape != (self.model.elements,):
                raise ValueError(f"an array is {flat.dtype} {flat.shape}, not one of the model's")
        if self.requeue.dtype != np.uint64 or self.requeue.ndim != 1:
            raise ValueError(f"requeue is {self.requeue.dtype} {self.requeue.shape}")
        if not all(one.flags.c_contiguous for one in (self.weights, *self.slots, self.requeue)):
            raise ValueError("an array is not contiguous")
        if len(self.slots) >= layout.MAX_STREAMS:
            raise ValueError(f"{len(self.slots)} slots are more than any optimizer has")
        if len(self.requeue) > MOST_REQUEUED:
            raise ValueError(f"{len(self.requeue)} batches are more than can be requeued")
        _check_placement(self.model)

    def manifest(self) -> bytes:
        """All but the arrays. Raises ValueError for a configuration that is not JSON."""
        optimizer = self.config.get("optimizer")
        grouped = isinstance(optimizer, dict) and bool(optimizer.get("groups"))
        grouped = grouped or any(one.group for one in self.model.tensors)
        fields = {
            "kind": KIND,
            "format": GROUPED if grouped else FORMAT,
            "gadei_ps": gadei_ps.__version__,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "job": self.job,
            "version": int(self.version),
            "steps": int(self.steps),
            "supersteps": int(self.supersteps),
            "work": _integers(self.work),
            "counts": _integers(self.counts),
            "clocks": _integers(self.clocks),
            "slots": len(self.slots),
            "requeue": len(self.requeue),
            "elements": int(self.model.elements),
            "parameters": int(self.model.parameters),
            "config": self.config,
            "changes": self.changes,
            "tensors": [
                {
                    "name": one.name,
                    "role": one.role.name.lower(),
                    "shape": [int(size) for size in one.shape],
                    "start": int(one.start),
                }
                | ({"aliases": list(one.aliases)} if one.aliases else {})
                | ({"group": int(one.group)} if grouped else {})
                for one in self.model.tensors
            ],
        }
        try:
            # In ASCII: a path in the configuration need not be Unicode.
            return json.dumps(fields, allow_nan=False, indent=1).encode() + b"\n"
        except TypeError as error:
            raise ValueError(f"config: {error}") from None


def _integers(numbers: dict[str, int]) -> dict[str, int]:
    """NumPy's are not JSON."""
    return {name: int(value) for name, value in numbers.items()}


_FIELDS: Final[dict[str, type]] = {
    "job": str,
    "version": int,
    "steps": int,
    "supersteps": int,
    "work": dict,
    "counts": dict,
    "clocks": dict,
    "slots": int,
    "requeue": int,
    "elements": int,
    "parameters": int,
    "config": dict,
    "tensors": list,
}


def parse(text: bytes) -> tuple[dict[str, Any], weights.Model]:
    """The fields of a manifest, checked, and the model. Raises ValueError for anything else."""
    fields = files.parse_object(text)
    if fields.get("kind") != KIND:
        raise ValueError("not the manifest of a gadei-ps checkpoint")
    if fields.get("format") not in (FORMAT, GROUPED):
        raise ValueError(
            f"it has format {fields.get('format')!r}, this gadei-ps reads {FORMAT} and {GROUPED}"
        )
    grouped = fields["format"] == GROUPED
    for name, kind in _FIELDS.items():
        value = fields.get(name)
        if type(value) is not kind:  # isinstance takes a bool for an int
            raise ValueError(f"{name} is {type(value).__name__}, not {kind.__name__}")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{name} is negative")
    if not isinstance(fields.setdefault("changes", {}), dict):
        raise ValueError("changes is no object")
    for name in ("work", "counts", "clocks"):
        if any(type(value) is not int for value in fields[name].values()):
            raise ValueError(f"{name} holds other things than integers")
    if fields["slots"] >= layout.MAX_STREAMS:
        raise ValueError(f"{fields['slots']} slots are more than any optimizer has")
    if fields["requeue"] > MOST_REQUEUED:
        raise ValueError(f"{fields['requeue']} batches are more than can be requeued")
    tensors = tuple(_parse_tensor(row, grouped) for row in fields["tensors"])
    model = weights.Model(tensors, fields["elements"], fields["parameters"])
    _check_placement(model)
    return fields, model


def _parse_tensor(row: Any, grouped: bool) -> weights.Tensor:
    group = row.get("group") if grouped and isinstance(row, dict) else 0
    match row:
        case {
            "name": str(name),
            "role": "parameter" | "buffer" as role,
            "shape": [*shape],
            "start": int(start),
        } if all(type(size) is int for size in shape) and type(group) is int:
            aliases = row.get("aliases", [])
            if type(aliases) is list and all(type(one) is str for one in aliases):
                role = Role[role.upper()]
                return weights.Tensor(name, tuple(shape), role, start, tuple(aliases), group)
    raise ValueError(f"tensors: {row!r} does not describe one")


def _check_placement(model: weights.Model) -> None:
    """Raises ValueError unless the tensors lie as weights.place lays them.

    That also bounds the elements by the values and the padding.
    """
    end, group, parameters = 0, None, None
    names: set[str] = set()
    for one in model.tensors:
        for name in (one.name, *one.aliases):
            if not weights.is_name(name):
                raise ValueError(f"tensor {name!r} has an impossible name")
            if name in names:
                raise ValueError(f"tensor {name!r} is there twice")
            names.add(name)
        if len(one.shape) > layout.MAX_DIMS or any(size < 0 for size in one.shape):
            raise ValueError(f"tensor {one.name!r} has an impossible shape {list(one.shape)}")
        start = layout.rounded(end, weights.LINE)
        is_first = one.role is Role.BUFFER and parameters is None
        if is_first or group not in (None, one.group):
            start = layout.rounded(start, layout.CHUNK)
        if is_first:
            parameters, group = start, None
        if not (group or 0) <= one.group < (layout.MAX_GROUPS if parameters is None else 1):
            raise ValueError(f"tensor {one.name!r} is in group {one.group}, where it cannot be")
        group = one.group
        if one.start != start or (one.role is Role.PARAMETER and parameters is not None):
            raise ValueError(f"tensor {one.name!r} begins at {one.start}, where it cannot be")
        end = start + max(one.count, 1)
    elements = layout.rounded(end, weights.LINE)
    if not names or elements > weights.MAX_ELEMENTS:
        raise ValueError("the model has no tensors, or too many values")
    if parameters is None:
        parameters = elements
    if (model.elements, model.parameters) != (elements, parameters):
        raise ValueError(f"the model has {model.elements} elements, its tensors {elements}")
