"""The model in memory: its tensors, where each lies, and views of them.

Parameters come first, by their groups. Buffers (batch-norm statistics, which no optimizer moves)
follow. Each group, and the buffers, begin at a chunk boundary, so that the values of a chunk are
all moved in the same way. Each tensor begins at a multiple of 64 bytes. A dense gradient has the
same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import ModelMismatch, UsageError
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Role
from gadei_ps.memory.segment import Segment

LINE = 16  # float32 values in 64 bytes
NAME_BYTES = layout.TENSOR["name"].itemsize - 1
MAX_NAMES = 1 << 16  # of tensors, with aliases
MAX_ELEMENTS = 1 << 40  # far above any machine's memory; offsets in bytes stay below 2**63

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tensor:
    """A named tensor of the model; `start` and `count` in elements from the data's begin.

    group: number of a parameter's group, whose settings the optimizer has for it; of a buffer 0.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.PARAMETER
    start: int = 0
    aliases: tuple[str, ...] = ()
    """Its other names, where layers share it; for exports."""
    group: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Indices of its first dimension; a tensor without values has one."""
        return max(self.shape[0], 1) if self.shape else 1


@dataclass(frozen=True)
class Model:
    """The placed tensors.

    elements: includes padding. parameters: where the buffers begin, at a chunk boundary; without
    buffers it equals `elements`.
    """

    tensors: tuple[Tensor, ...]
    elements: int
    parameters: int

    @property
    def values(self) -> int:
        return sum(tensor.count for tensor in self.tensors)

    def group_ends(self, groups: int) -> list[int]:
        """For each group where the next one begins; the last one ends where the parameters do."""
        ends = [self.parameters] * groups
        for tensor in self.tensors:
            if tensor.role is Role.PARAMETER:
                for group in range(min(tensor.group, groups)):
                    ends[group] = min(ends[group], tensor.start)
        return ends

    def flatten(self, arrays: dict[str, npt.NDArray[Any]]) -> FloatArray:
        """All tensors' values, shape (elements,), in the layout of weights and dense gradients."""
        flat = np.zeros(self.elements, np.float32)
        for tensor in self.tensors:
            flat[tensor.start : tensor.start + tensor.count] = np.asarray(
                arrays[tensor.name], np.float32
            ).reshape(-1)
        return flat

    def views(self, flat: FloatArray) -> dict[str, FloatArray]:
        """Each tensor by name as a view of `flat`, shape (elements,)."""
        return {
            tensor.name: flat[tensor.start : tensor.start + tensor.count].reshape(tensor.shape)
            for tensor in self.tensors
        }

    @property
    def aliases(self) -> dict[str, str]:
        """The name of each alias' tensor."""
        return {alias: tensor.name for tensor in self.tensors for alias in tensor.aliases}


def is_name(name: str) -> bool:
    """Whether a tensor may have this name."""
    raw = name.encode(errors="replace")
    return 1 <= len(raw) <= NAME_BYTES and b"\0" not in raw and raw.decode() == name


def place(tensors: Iterable[Tensor]) -> Model:
    """Gives each tensor its start. Raises UsageError for a name or shape that is not allowed.

    A tensor without values also gets a line, so that a start belongs to one tensor.
    """
    given = list(tensors)
    if not given:
        raise UsageError("the model has no tensors")
    count = sum(1 + len(tensor.aliases) for tensor in given)
    if count > MAX_NAMES:
        raise UsageError(
            f"the model has {count:,} names of tensors, and a job has at most {MAX_NAMES:,}: join "
            "tensors of one shape (torch.stack)"
        )
    names = set()
    for tensor in given:
        for name in (tensor.name, *tensor.aliases):
            if not is_name(name):
                raise UsageError(
                    f"tensor name {name!r}: use 1 to {NAME_BYTES} bytes of UTF-8 without NUL; "
                    "shorten the names of modules"
                )
            if name in names:
                raise UsageError(f"tensor {name!r} is given twice")
            names.add(name)
        if len(tensor.shape) > layout.MAX_DIMS:
            raise UsageError(f"tensor {tensor.name!r} has more than {layout.MAX_DIMS} dimensions")
        if not all(0 <= size < MAX_ELEMENTS for size in tensor.shape):
            raise UsageError(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}: a dimension has 0 to "
                f"{MAX_ELEMENTS - 1} values"
            )
    given.sort(key=_order)  # stable: each group keeps its order
    placed: list[Tensor] = []
    at, parameters = 0, None
    for tensor in given:
        if placed and _order(placed[-1]) != _order(tensor):
            at = layout.rounded(at, layout.CHUNK)
        if tensor.role is Role.BUFFER and parameters is None:
            parameters = at
        placed.append(replace(tensor, start=at))
        at = layout.rounded(at + max(tensor.count, 1), LINE)
    if at > MAX_ELEMENTS:
        raise UsageError(f"the model has {at} values; the limit is {MAX_ELEMENTS}")
    return Model(tuple(placed), at, at if parameters is None else parameters)


