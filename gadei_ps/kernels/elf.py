"""The symbols of an object file, as LLVM writes it: ELF of 64 bits, little-endian."""

from __future__ import annotations

import struct
from typing import NamedTuple

SECTIONS_AT = 0x28  # in the file's header: 8 bytes, where the table of sections begins
SECTION = struct.Struct("<IIQQQQIIQQ")
SECTION_COUNT_AT = 0x3C
SYMBOL = struct.Struct("<IBBHQQ")
SYMBOL_TABLE = 2  # type of a section
LOCAL = 0  # binding of a symbol


class Symbols(NamedTuple):
    """defined: those that others may see. undefined: those that others must have."""

    defined: frozenset[str]
    undefined: frozenset[str]


def symbols(file: bytes) -> Symbols:
    """Return the symbols of an object file."""
    (at,) = struct.unpack_from("<Q", file, SECTIONS_AT)
    (count,) = struct.unpack_from("<H", file, SECTION_COUNT_AT)
    sections = [SECTION.unpack_from(file, at + i * SECTION.size) for i in range(count)]
    defined, undefined = set(), set()
    for _, kind, _, _, begin, size, link, *_ in sections:
        if kind != SYMBOL_TABLE:
            continue
        names = sections[link][4]  # where they begin
        for one in range(begin, begin + size, SYMBOL.size):
            name, info, _, section, _, _ = SYMBOL.unpack_from(file, one)
            text = file[names + name : file.index(b"\0", names + name)].decode()
            if not section and text:
                undefined.add(text)
            elif section and info >> 4 != LOCAL:
                defined.add(text)
    return Symbols(frozenset(defined), frozenset(undefined))
