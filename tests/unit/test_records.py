"""The forms of files that `train` and `predict` read, and how their columns are found."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.classifier import records
from gadei_ps.classifier.dataset import DatasetError, read_table, read_training

PAIRS = (("ok", "x"), ("no", "y"))
ROWS = [(f"it is, {word} {i}", label) for i in range(5) for word, label in PAIRS]
TEXTS = tuple(text for text, _ in ROWS)
SEPARATORS = [",", ";", "\t", "|"]
words = st.text(st.sampled_from("ab ,.\"'\n"), min_size=1, max_size=20).filter(str.strip)


def text_of(
    rows: list[tuple[str, ...]], separator: str = ",", header: tuple[str, ...] = ("text", "label")
) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter=separator)
    writer.writerows([header, *rows] if header else rows)
    return buffer.getvalue()


def written(directory: Path, data: str | bytes, name: str = "data.csv") -> Path:
    path = directory / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def check(path: Path, notice: str, **columns: str) -> None:
    """The file has ROWS, and the notice says how it was read."""
    data = read_training(path, **columns)
    assert data.texts == TEXTS
    assert [data.label_names[number] for number in data.labels] == [label for _, label in ROWS]
    assert data.notices == ((f"{path}: {notice}",) if notice else ())


@pytest.mark.parametrize(
    ("made", "notice"),
    [
        (text_of(ROWS).encode("utf-8-sig"), ""),
        (text_of(ROWS, ";"), "columns separated by semicolons"),
        (text_of(ROWS, "|"), "columns separated by vertical bars"),
        ("sep=;\r\n" + text_of(ROWS, ";"), "columns separated by semicolons"),
        ("sep=,\n" + text_of(ROWS), ""),
        (text_of(ROWS, "\t").encode("utf-16"), "UTF-16, columns separated by tabs"),
        (text_of(ROWS, "\t").encode("utf-16-be"), "UTF-16, columns separated by tabs"),
        (gzip.compress(text_of(ROWS).encode()), "gzip"),
        (bz2.compress(text_of(ROWS, ";").encode()), "bzip2, columns separated by semicolons"),
        (lzma.compress(text_of(ROWS).encode()), "xz"),
        ("\n".join(json.dumps({"label": y, "text": x}) for x, y in ROWS), "JSON"),
    ],
    # What gzip writes has the time in it, and each worker collects for itself.
    ids=[
        "mark",
        "semicolons",
        "bars",
        "sep=;",
        "sep=,",
        "utf-16",
        "utf-16-be",
        "gzip",
        "bzip2",
        "xz",
        "json",
    ],
)
def test_every_form_reads_alike(tmp_path: Path, made: str | bytes, notice: str) -> None:
    check(written(tmp_path, made), notice)


@pytest.mark.parametrize("separator", ['"', "\r"])
def test_what_separates_nothing(tmp_path: Path, separator: str) -> None:
    """A separator that Python's newer parsers refuse with an error of their own."""
    path = written(tmp_path, f"sep={separator}\n" + text_of(ROWS))
    assert records.opened(path).form == ()
    with pytest.raises(DatasetError, match="only one column"):
        read_training(path)


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        (['ok\t"a one', "no\tb", 'ok\t"c', "no\td"], ['"a one', "b", '"c', "d"]),
        (['ok\t"a', 'no\tb"', 'ok\t"c', 'no\td"'], ['"a', 'b"', '"c', 'd"']),
        (["ok\ta", "no\tb"] * 9000 + ['ok\t"c', "no\td"], ["a", "b"] * 9000 + ['"c', "d"]),
        (['ok\t"a, ""b"" c"', "no\td"], ['a, "b" c', "d"]),
        (['"ok"\t"a\nb"', '"no"\t"c"'], ["a\nb", "c"]),
    ],
    ids=["open", "joined", "late", "quoted", "quoted lines"],
)
def test_tabs_with_and_without_quoting(tmp_path: Path, lines: list[str], texts: list[str]) -> None:
    """An opening quote in a file that does not quote must not hide the columns or join lines."""
    data = read_training(written(tmp_path, "\n".join(["label\ttext", *lines * 5]), "data.tsv"))
    assert data.texts == tuple(texts * 5)
    assert data.label_names == ("no", "ok")
    assert ("quotes are part of the text" in data.notices[0]) == any(t[0] == '"' for t in texts)


def test_an_array_of_json_objects(tmp_path: Path) -> None:
    """Read values as texts; a key that is missing is empty."""
    objects = [{"n": 1, "text": x, "label": y == "x", "all": None} for x, y in ROWS]
    path = written(tmp_path, json.dumps([*objects, {"text": "?"}]), "data.json")
    data = read_training(path)
    assert data.label_names == ("false", "true")
    assert data.warnings == (f"{path}:11: 1 row without a text or a label, from here on: left out",)
    table = read_table(path)
    assert table.header == ("n", "text", "label", "all")
    assert table.rows[0] == ["1", "it is, ok 0", "true", ""]
    assert table.rows[-1] == ["", "?", "", ""]


