"""The layout of shared memory stands in native/ps_layout.h; what is made of it says the same."""

from __future__ import annotations

import itertools
import re
from enum import IntEnum
from pathlib import Path

import pytest

from gadei_ps import _native
from gadei_ps.memory import layout

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
C_LAYOUT = _native.layout()
C_CODES = _native.codes()
# Codes that are single bits, or that Python only stores, have no IntEnum.
PLAIN = {"ps_flags", "ps_wants"}
ENUMS: dict[str, tuple[type[IntEnum], str]] = {
    "ps_kind": (layout.SegmentKind, "PS_"),
    "ps_frame_kind": (layout.FrameKind, "PS_"),
    "ps_wire_type": (layout.WireType, "PS_"),
    "ps_tensor_role": (layout.Role, "PS_"),
    "ps_phase": (layout.Phase, "PS_PHASE_"),
    "ps_server_state": (layout.ServerState, "PS_SERVER_"),
    "ps_stop": (layout.Stop, "PS_STOP_"),
    "ps_work": (layout.Work, "PS_"),
    "ps_mode": (layout.Mode, "PS_"),
    "ps_action": (layout.Action, "PS_"),
    "ps_gone": (layout.Gone, "PS_GONE_"),
    "ps_reason": (layout.Reason, "PS_"),
}
IRREGULAR = {"PS_GO": "GO", "PS_NO_WORK": "NONE", "PS_WORK_DONE": "DONE"}


def test_every_struct_has_a_dtype() -> None:
    assert set(C_LAYOUT) == set(layout.STRUCTS)


@pytest.mark.parametrize("name", sorted(C_LAYOUT))
def test_struct(name: str) -> None:
    """The dtype has the offsets and sizes that the compiler gave the struct."""
    size, fields = C_LAYOUT[name]
    dtype = layout.STRUCTS[name]
    assert dtype.itemsize == size
    assert dtype.fields is not None and dtype.isalignedstruct
    assert list(dtype.fields) == list(fields)
    for field, (offset, width, kind, _, _, _) in fields.items():
        found, at = dtype.fields[field][:2]
        assert (at, found.itemsize) == (offset, width), field
        base = found.base
        wanted = {"char": "S", "u": "u", "i": "i", "f": "f"}.get(kind.rstrip("0123456789"), "V")
        assert base.kind == wanted, field


def test_every_enum_is_named_in_python() -> None:
    assert set(ENUMS) | PLAIN == set(C_CODES)
    for tag, (enum, prefix) in ENUMS.items():
        members = {
            IRREGULAR.get(name, name.removeprefix(prefix)): code
            for name, (code, _) in C_CODES[tag].items()
        }
        assert members == {one.name: one.value for one in enum}, tag


def test_every_number_is_told_to_python() -> None:
    text = (NATIVE / "ps_codes.h").read_text()
    defined = set(re.findall(r"^#define (PS_[A-Z_]+) ", text, re.M)) - {"PS_CODES_H"}
    assert defined == set(_native.numbers())
    numbers = _native.numbers()
    assert numbers["PS_REQUEUE"] == numbers["PS_MAX_LEARNERS"] * numbers["PS_AHEAD"]
    assert numbers["PS_FINISHED_WORDS"] * 64 == numbers["PS_MAX_LEARNERS"]


def test_every_field_that_holds_a_code_names_its_enum() -> None:
    named = {
        tag
        for _, fields in C_LAYOUT.values()
        for *_, meaning in fields.values()
        for tag in re.findall(r"enum (ps_\w+)", meaning)
    }
    assert named == set(C_CODES)


@pytest.mark.parametrize("name", sorted(C_LAYOUT))
def test_every_field_has_a_writer(name: str) -> None:
    known = {"W", "S", "s", "0", "L", "server", "writer", "kernel"}
    for field, (*_, writer, _) in C_LAYOUT[name][1].items():
        assert writer and set(writer.split("/")) <= known, field


def test_the_drawings_are_those_of_the_structs() -> None:
    text = (NATIVE / "ps_layout.h").read_text()
    # Read with other eyes than those of docs/tables.py: offsets above bars, fields between them.
    drawn = re.findall(r"((?: \* .*\n)+) \*/\n#define (PS_\w+)_FIELDS", text)
    assert {tag.lower() for _, tag in drawn} == set(C_LAYOUT)
    for comment, tag in drawn:
        rows = [line.removeprefix(" * ") for line in comment.splitlines()]
        found: dict[str, int] = {}
        end = 0
        for numbers, cells in itertools.pairwise(rows):
            if not cells.startswith("|") or not re.fullmatch(r"[\d ]+", numbers):
                continue
            for bar in re.finditer(r"\|+ ?([^|]*)", cells):
                at = int(re.match(r"\d+", numbers[bar.start() :])[0])  # type: ignore[index]
                assert (at % 64 == 0) == bar[0].startswith("||"), (tag, at)
                if bar[1].strip():
                    found[bar[1].strip()] = at
                end = at
        size, fields = C_LAYOUT[tag.lower()]
        assert end == size
        assert found == {name + one[3]: one[0] for name, one in fields.items()}, tag


def test_the_pages_have_the_tables() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").glob("memory-layout*.md"))
    shown = set(re.findall(r"<!-- (ps_\w+): table -->", text))
    assert shown == set(C_LAYOUT) | set(C_CODES)
    assert f"Layout version {layout.LAYOUT_VERSION}." in text


def test_words_of_different_processes_share_no_cache_line() -> None:
    """Check concurrent writers; where a word is handed over, or a lock is taken, processes
    take turns."""
    process = {"W": "W", "writer": "W", "S": "server", "s": "server", "0": "server", "L": "L"}
    process |= {"server": "server", "kernel": "kernel"}
    for name in ("ps_shard", "ps_entry", "ps_control", "ps_ring"):
        lines: dict[int, set[str]] = {}
        for field, (at, width, *_, writer, _) in C_LAYOUT[name][1].items():
            if f"ps_{field}" in C_LAYOUT or width > 4096 or "/" in writer:
                continue
            for line in range(at // 64, (at + width - 1) // 64 + 1):
                lines.setdefault(line, set()).add(process[writer])
        shared = {line * 64: writers for line, writers in lines.items() if len(writers) > 1}
        # The manager's mode and request to see pushes change once a change of model; the accounts'
        # sizes are written before the ledger is shard 0's.
        allowed = {"ps_control": {128, 768}}.get(name, set())
        assert set(shared) == allowed, (name, shared)
