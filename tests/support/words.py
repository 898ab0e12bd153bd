"""Words of shared memory with a meaning, and their values at each line of code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import numpy as np


def words(record: np.void | np.ndarray) -> dict[str, Any]:
    """All words of a struct that are not zero, by their paths, as in "header.kind".

    Of a field with many: the value that all of them have, or by index those that are not zero.
    """
    found: dict[str, Any] = {}
    assert record.dtype.names is not None
    for name in record.dtype.names:
        part = record[name]
        if part.dtype.names:
            found |= {f"{name}.{rest}": value for rest, value in words(part).items()}
            continue
        flat = np.asarray(part).reshape(-1)
        said = np.flatnonzero(flat != np.zeros((), flat.dtype))
        if len(said) == len(flat) and (flat == flat[0]).all():
            found[name] = flat[0].item()
        elif len(said):
            found[name] = {int(at): flat[at].item() for at in said}
    return found


@contextlib.contextmanager
def at_each_line(look: Callable[[], object], *modules: ModuleType) -> Iterator[None]:
    """Call `look` before each line of these modules that this thread executes, and at its end.

    So it sees the memory as a death at any line would leave it.
    """
    files = {one.__file__ for one in modules}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        look()