def _order(tensor: Tensor) -> tuple[int, int]:
    """What lies together: the parameters of a group, the buffers."""
    return tensor.role.value, tensor.group


def segment_bytes(model: Model) -> int:
    """Size of the weights segment."""
    return data_at(rows_of(model)) + model.elements * 4


def rows_of(model: Model) -> int:
    """Of its table: tensors and aliases."""
    return len(model.tensors) + len(model.aliases)


def data_at(rows: int) -> int:
    """Bytes from the segment's begin to the values; page-aligned, as devices need it."""
    return layout.rounded(layout.WEIGHTS.itemsize + rows * layout.TENSOR.itemsize, layout.PAGE)


def payload_bytes(model: Model) -> int:
    """Room for any frame's payload: all tensors, dense or listed row by row, and their blocks."""
    size = layout.rounded(len(model.tensors) * layout.BLOCK.itemsize, LINE * 4) + model.elements * 4
    for tensor in model.tensors:
        size += LINE * 4
        if tensor.count > tensor.rows:
            size += layout.rounded(8 * tensor.rows, LINE * 4)
    return size


def write_table(segment: Segment, model: Model) -> None:
    """Watchdog: writes the tensor table, before the segment is published."""
    head = segment.view(layout.WEIGHTS)
    head["tensors"] = len(model.tensors)
    head["table_at"] = layout.WEIGHTS.itemsize
    head["data_at"] = data_at(rows_of(model))
    head["elements"] = model.elements
    head["parameters"] = model.parameters
    head["values"] = model.values
    head["aliases"] = len(model.aliases)
    table = segment.array(layout.TENSOR, rows_of(model), layout.WEIGHTS.itemsize)
    rows = [(tensor.name, tensor) for tensor in model.tensors]
    rows += [(alias, tensor) for tensor in model.tensors for alias in tensor.aliases]
    for row, (name, tensor) in zip(table, rows, strict=True):
        row["name"] = name.encode()
        row["role"] = tensor.role
        row["dims"] = len(tensor.shape)
        row["shape"][: len(tensor.shape)] = tensor.shape
        row["start"] = tensor.start
        row["count"] = tensor.count
        row["group"] = tensor.group


def read_table(segment: Segment) -> Model:
    """Any process: the model that a weights segment holds."""
    head = segment.view(layout.WEIGHTS)
    count = int(head["tensors"])
    table = segment.array(layout.TENSOR, count + int(head["aliases"]), int(head["table_at"]))
    aliases: dict[int, list[str]] = {}
    for row in table[count:]:
        aliases.setdefault(int(row["start"]), []).append(row["name"].decode())
    tensors = tuple(
        Tensor(
            row["name"].decode(),
            tuple(int(size) for size in row["shape"][: int(row["dims"])]),
            Role(int(row["role"])),
            int(row["start"]),
            tuple(aliases.get(int(row["start"]), ())),
            int(row["group"]),
        )
        for row in table[:count]
    )
    return Model(tensors, int(head["elements"]), int(head["parameters"]))


def data(segment: Segment) -> FloatArray:
    """All values, shape (elements,); writable if the segment is mapped so."""
    head = segment.view(layout.WEIGHTS)
    return segment.array(np.float32, int(head["elements"]), int(head["data_at"]))


def check_same(job: Model, offered: Sequence[Tensor]) -> None:
    """Raises ModelMismatch naming the first tensor that differs."""
    ours = {tensor.name: tensor for tensor in job.tensors}
    for tensor in offered:
        known = ours.pop(tensor.name, None)
        if known is None:
            raise ModelMismatch(f"the job's model has no tensor {tensor.name!r}")
        if known.shape != tensor.shape:
            raise ModelMismatch(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}, "
                f"the job's has {list(known.shape)}"
            )
        if known.role is not tensor.role:
            raise ModelMismatch(
                f"tensor {tensor.name!r} is a {tensor.role.name.lower()}, "
                f"the job's a {known.role.name.lower()}"
            )
    if ours:
        raise ModelMismatch(f"the learner lacks the job's tensor {next(iter(ours))!r}")
