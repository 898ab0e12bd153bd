"""The NumPy dtypes are the C structs."""

from __future__ import annotations

import pytest

from gadei_ps import _native
from gadei_ps.memory import layout

C_LAYOUT = _native.layout()


def test_every_struct_is_compared() -> None:
    assert set(C_LAYOUT) == set(layout.STRUCTS)


@pytest.mark.parametrize("name", sorted(C_LAYOUT))
def test_struct(name: str) -> None:
    size, fields = C_LAYOUT[name]
    dtype = layout.STRUCTS[name]
    assert dtype.itemsize == size
    assert dtype.fields is not None
    named = {field for field in dtype.fields if not field.startswith("pad")}
    assert named == set(fields)
    for field, (offset, width) in fields.items():
        assert dtype.fields[field][1] == offset, field
        assert dtype.fields[field][0].itemsize == width, field


def test_words_of_different_writers_share_no_cache_line() -> None:
    ring = layout.offset
    lines = [
        {ring(layout.RING, "head") // 64},
        {ring(layout.RING, "waits_slot") // 64, ring(layout.RING, "work_tail") // 64},
        {ring(layout.RING, "released") // 64},
        {ring(layout.RING, "work_head") // 64},
        {ring(layout.RING, "tail") // 64},
    ]
    seen: set[int] = set()
    for line in lines:
        assert not line & seen
        seen |= line
    assert layout.offset(layout.ENTRY, "served") % 64 == 0
    assert layout.offset(layout.ENTRY, "applied") % 64 == 0
    for field in ("phase", "lease_generation", "version", "shard_bell", "superstep", "work"):
        assert layout.offset(layout.CONTROL, field) % 64 == 0
