"""The file of a learned model of run times: safetensors, with its sizes in the metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from gadei_ps.machine import user_files

FORMAT: Final = "gadei-ps runtime model"
VERSION: Final = 1
_ENTRY: Final = "model"
_MOST_BYTES: Final = 1 << 26  # bounds the time of a server's pass that reads it

Floats = npt.NDArray[np.float32]


class ModelFileError(ValueError):
    """A file is not a model of run times that this release can use; the message is one line."""


@dataclass(frozen=True)
class Sizes:
    """Numbers that determine every tensor's shape: learners, lag, and widths of the networks."""

    learners: int
    lag: int
    latent: int
    recurrent: int
    hidden: int

    def __post_init__(self) -> None:
        """Raise ValueError if a size is out of range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, not within {low} and {high}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name. A weight (out, in) comes before its bias (out,)."""
        z, r, h, n = self.latent, self.recurrent, self.hidden, self.learners
        layers = {
            "gate.0": (h, z),
            "gate.1": (z, h),
            "proposal.0": (h, z),
            "proposal.1": (z, h),
            "linear": (z, z),
            "transition_std": (z, z),
            "emission": (h, z),
            "run_time": (n, h),
            "run_time_std": (n, h),
            "left.input": (r, n),
            "right.input": (r, n),
            "combiner": (r, z),
            "posterior": (z, r),
            "posterior_std": (z, r),
        }
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in layers.items():
            shapes[f"{name}.weight"] = shape
            shapes[f"{name}.bias"] = shape[:1]
        shapes["left.recurrent"] = shapes["right.recurrent"] = (r, r)
        shapes["start"] = (z,)
        return shapes


_RANGES: Final = {
    "learners": (2, 100_000),
    "lag": (2, 1_000),
    "latent": (1, 1_000),
    "recurrent": (1, 10_000),
    "hidden": (1, 10_000),
}


def contents(sizes: Sizes, weights: Mapping[str, Floats], more: Mapping[str, object]) -> bytes:
    """Serialize a model as a safetensors file. more: further entries of its metadata."""
    from safetensors.numpy import save

    # One entry, because the library writes several in a random order.
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(sizes), **more})
    data: bytes = save(dict(weights), {_ENTRY: text})
    return data


def read(path: str | Path) -> tuple[Sizes, dict[str, Floats]]:
    """Read a file that `contents` made. Raises ModelFileError."""
    try:
        data = user_files.read(path, _MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _refused(path, f"cannot be read ({reason})") from None
    try:
        return _parsed(data)
    except ValueError as error:
        raise _refused(path, str(error)) from None


def metadata(data: bytes) -> dict[str, object]:
    """The metadata of a model's file. Raises ValueError for another kind of file."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:end]) if end <= len(data) else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError("not a safetensors file")
    try:
        found: dict[str, object] = json.loads(header["__metadata__"][_ENTRY])
        if found["format"] == FORMAT:
            return found
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise ValueError("not a model of run times")


def _parsed(data: bytes) -> tuple[Sizes, dict[str, Floats]]:
    entry = metadata(data)
    if entry.get("version") != VERSION:
        raise ValueError(f"of version {entry.get('version')!r}, where this release reads {VERSION}")
    sizes = Sizes(**{name: _whole(entry, name) for name in _RANGES})
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        weights: dict[str, Floats] = load(data)
    except SafetensorError as error:
        raise ValueError(f"damaged ({error})") from None
    shapes = sizes.shapes()
    for name in sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(f"tensor {name!r} is {'missing' if name in shapes else 'unknown'}")
    for name, values in sorted(weights.items()):
        if values.dtype != np.float32 or values.shape != shapes[name]:
            raise ValueError(
                f"tensor {name!r} is {values.dtype} {values.shape}, not float32 {shapes[name]}"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"tensor {name!r} has values that are not finite")
    return sizes, weights


def _whole(entry: Mapping[str, object], name: str) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"its metadata has {name} {value!r}, not a whole number")
    return value


def _refused(path: str | Path, what: str) -> ModelFileError:
    shown = str(path)
    shown = shown if shown.isprintable() else repr(shown)
    remedy = "train one with gadei-ps runtime-model train"
    return ModelFileError(" ".join(f"{shown}: {what}; {remedy}".split()))
