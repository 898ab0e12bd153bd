"""Reads files of records in the forms that people have: CSV, JSON lines, Parquet, also compressed.

    bytes --decompress--> bytes --encoding--> text --separator--> rows of strings

`opened` finds out which form a file has and says so in `Records.form`. It holds the text of the
file in memory, decompressed, and reads rows one by one. Every mistake in a file raises
`DatasetError` with one line: where (`file:line`), what, what to do.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gadei_ps.errors import UsageError
from gadei_ps.machine import user_files

MOST_BYTES = 1 << 31
"""The most bytes of a file, decompressed: some ten million sentences."""
SAMPLE = 1 << 16
"""Characters from which the separator is found."""
SAMPLE_ROWS = 100

SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "vertical bars", ",": "commas"}
"""Separators of columns. If two fit, the first is taken: it is the rarer one in sentences."""


class DatasetError(UsageError):
    """A file of sentences cannot be used. The message is one line and names the remedy."""


class Row(NamedTuple):
    """A row and the line on which it begins, from 1; the number of the row in a Parquet file."""

    line: int
    fields: list[str]


class Records(NamedTuple):
    """Content of a file.

    names: of the columns; None for CSV, whose first row may be a header. A list to which reading
    JSON adds names. rows: are read as they are taken, once. form: how the file is read if it is not
    as usual, such as `UTF-16`.
    """

    names: list[str] | None
    rows: Iterator[Row]
    form: tuple[str, ...]


def opened(path: str | PathLike[str]) -> Records:
    """Find out which form a file has. Raises DatasetError for one that cannot be read.

    The rows raise it too, for one that cannot be parsed.
    """
    data, form = _decompressed(path, _data(path))
    if data[:4] == b"PAR1":
        return _parquet(path, data, (*form, "Parquet"))
    for magic, what, remedy in _FOREIGN:
        if data.startswith(magic):
            raise error(path, None, what, remedy)
    body, encoding = _encoding(data)
    if encoding != "utf-8":
        form = (*form, encoding.upper().removesuffix("-LE").removesuffix("-BE"))
    text = _decoded(path, body, encoding, len(data) - len(body))
    if objects := _json(path, text):
        names: list[str] = []
        return Records(names, _named(path, objects, names), (*form, "JSON"))
    separator, skipped = _separator(text)
    if separator != ",":
        form = (*form, f"columns separated by {SEPARATORS.get(separator, repr(separator))}")
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL
    if separator == "\t" and _quotes_are_text(text):
        form = (*form, "quotes are part of the text")
        quoting = csv.QUOTE_NONE
    return Records(None, _csv(path, text, separator, quoting, skipped), form)


def error(path: str | PathLike[str], line: int | None, what: str, remedy: str) -> DatasetError:
    """The error with its place."""
    return DatasetError(f"{place(path, line)}: {what}; {remedy}")


def place(path: str | PathLike[str], line: int | None = None) -> str:
    """`file` or `file:line`, on one line."""
    name = fspath(path)
    if not name.isprintable():  # the path may contain a line break
        name = repr(name)
    return name if line is None else f"{name}:{line}"


def list_names(names: Sequence[str], most: int = 8) -> str:
    """Quote at most `most` names for a message, each with at most 40 characters."""
    some = [repr(name if len(name) <= 40 else name[:37] + "...") for name in names[:most]]
    return ", ".join(some + (["..."] if len(names) > most else []))


# Bytes


_COMPRESSED = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\0", "xz", lzma.open),
)
_FOREIGN = (
    (b"PK\x03\x04", "it is an Excel workbook or a zip archive", "save it as CSV in UTF-8"),
    (b"\xd0\xcf\x11\xe0", "it is a file of an old Excel", "save it as CSV in UTF-8"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd", "decompress it first"),
)


def _data(path: str | PathLike[str]) -> bytes:
    try:
        if Path(path).is_file() and Path(path).stat().st_size > MOST_BYTES:
            raise error(path, None, *_TOO_LARGE)
        return user_files.read_all(path)
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else failure
        what = f"cannot be read ({reason})"
        raise error(path, None, what, "give the path of a CSV file") from None


_TOO_LARGE = (f"it has more than {MOST_BYTES >> 30} GiB", "give a part of it")


def _decompressed(path: str | PathLike[str], data: bytes) -> tuple[bytes, tuple[str, ...]]:
    for magic, name, uncompressed in _COMPRESSED:
        if data.startswith(magic):
            try:
                with uncompressed(io.BytesIO(data)) as file:
                    found = file.read(MOST_BYTES + 1)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as failure:
                what = f"cannot be decompressed ({failure})"
                raise error(path, None, what, "compress it again") from None
            if len(found) > MOST_BYTES:
                raise error(path, None, *_TOO_LARGE)
            return found, (name,)
    return data, ()


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def _encoding(data: bytes) -> tuple[bytes, str]:
    """The bytes without their byte-order mark, and how they are encoded."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return data[len(mark) :], encoding
    # Without a mark: of a text with Latin letters, every other byte is 0 in UTF-16.
    even, odd = data[:1000:2], data[1:1000:2]
    if odd.count(0) * 2 > len(odd) and not even.count(0):
        return data, "utf-16-le"
    if even.count(0) * 2 > len(even) and not odd.count(0):
        return data, "utf-16-be"
    return data, "utf-8"


