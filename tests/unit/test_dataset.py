"""Reading, holding out, tokenising and numbering labelled sentences."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gadei_ps.classifier import words
from gadei_ps.classifier.corpus import Corpus
from gadei_ps.classifier.dataset import (
    UNSEEN_LABEL,
    Dataset,
    DatasetError,
    TrainDefaults,
    defaults,
    read_test,
    read_training,
)
from gadei_ps.classifier.hold_out import Groups, check, equal_texts, findings, split
from gadei_ps.classifier.training_settings import Settings

GOOD = "text,label\n" + "a b,x\nc d,y\n" * 5
utf8_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
filled = utf8_text.map(str.strip).filter(bool)


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "data.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(path: Path, **columns: str) -> str:
    with pytest.raises(DatasetError) as caught:
        read_training(path, **columns)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path)), "the message names the place"
    assert "; " in message, "the message names a remedy"
    return message.removeprefix(str(path))


# Reading


def test_labels_are_numbered_by_sorted_name(tmp_path: Path) -> None:
    data = read_training(written(tmp_path, GOOD))
    assert data.texts == ("a b", "c d") * 5
    assert data.label_names == ("x", "y")
    assert data.labels.tolist() == [0, 1] * 5
    assert data.labels.dtype == np.int64
    assert data.warnings == ()


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        GOOD.replace("\n", "\r"),
        GOOD.replace("a b", '"a b"').replace(",y", ',"y"'),
        GOOD.replace("\n", "\n\n").replace("a b", "  a b "),
        "\n  \n" + GOOD,
    ],
    ids=["bom", "crlf", "cr", "quoted", "blank lines and spaces", "blank lines first"],
)
def test_every_common_form_reads_alike(tmp_path: Path, content: str) -> None:
    data = read_training(written(tmp_path, content))
    assert data.texts == ("a b", "c d") * 5
    assert data.labels.tolist() == [0, 1] * 5


def test_columns_are_found_by_name_and_others_are_ignored(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'pn'[i % 2]},s {i},\n" for i in range(10))
    path = written(tmp_path, "id, mood ,words,text\n" + rows)
    data = read_training(path, text_column="words", label_column="mood")
    assert data.texts[3] == "s 3"
    assert data.label_names == ("n", "p")


@given(st.lists(st.tuples(filled, filled), min_size=1, max_size=12))
def test_what_csv_writes_is_read_back(rows: list[tuple[str, str]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["text", "label"])
    writer.writerows(rows)
    names = sorted({label for _, label in rows})
    with tempfile.TemporaryDirectory() as directory:
        data = read_test(written(Path(directory), buffer.getvalue()), names)
    assert data.texts == tuple(text for text, _ in rows)
    assert [names[i] for i in data.labels] == [label for _, label in rows]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", ": the file is empty"),
        ("\ufeff\n \n", ": the file is empty"),
        ("text,label\n", ": there is a header but no row"),
        (
            "words,mood,more\na,b,c\n",
            ":1: no column named 'text'; the columns are 'words', 'mood', 'more'",
        ),
        ("\nwords;mood;x\na;b;c\n", ":2: no column named 'text'; the columns are 'words', 'mood'"),
        ("text\na\n", ":1: there is only one column"),
        ("title,body,label\na,b,c\n", ":1: columns 'title', 'body' may all be the texts"),
        (
            "a b,7,x\nc d,8,x\n",
            ":1: line 1 is not a header ('x' stands in later rows too), and there",
        ),
        ("text,label,text\na,b,c\n", ":1: 2 columns named 'text'"),
        ("text,label\ntail,\n,x\n", ": no row has both a text and a label"),
        (GOOD + "oh, dear,x\n", ":12: 3 fields where the header has 2"),
        (GOOD + 'fine,x\n"never closed,x\nb,x\n', ":13: the row that starts here cannot be parsed"),
        (GOOD + '"a"b,x\n', ":12: the row that starts here cannot be parsed"),
        ("text,label\n" + "a,x\n" * 10, ": every row has the label 'x'"),
        ("text,label\n" + "a,x\nb,y\n" * 4 + "a,x\n", ": the file has only 9 rows, but a"),
        (GOOD.encode() + b"ab\xe9,x\n", f":12: byte 0xe9 is not UTF-8 at offset {len(GOOD) + 2}"),
        (b"\xef\xbb\xbftext,label\n\xff", ":2: byte 0xff is not UTF-8 at offset 14"),
        (GOOD + "a\0b,x\n", f":12: NUL byte at offset {len(GOOD) + 1}"),
        (GOOD.encode("utf-16") + b"x", ":12: not valid UTF-16-LE at offset 144"),
        (b"PK\x03\x04...", ": it is an Excel workbook or a zip archive; save it as CSV"),
        (b"\x1f\x8b\x08...", ": cannot be decompressed ("),
        (b"PAR1...", ": cannot be read as Parquet ("),
        ('{"text": "a"}\n[1]\n', ":2: not a JSON object; write one"),
        ('{"text": "a"}\nnone\n', ":2: not JSON ("),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert error_of(written(tmp_path, content)).startswith(expected)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert error_of(tmp_path / "none.csv").startswith(": cannot be read (No such file")
    assert error_of(tmp_path).startswith(": cannot be read (Is a directory")
    with pytest.raises(DatasetError, match=r"cannot be read \(embedded null byte\)") as caught:
        read_training("a\0b")
    assert "\0" not in str(caught.value)


def test_long_or_odd_names_keep_the_message_short_and_on_one_line(tmp_path: Path) -> None:
    columns = ['"a\nb"'] + [f"{'c' * 90}{i}" for i in range(40)]
    message = error_of(written(tmp_path, ",".join(columns) + "\n"))
    assert len(message) < 600
    odd = tmp_path / "two\nlines.csv"
    with pytest.raises(DatasetError) as caught:
        read_training(odd)
    assert "\n" not in str(caught.value)


def test_label_numbers_do_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [f"t,{name}\n" for name in "gbfaechd" * 2]
    data = read_training(written(tmp_path, "text,label\n" + "".join(rows)))
    assert data.label_names == tuple("abcdefgh")


def test_test_rows_with_unknown_labels_are_kept_and_told(tmp_path: Path) -> None:
    path = written(tmp_path, "text,label\na,x\nb,new\nc,y\nd,newer\ne,new\n")
    data = read_test(path, ["y", "x"])
    assert data.labels.tolist() == [1, UNSEEN_LABEL, 0, UNSEEN_LABEL, UNSEEN_LABEL]
    assert data.label_names == ("y", "x")
    (warning,) = data.warnings
    assert warning.startswith(f"{path}:3: labels that the training data lack (")
    assert "'new', 'newer'" in warning
    assert "predictions are wrong" in warning


def test_one_test_row_is_enough(tmp_path: Path) -> None:
    assert len(read_test(written(tmp_path, "text,label\na,x\n"), ["x", "y"])) == 1


def test_a_dataset_needs_a_label_for_each_text() -> None:
    with pytest.raises(ValueError, match="2 texts"):
        Dataset(("a", "b"), np.zeros(3, np.int64), ("x",))


# Defaults


@pytest.mark.parametrize(
    ("rows", "batch_size"),
    [(10, 2), (9_999, 2), (10_000, 4), (100_000, 4), (100_001, 32), (10**7, 32)],
)
def test_defaults_follow_table_3(rows: int, batch_size: int) -> None:
    assert defaults(rows) == TrainDefaults(batch_size, 0.01, 200)


# Holding out


def made(counts: list[int]) -> Dataset:
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.random.default_rng(5).permutation(len(labels))
    texts = tuple(f"row {i}" for i in range(len(labels)))
    return Dataset(texts, labels[order], tuple(f"l{i:03}" for i in range(len(counts))))


def counted(data: Dataset) -> list[int]:
    return [int((data.labels == label).sum()) for label in range(len(data.label_names))]


def test_split_takes_each_label_in_proportion() -> None:
    rest, held = split(made([500, 300, 150, 50]), 0.1, seed=1)
    assert len(held) == 100
    assert np.abs(np.array(counted(held)) - [50, 30, 15, 5]).max() <= 1
    assert np.add(counted(rest), counted(held)).tolist() == [500, 300, 150, 50]


def test_split_loses_and_repeats_nothing_and_keeps_the_order() -> None:
    data = made([40, 7, 3])
    parts = split(data, 0.1, seed=3)
    assert sorted(parts[0].texts + parts[1].texts) == sorted(data.texts)
    label = dict(zip(data.texts, data.labels, strict=True))
    for part in parts:
        assert list(part.texts) == sorted(part.texts, key=data.texts.index)
        assert [label[text] for text in part.texts] == part.labels.tolist()
        assert part.label_names == data.label_names


def test_split_holds_at_least_one_row_out() -> None:
    assert len(split(made([3, 3]), 0.05, 0)[1]) == 1


def test_split_depends_on_the_seed_alone() -> None:
    data = made([60, 40])
    assert split(data, 0.1, 7)[1].texts == split(data, 0.1, 7)[1].texts
    assert split(data, 0.1, 7)[1].texts != split(data, 0.1, 8)[1].texts


@given(st.lists(st.integers(1, 9), min_size=2, max_size=20), st.integers(0, 9))
def test_split_never_takes_the_last_row_of_a_label_if_it_can(counts: list[int], seed: int) -> None:
    rest, held = split(made(counts), 0.3, seed)
    assert len(held) >= 1
    assert len(rest) >= 1
    if max(counts) > 1:
        assert min(counted(rest)) >= 1
        spare = sum(counts) - len(counts)
        assert len(held) == min(max(1, round(0.3 * sum(counts))), spare)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=2, max_size=60),
    st.integers(0, 9),
)
@example([(0, 0), (0, 1), (1, 0), (2, 2)], 0)
@example([(0, 0), (0, 1), (1, 0), (1, 2), (2, 3)], 0)  # each text is a label's only one
def test_no_text_is_on_both_sides(rows: list[tuple[int, int]], seed: int) -> None:
    """Whatever is copied how often, with equal or with different labels."""
    texts = tuple(f"{'Text' if i % 2 else 'text'} {number} !" for i, (number, _) in enumerate(rows))
    data = Dataset(texts, np.array([label for _, label in rows]), tuple("abcd"))
    if len({number for number, _ in rows}) == 1:
        with pytest.raises(ValueError, match="cannot hold"):
            split(data, 0.1, seed)
        return
    rest, held = split(data, 0.1, seed)
    assert len(rest) and len(held) and len(rest) + len(held) == len(data)
    assert not {text.lower() for text in rest.texts} & {text.lower() for text in held.texts}
    texts_of = [{number for number, label in rows if label == one} for one in range(4)]
    singles = [one for one in range(4) if len(texts_of[one]) == 1]
    needed = set().union(*(texts_of[one] for one in singles))
    spare = {number for number, _ in rows} - needed
    if spare and len(held) <= max(1, round(0.1 * len(data))):
        assert set(singles) <= set(rest.labels.tolist()), "a label's only text is trained on"


def groups_of(texts: tuple[str, ...]) -> Groups:
    return equal_texts(words.number(texts, words.cut_for(texts))[1])


@pytest.mark.parametrize("other", ["more 句子", "more"])
def test_each_text_is_tokenized_once(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare for the CNN: the result is that of the functions that tokenize for themselves."""
    rows = "".join(f"some words {i % 7} !,{'xy'[i % 2]}\n" for i in range(2000)) + "...,x\n"
    train = written(tmp_path, f"text,label\n{rows}")
    test = tmp_path / "test.csv"
    test.write_text(f"text,label\n{other} words,x\n")
    known, tokenized = words.tokenize, list[str]()

    def counting(text: str, cut: words.Cut = words.WORDS) -> list[str]:
        tokenized.append(text)
        return known(text, cut)

    monkeypatch.setattr(words, "tokenize", counting)
    found = Corpus.read(Settings(train_file=train, test_file=test, model="cnn"))
    assert found.test is not None
    assert len(tokenized) == 2002 * (1 + (other != "more")), "again only for another cut"
    vocabulary = words.Vocabulary.build(found.train.texts, 2)
    assert found.vocabulary == vocabulary
    for data, encoded in (
        (found.train, found.encoded),
        (found.held_out, found.held_out_encoded),
        (found.test, found.test_encoded),
    ):
        again = words.encode(data.texts, vocabulary)
        assert (encoded.tokens.dtype, encoded.lengths.dtype) == (np.int32, np.int32)
        assert encoded.tokens.tolist() == again.tokens.tolist()
        assert encoded.lengths.tolist() == again.lengths.tolist()