def test_objects_of_too_many_keys(tmp_path: Path) -> None:
    """Each would be a column of every row: memory by the square of the rows."""
    lines = [json.dumps({"text": "a", "label": "x", f"key {n}": n}) for n in range(1200)]
    path = written(tmp_path, "\n".join(lines), "data.jsonl")
    with pytest.raises(DatasetError, match=r"data.jsonl:999: .*more than 1,000 different keys"):
        read_table(path)


def parquet(path: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    columns = {"text": list(TEXTS), "label": [label for _, label in ROWS], "n": list(range(10))}
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "data.parquet")
    check(path, "Parquet")
    assert read_table(path).rows[3] == ["it is, no 1", "y", "3"]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"needs pyarrow; pip install 'gadei-ps\[parquet\]'$"):
        read_training(path)


@given(st.lists(words, min_size=10, max_size=30), st.sampled_from(SEPARATORS), st.booleans())
def test_the_separator_is_found(texts: list[str], separator: str, header: bool) -> None:
    """Whatever commas, quotes and line breaks the sentences have; also without a header."""
    rows = [(text, "pn"[i % 2], str(i)) for i, text in enumerate(texts)]
    names = ("text", "label", "number") if header else ()
    numbers = {} if header else {"text_column": "1", "label_column": "2"}
    with tempfile.TemporaryDirectory() as directory:
        path = written(Path(directory), text_of(rows, separator, names))
        data = read_training(path, **numbers)
    assert data.texts == tuple(text.strip() for text in texts)
    assert data.label_names == ("n", "p")


@pytest.mark.parametrize(
    ("header", "columns", "notice"),
    [
        (
            ("Text", "Label"),
            {},
            "column 'Text' holds the sentences, column 'Label' holds the labels",
        ),
        (("review", "Sentiment"), {}, "column 'review' holds the sentences, column 'Sentiment' "),
        (("sentence", "what"), {}, "column 'sentence' holds the sentences, column 'what' holds"),
        (("speech", "label"), {}, "column 'speech' holds the sentences"),
        (("speech", "what"), {"text_column": "speech", "label_column": "what"}, ""),
        (("speech", "what"), {"text_column": "1", "label_column": "2"}, "column 'speech' holds"),
        (
            (),
            {},
            "line 1 is not a header ('x' stands in later rows too): column 1 holds the sentences",
        ),
        (
            (),
            {"label_column": "2"},
            "line 1 is not a header ('x' stands in later rows too): column 1",
        ),
    ],
)
def test_columns_are_found(
    tmp_path: Path, header: tuple[str, ...], columns: dict[str, str], notice: str
) -> None:
    path = written(tmp_path, text_of(ROWS, header=header))
    data = read_training(path, **columns)
    assert data.texts == TEXTS
    assert data.label_names == ("x", "y")
    notices = "".join(data.notices).removeprefix(f"{path}: ")
    assert notices.startswith(notice) and bool(notices) == bool(notice)


def test_rows_that_hold_nothing_are_left_out(tmp_path: Path) -> None:
    """Read files that were put together with their headers; rows without text or label."""
    text = text_of(ROWS[:5]) + "tail\n,x\n" + text_of(ROWS[5:])
    path = written(tmp_path, text)
    data = read_training(path)
    assert data.texts == TEXTS
    assert data.warnings == (
        f"{path}: 1 row with the header's names again: left out",
        f"{path}:7: 2 rows without a text or a label, from here on: left out",
    )
    table = read_table(path)  # as predict does, whose answers are then fewer than the lines
    assert table.notices == data.warnings[:1]
    assert len(table.rows) == len(ROWS) + 2


def test_a_very_long_text(tmp_path: Path) -> None:
    long = "word " * 100_000
    data = read_training(written(tmp_path, text_of([*ROWS, (long, "x")])))
    assert data.texts[-1] == long.strip()


@pytest.mark.parametrize(
    ("made", "header", "texts"),
    [
        ("text\nhello; you\nme | too\n", ("text",), ["hello; you", "me | too"]),
        ("hello\nyou there\n", (), ["hello", "you there"]),
        ("a one, yes\tp\nb\tp\n", (), ["a one, yes", "b"]),
        ("id;review\n1;fine\n", ("id", "review"), ["fine"]),
    ],
)
def test_tables_to_label(
    tmp_path: Path, made: str, header: tuple[str, ...], texts: list[str]
) -> None:
    table = read_table(written(tmp_path, made))
    assert (table.header, table.texts) == (header, texts)


@pytest.mark.parametrize("read", [read_table, read_training])
def test_damaged_files_are_refused(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """Each in one line, wherever it is cut off."""
    whole = gzip.compress(text_of(ROWS).encode())
    columnar = parquet(tmp_path / "data.parquet").read_bytes()
    for data in (whole[:30], whole[:-1], columnar[:200], columnar[:60] + columnar[-8:]):
        with pytest.raises(DatasetError) as caught:
            read(written(tmp_path, data))
        assert "\n" not in str(caught.value)


@given(st.text(st.sampled_from("ab\r\n\u2028\x0b\x1c\x85"), max_size=30))
def test_lines_are_those_of_a_file(text: str) -> None:
    """Only line feeds and carriage returns end them."""
    lines = [found[0] for found in records._LINE.finditer(text)]
    assert lines == list(io.StringIO(text, newline=""))
