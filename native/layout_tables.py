"""Draws the structs of ps_layout.h above their lists, and writes the tables of two pages.

Run it after a change of the layout, with the extension built from it:

    python -m pip install --no-deps --no-build-isolation -e . && python native/layout_tables.py

A test compares both files with what this would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from gadei_ps import _native

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "native" / "ps_layout.h"
PAGES = [ROOT / "docs" / name for name in ("memory-layout.md", "memory-layout-data.md")]

LINE = 64  # bytes of a cache line
WIDTH = 96  # characters of a drawing

STRUCTS = _native.layout()
CODES = _native.codes()


Cell = tuple[int, int, str]


def drawing(tag: str) -> list[str]:
    """Draw a ruler: offsets in bytes above the bars, fields between them; blank: not used.

    A double bar marks the beginning of a cache line.
    """
    size, fields = STRUCTS[tag]
    cells: list[Cell] = []
    end = 0
    for name, (at, width, _, dims, _, _) in fields.items():
        if at > end:
            cells.append((end, at, ""))
        cells.append((at, at + width, name + dims))
        end = at + width
    if size > end:
        cells.append((end, size, ""))
    lines: list[list[Cell]] = []  # cells of whole cache lines
    for cell in cells:
        if cell[0] % LINE == 0:
            lines.append([])
        lines[-1].append(cell)
    rows: list[list[Cell]] = [[]]
    for line in lines:
        if rows[-1] and _width(rows[-1] + line) > WIDTH:
            rows.append([])
        for cell in line:
            if rows[-1] and _width([*rows[-1], cell]) > WIDTH:
                rows.append([])
            rows[-1].append(cell)
    return [line for row in rows for line in _lines(row)]


def _bar(at: int) -> str:
    return "||" if at % LINE == 0 else "|"


def _cell(cell: Cell) -> tuple[str, str]:
    at, _, text = cell
    below = f"{_bar(at)} {text} " if text else f"{_bar(at)} "
    size = max(len(below), len(str(at)) + 1)
    return str(at).ljust(size), below.ljust(size)


def _lines(row: list[Cell]) -> tuple[str, str]:
    above, below = zip(*(_cell(cell) for cell in row), strict=True)
    end = row[-1][1]
    return "".join(above) + str(end), "".join(below) + _bar(end)


def _width(row: list[Cell]) -> int:
    return max(len(line) for line in _lines(row))


def header(text: str) -> str:
    """Renew the drawings of the header: the lines before the end of a comment."""

    def renewed(match: re.Match[str]) -> str:
        tag = match["tag"].lower()
        drawn = "".join(f" * {line}".rstrip() + "\n" for line in drawing(tag))
        return f"{match['comment']} *\n{drawn} */\n#define {match['tag']}_FIELDS("

    pattern = r"(?P<comment>^/\* (?:.+\n)(?: \* \S.*\n)*?) \*\n(?: \* .*\n)* \*/\n"
    return re.sub(pattern + r"#define (?P<tag>PS_\w+)_FIELDS\(", renewed, text, flags=re.M)


TYPES = {"char": "bytes"}


def struct_table(tag: str) -> list[str]:
    """Return the fields of a struct as a table in Markdown."""
    lines = ["| field | at | type | writer | holds |", "| --- | --- | --- | --- | --- |"]
    for name, (at, width, kind, dims, writer, meaning) in STRUCTS[tag][1].items():
        counts = [f"{int(one):,}" for one in re.findall(r"\d+", dims)]
        if f"ps_{kind}" in STRUCTS:
            kind = f"[{kind}]({_anchor(kind)})"
        typed = f"{width} bytes" if kind in ("char", "u8") and len(counts) == 1 else kind
        if counts and typed == kind:
            typed = f"{kind} × {' × '.join(counts)}"
        cells = (f"`{name}`", f"{at:,}", typed, writer.replace("/", ", "), _escaped(meaning))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _anchor(kind: str) -> str:
    named = {"entry": "#a-row-of-the-roster", "header": "memory-layout.md#header-of-every-segment"}
    return named.get(kind, f"#{kind}")


def code_table(tag: str) -> list[str]:
    """Return the codes of an enum as a table in Markdown."""
    lines = ["| code | name | meaning |", "| --- | --- | --- |"]
    for name, (value, meaning) in CODES[tag].items():
        lines.append(f"| {value} | `{name}` | {_escaped(meaning)} |")
    return lines


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def page(text: str) -> str:
    """Renew the tables of the page, between `<!-- ps_... -->` and `<!-- end -->`."""

    def renewed(match: re.Match[str]) -> str:
        tag = match[1]
        if tag in STRUCTS:
            size = f"{STRUCTS[tag][0]:,} bytes."
            body = [size, "", "```", *drawing(tag), "```", "", *struct_table(tag)]
        else:
            body = code_table(tag)
        return "\n".join([f"<!-- {tag} -->", "", *body, "", "<!-- end -->"])

    return re.sub(r"<!-- (ps_\w+) -->\n.*?<!-- end -->", renewed, text, flags=re.S)


def main() -> None:
    for path, renew in ((HEADER, header), *((path, page) for path in PAGES)):
        text = path.read_text()
        if renew(text) != text:
            path.write_text(renew(text))
            print(f"{path.relative_to(ROOT)} renewed")


if __name__ == "__main__":
    main()