def test_copies_are_held_out_in_proportion() -> None:
    """Fifty rows, each of them twelve times: a tenth are five texts."""
    texts = tuple(f"row {i} of {i % 2}" for i in range(50)) * 12
    data = Dataset(texts, np.array([0, 1] * 300), ("x", "y"))
    rest, held = split(data, 0.1, 1)
    assert (len(held), len(set(held.texts))) == (60, 5)
    assert not set(held.texts) & set(rest.texts)
    (copies,) = findings(data, groups_of(texts))
    assert copies.startswith("550 of 600 rows are copies of other rows' texts")


def test_a_text_with_many_copies_is_not_held_out() -> None:
    """It would be most of what is measured."""
    texts = ("the same",) * 60 + tuple(f"another {i}" for i in range(40))
    data = Dataset(texts, np.array([0, 1] * 50), ("x", "y"))
    assert all("the same" not in split(data, 0.1, seed)[1].texts for seed in range(20))


def test_what_is_odd_in_a_training_set_is_told() -> None:
    texts = ("good", "Good", "bad", "worse", "fine", "Fine")
    data = Dataset(texts, np.array([0, 1, 1, 1, 2, 2]), ("p", "n", "single"))
    copies, labels, single = findings(data, groups_of(texts))
    assert copies.startswith("2 of 6 rows are copies")
    assert labels.startswith("1 text with copies of different labels ('good')")
    assert "2 labels with a single text ('p', 'single')" in single
    with pytest.raises(DatasetError, match=r"none of its 2 labels .* has two different texts"):
        check(
            "f.csv", Dataset(("a", "a", "b"), np.array([0, 0, 1]), ("x", "y")), np.array([0, 0, 1])
        )


@pytest.mark.parametrize(("counts", "fraction"), [([1], 0.5), ([3, 3], 0.0), ([3, 3], 1.0)])
def test_impossible_splits_are_refused(counts: list[int], fraction: float) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        split(made(counts), fraction, 0)
