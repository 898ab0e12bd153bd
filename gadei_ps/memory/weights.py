"""The model in memory: its tensors, where each lies, and views of them.

Parameters come first, by their groups. Buffers (batch-norm statistics, which no gradient moves)
follow. Each group, and the buffers, begin at a chunk boundary, so that the values of a chunk are
all moved in the same way. Each tensor begins at a multiple of 64 bytes. A dense gradient has the
layout of the parameters.

Buffers may be of other types than float32: their bytes are those of the tensor, in as many words of
float32 as they need. Frozen tensors follow behind all that frames reach, so that they take no room
in rings and in the optimizer's state; nothing writes them once the model is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

F32 = "F32"
DTYPES: Mapping[str, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Types of values by their names in safetensors. NumPy has bfloat16 by its bits only."""
FLOATS = frozenset(("F64", F32, "F16", "BF16"))
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Tensor:
    """A named tensor of the model; `start` and `count` in elements from the data's begin.

    group: number of a parameter's group, whose settings the optimizer has for it; else 0. dtype: of
    DTYPES; of a parameter F32.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = Role.PARAMETER
    start: int = 0
    aliases: tuple[str, ...] = ()
    """Its other names, where layers share it; for exports."""
    group: int = 0
    dtype: str = F32

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.values * DTYPES[self.dtype].itemsize

    @property
    def count(self) -> int:
        """Elements: float32 that its values take."""
        return -(-self.bytes // 4)

    def of(self, flat: Any, first: int = 0) -> Any:
        """Return its values as a view of an array of elements, of NumPy or CuPy.

        first: the element that the array begins with.
        """
        part = flat[self.start - first : self.start - first + self.count]
        if self.dtype != F32:
            part = part.view(np.uint8)[: self.bytes].view(DTYPES[self.dtype])
        return part.reshape(self.shape)

    @property
    def rows(self) -> int:
        """Indices of its first dimension; a tensor without values has one."""
        return max(self.shape[0], 1) if self.shape else 1


@dataclass(frozen=True)
class Model:
    """The placed tensors.

    elements: of parameters and buffers, with padding. parameters: where the buffers begin, at a
    chunk boundary; without buffers it equals `elements`. frozen: follow from `elements` on.
    """

    tensors: tuple[Tensor, ...]
    elements: int
    parameters: int
    frozen: tuple[Tensor, ...] = ()

    @property
    def every(self) -> tuple[Tensor, ...]:
        """All tensors, the frozen ones last."""
        return self.tensors + self.frozen

    @property
    def words(self) -> int:
        """Elements of all tensors, with padding."""
        if not self.frozen:
            return self.elements
        return layout.rounded(_end(self.frozen[-1]), LINE)

    @property
    def values(self) -> int:
        return sum(tensor.values for tensor in self.every)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """The parameters, which come first: gradients are of them only."""
        return tuple(one for one in self.tensors if one.role is Role.PARAMETER)

    def group_ends(self, groups: int) -> list[int]:
        """Return the end of each group; the last one ends where the parameters do."""
        ends = [self.parameters] * groups
        for tensor in self.tensors:
            if tensor.role is Role.PARAMETER:
                for group in range(min(tensor.group, groups)):
                    ends[group] = min(ends[group], tensor.start)
        return ends

    def flatten(self, arrays: Mapping[str, npt.NDArray[Any]]) -> FloatArray:
        """All tensors' values in the layout of the weights, shape (words,)."""
        flat = np.zeros(self.words, np.float32)
        for tensor in self.every:
            tensor.of(flat)[...] = np.reshape(arrays[tensor.name], tensor.shape)
        return flat

    def views(self, flat: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """Return views by name. flat: shape (words,), or (elements,) without frozen ones."""
        return {one.name: one.of(flat) for one in self.every if _end(one) <= flat.size}

    def gradients(self, flat: FloatArray) -> dict[str, FloatArray]:
        """Each parameter by name as a view of a flat gradient, shape (elements,)."""
        views = self.views(flat)
        return {tensor.name: views[tensor.name] for tensor in self.trained}

    @property
    def aliases(self) -> dict[str, str]:
        """The name of each alias' tensor."""
        return {alias: tensor.name for tensor in self.every for alias in tensor.aliases}


def _end(tensor: Tensor) -> int:
    """One without values has a line of its own, too, so that a start belongs to one tensor."""
    return tensor.start + max(tensor.count, 1)


def is_name(name: str) -> bool:
    """Return whether a tensor may have this name."""
    raw = name.encode(errors="replace")
    return 1 <= len(raw) <= NAME_BYTES and b"\0" not in raw and raw.decode() == name


def place(tensors: Iterable[Tensor]) -> Model:
    """Give each tensor its start. Raises UsageError for a name or shape that is not allowed."""
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
                    f"tensor name {name[:80]!r}: use 1 to {NAME_BYTES} bytes of UTF-8 without NUL; "
                    "shorten the names of modules"
                )
            if name in names:
                raise UsageError(f"tensor {name!r} is given twice")
            names.add(name)
        if tensor.dtype not in (DTYPES if tensor.role is not Role.PARAMETER else (F32,)):
            raise UsageError(f"tensor {tensor.name!r} is {tensor.dtype}, not {F32}")
        if len(tensor.shape) > layout.MAX_DIMS:
            raise UsageError(f"tensor {tensor.name!r} has more than {layout.MAX_DIMS} dimensions")
        if not all(0 <= size < MAX_ELEMENTS for size in tensor.shape):
            raise UsageError(
                f"tensor {tensor.name!r} has shape {list(tensor.shape)}: a dimension has 0 to "
                f"{MAX_ELEMENTS - 1} values"
            )
    given.sort(key=_order)  # stable: each group keeps its order
    placed: list[Tensor] = []
    at = 0
    begins: dict[Role, int] = {}
    for tensor in given:
        moves = placed and tensor.role is not Role.FROZEN  # by frames, chunk by chunk
        if moves and _order(placed[-1]) != _order(tensor):
            at = layout.rounded(at, layout.CHUNK)
        begins.setdefault(tensor.role, at)
        placed.append(replace(tensor, start=at))
        at = layout.rounded(_end(placed[-1]), LINE)
    if at > MAX_ELEMENTS:
        raise UsageError(f"the model has {at} values; the limit is {MAX_ELEMENTS}")
    elements = begins.get(Role.FROZEN, at)
    frozen = tuple(one for one in placed if one.role is Role.FROZEN)
    tensors = tuple(placed[: len(placed) - len(frozen)])
    return Model(tensors, elements, begins.get(Role.BUFFER, elements), frozen)