def _decoded(path: str | PathLike[str], body: bytes, encoding: str, skipped: int) -> str:
    """skipped: bytes of the file before the body."""
    remedy = "save the file as UTF-8 text (in Excel: CSV UTF-8)"
    try:
        text = body.decode(encoding)
    except UnicodeDecodeError as failure:
        before = body[: failure.start].decode(encoding, "replace")
        what = f"not valid {encoding.upper()}"
        if encoding == "utf-8":
            what = f"byte 0x{body[failure.start]:02x} is not UTF-8"
        at = failure.start + skipped
        raise error(path, _line_of(before), f"{what} at offset {at}", remedy) from None
    if (bad := text.find("\0")) >= 0:
        at = len(text[:bad].encode(encoding)) + skipped
        raise error(path, _line_of(text[:bad]), f"NUL byte at offset {at}", remedy)
    return text


def _line_of(before: str) -> int:
    return 1 + before.count("\n") + before.replace("\r\n", "\n").count("\r")


# CSV


def _separator(text: str) -> tuple[str, int]:
    """Find the separator of the columns, and the number of lines before the first row.

    Not csv.Sniffer: it takes letters for separators, and is misled by commas within sentences and
    by files of one column. Here each separator is tried on the first rows with the strict parser.
    It fits if all of them have the same number of columns, at least two. If several fit, the one
    is taken that leaves a column whose values repeat, as labels do.
    """
    if found := re.match(r"sep=([^\r\n\"])\r?\n", text):  # as Excel writes it
        return found[1], 1
    sample, cut = text[:SAMPLE], len(text) > SAMPLE
    best, best_score = ",", (0, 0)
    for separator in SEPARATORS:
        rows = _tried(sample, cut, separator)
        widths = {len(row) for row in rows}
        if len(widths) == 1 and min(widths) > 1:
            columns = zip(*rows[1:], strict=True)
            labels = any(len(set(column)) * 2 <= len(column) for column in columns)
            score = (2, int(labels))
        elif separator == "," or not rows or len(rows[0]) < 2:
            continue
        else:  # a row that is wrong must not hide what separates the others
            alike = sum(len(row) == len(rows[0]) for row in rows)
            score = (int(alike * 2 > len(rows)), 0)
        if score > best_score:
            best, best_score = separator, score
    if best_score[0] < 2 and _quotes_are_text(text):
        best = "\t"
    return best, 0


def _quotes_are_text(text: str) -> bool:
    """Return whether this is a TSV file without quoting: a line is a row, quotes are characters.

    The lines must have tabs, most of them the same number, and quoting must not fit: the strict
    parser fails, or joins lines although each has its tabs.
    """
    if '"' not in text:
        return False
    tabs = Counter(line.count("\t") for line in io.StringIO(text, newline=None) if line.strip())
    (usual, count), lines = max(tabs.items(), key=lambda one: one[1]), tabs.total()
    if not usual or count * 2 <= lines:
        return False
    csv.field_size_limit(MOST_BYTES)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True)
        return count == lines and sum(map(_has_content, reader)) != lines
    except csv.Error:
        return True


def _tried(sample: str, cut: bool, separator: str) -> list[list[str]]:
    """The first rows that have content, with this separator; none if it does not fit."""
    rows: list[list[str]] = []
    try:
        reader = csv.reader(io.StringIO(sample, newline=""), delimiter=separator, strict=True)
        rows += islice((row for row in reader if _has_content(row)), SAMPLE_ROWS)
    except csv.Error as failure:
        if separator != "," and not (cut and "unexpected end" in str(failure)):
            return []
    return rows if len(rows) == SAMPLE_ROWS or not cut else rows[:-1]


_LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")


def _has_content(row: list[str]) -> bool:
    return len(row) > 1 or any(field.strip() for field in row)


def _csv(
    path: str | PathLike[str], text: str, separator: str, quoting: Literal[0, 3], skipped: int
) -> Iterator[Row]:
    """Each non-blank row with the number of the line on which it begins, from 1."""
    # Not io.StringIO, which needs four bytes for each character.
    lines = islice((found[0] for found in _LINE.finditer(text)), skipped, None)
    csv.field_size_limit(MOST_BYTES)
    # Strict, because the lenient parser silently drops the rows after a single quote.
    reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    while True:
        line = reader.line_num + 1 + skipped
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as failure:
            raise error(
                path,
                line,
                f"the row that starts here cannot be parsed ({failure})",
                "look for a quote that is not closed or not doubled",
            ) from None
        if _has_content(fields):
            yield Row(line, fields)


# JSON and Parquet

MOST_KEYS = 1000
"""Most keys of all objects of a file: each is a column of every row."""
_ONE_A_LINE = 'write one object a line, as {"text": ..., "label": ...}'


def _json(path: str | PathLike[str], text: str) -> Iterator[tuple[int, Any]] | None:
    """Parse the values of a file of JSON, each with its line; None if it is not JSON."""
    suffixes = [one.lower() for one in Path(path).suffixes[-2:]]
    named = any(one in (".json", ".jsonl", ".ndjson") for one in suffixes)
    begin = text.lstrip()[:1]
    if named and begin == "[":
        return enumerate(_loaded(path, 1, text), start=1)
    first = text.lstrip().partition("\n")[0]
    if named or (begin == "{" and first.rstrip().endswith("}") and _is_object(first)):
        return _lines_of_json(path, text)
    return None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _lines_of_json(path: str | PathLike[str], text: str) -> Iterator[tuple[int, Any]]:
    line, begin = 0, 0
    while begin < len(text):
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        line, one, begin = line + 1, text[begin:end], end + 1
        if one.strip():
            yield line, _loaded(path, line, one)


def _loaded(path: str | PathLike[str], line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as failure:
        what = f"not JSON ({failure})"
        raise error(path, line, what, _ONE_A_LINE) from None


def _named(
    path: str | PathLike[str], values: Iterator[tuple[int, Any]], names: list[str]
) -> Iterator[Row]:
    """Yield the rows of objects, and add their keys to `names`."""
    at: dict[str, int] = {}
    for line, value in values:
        if not isinstance(value, dict):
            raise error(path, line, "not a JSON object", _ONE_A_LINE)
        for key in value:
            if key not in at:
                if len(at) == MOST_KEYS:
                    what = f"its objects have more than {MOST_KEYS:,} different keys"
                    raise error(path, line, what, _ONE_A_LINE)
                at[key] = len(names)
                names.append(plain(key))
        fields = [""] * len(names)
        for key, one in value.items():
            fields[at[key]] = plain(one)
        yield Row(line, fields)


def plain(value: Any) -> str:
    """A value as text that can be written as UTF-8. None becomes empty."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="replace").decode()


def _parquet(path: str | PathLike[str], data: bytes, form: tuple[str, ...]) -> Records:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        what = "reading Parquet needs pyarrow"
        raise error(path, None, what, "pip install 'gadei-ps[parquet]'") from None
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(data))
    except (pyarrow.ArrowException, OSError, ValueError) as failure:
        what = f"cannot be read as Parquet ({_first_line(failure)})"
        raise error(path, None, what, "write it again") from None

    def rows() -> Iterator[Row]:
        number = 0
        try:
            for batch in file.iter_batches(batch_size=SAMPLE_ROWS * 10):
                for values in zip(*(one.to_pylist() for one in batch.columns), strict=True):
                    number += 1
                    yield Row(number, [plain(value) for value in values])
        except (pyarrow.ArrowException, OSError, ValueError) as failure:
            what = f"cannot be read as Parquet ({_first_line(failure)})"
            raise error(path, number + 1, what, "write it again") from None

    return Records([str(name) for name in file.schema_arrow.names], rows(), form)


def _first_line(failure: BaseException) -> str:
    return str(failure).strip().partition("\n")[0]