def _order(tensor: Tensor) -> tuple[int, int]:
    """Return the sort key that keeps parameters of a group, buffers and frozen tensors together."""
    return tensor.role.value, tensor.group


def segment_bytes(model: Model) -> int:
    """Size of the weights segment."""
    return data_at(rows_of(model)) + model.words * 4


def rows_of(model: Model) -> int:
    """Count the rows of its table: tensors, aliases and frozen tensors."""
    return len(model.every) + len(model.aliases)


def data_at(rows: int) -> int:
    """Return the values' distance from the segment's begin (bytes): page-aligned, for devices."""
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
    head["trained"] = len(model.trained)
    head["frozen"] = len(model.frozen)
    head["words"] = model.words
    table = segment.array(layout.TENSOR, rows_of(model), layout.WEIGHTS.itemsize)
    rows = [(tensor.name, tensor) for tensor in model.tensors]
    rows += [(alias, tensor) for tensor in model.every for alias in tensor.aliases]
    rows += [(tensor.name, tensor) for tensor in model.frozen]
    for row, (name, tensor) in zip(table, rows, strict=True):
        row["name"] = name.encode()
        row["role"] = tensor.role
        row["dims"] = len(tensor.shape)
        row["shape"][: len(tensor.shape)] = tensor.shape
        row["start"] = tensor.start
        row["count"] = tensor.count
        row["group"] = tensor.group
        row["dtype"] = tensor.dtype.encode()


def read_table(segment: Segment) -> Model:
    """Any process: the model that a weights segment holds."""
    head = segment.view(layout.WEIGHTS)
    count, further = int(head["tensors"]), int(head["aliases"])
    rows = count + further + int(head["frozen"])
    table = segment.array(layout.TENSOR, rows, int(head["table_at"]))
    aliases: dict[int, list[str]] = {}
    for row in table[count : count + further]:
        aliases.setdefault(int(row["start"]), []).append(row["name"].decode())

    def tensors(rows: npt.NDArray[np.void]) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(
                row["name"].decode(),
                tuple(int(size) for size in row["shape"][: int(row["dims"])]),
                Role(int(row["role"])),
                int(row["start"]),
                tuple(aliases.get(int(row["start"]), ())),
                int(row["group"]),
                row["dtype"].decode(),
            )
            for row in rows
        )

    frozen = tensors(table[count + further :])
    return Model(tensors(table[:count]), int(head["elements"]), int(head["parameters"]), frozen)


def data(segment: Segment) -> FloatArray:
    """Return the values of the tensors, shape (elements,); writable if the segment is mapped so."""
    return everything(segment)[: int(segment.view(layout.WEIGHTS)["elements"])]


def everything(segment: Segment) -> FloatArray:
    """The same with the frozen tensors, shape (words,)."""
    head = segment.view(layout.WEIGHTS)
    return segment.array(np.float32, int(head["words"]), int(head["data_at"]))


def frozen(segment: Segment) -> FloatArray:
    """Only those, shape (words - elements,)."""
    return everything(segment)[int(segment.view(layout.WEIGHTS)["elements"]) :]


def check_same(job: Model, offered: Sequence[Tensor]) -> None:
    """Raise ModelMismatch naming the first tensor that differs.

    What no gradient moves may be missing on either side: a learner has its own.
    """
    ours = {tensor.name: tensor for tensor in job.every}
    for tensor in offered:
        known = ours.pop(tensor.name, None)
        if known is None and tensor.role is not Role.PARAMETER:
            continue
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
        if known.dtype != tensor.dtype and not {known.dtype, tensor.dtype} <= FLOATS:
            raise ModelMismatch(
                f"tensor {tensor.name!r} is {tensor.dtype}, the job's is {known.dtype}"
            )
    for known in ours.values():
        if known.role is Role.PARAMETER:
            raise ModelMismatch(f"the learner lacks the job's tensor {known.name!r}")
