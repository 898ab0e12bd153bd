"""Splitting sentences into words, and numbering the words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gadei_ps.classifier.dataset import DatasetError
from gadei_ps.classifier.words import (
    CHARACTERS,
    MAX_CHARACTERS,
    MAX_LENGTH,
    MIN_LENGTH,
    WORDS,
    Cut,
    Vocabulary,
    cut_for,
    encode,
    tokenize,
)

utf8_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's good, isn't it?", "it 's good , is n't it ?"),
        ("We've they're I'd she'll", "we 've they 're i 'd she 'll"),
        ("IT'S (very) bad!", "it 's ( very ) bad !"),
        ("don\u2019t", "do n't"),
        ("the `60s 'em", "the `60s 'em"),
        ('a-b/c_d; "e" f.g $9', "a b c d e f g 9"),
        ("Gr\u00fc\u00dfe aus K\u00d6LN", "gr\u00fc\u00dfe aus k\u00f6ln"),
        ("Cafe\u0301", "caf\u00e9"),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u2014 \u4e2d\u6587",
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u4e2d\u6587",
        ),
        ("*** \u2026", ""),
    ],
)
def test_tokenize_splits_as_kim_does(text: str, words: str) -> None:
    assert tokenize(text) == words.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 中文 2.0", "it 's 中 文 2 0"),
        ("東京でテスト!", "東 京 で テ ス ト !"),
        ("ガ", "ガ"),
        ("ที่นี่", "ที่ นี่"),
        ("한국어 문장", "한국어 문장"),
        ("GPTを使う", "gpt を 使 う"),
    ],
)
def test_scripts_without_spaces_are_cut_into_characters(text: str, words: str) -> None:
    assert tokenize(text, CHARACTERS) == words.split()


@given(utf8_text, st.sampled_from([WORDS, CHARACTERS]))
def test_tokens_tokenize_to_themselves(text: str, cut: Cut) -> None:
    words = tokenize(text, cut)
    assert tokenize(" ".join(words), cut) == words


@given(utf8_text)
def test_cuts_differ_only_where_there_are_no_spaces(text: str) -> None:
    if cut_for([text]) == WORDS:
        assert tokenize(text, CHARACTERS) == tokenize(text)


def test_a_vocabulary_remembers_how_texts_were_cut() -> None:
    """One without a word on it is of a release that cut into words."""
    vocabulary = Vocabulary.build(["中文 ok", "ok"])
    assert vocabulary.words == ("ok", "中", "文")
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    assert encode(["文中字"], vocabulary).tokens.tolist() == [4, 3, 1]
    older = Vocabulary.from_json('{"words": ["ok", "中文"]}')
    assert encode(["中文 ok"], older).tokens.tolist() == [3, 2]
    assert "cut" not in Vocabulary.build(["café"]).to_json()
    with pytest.raises(ValueError, match="cut must be"):
        Vocabulary.from_json('{"words": [], "cut": "bytes"}')


def test_only_the_words_that_are_used_are_known() -> None:
    vocabulary = Vocabulary.build(["a " * MAX_LENGTH + "never"])
    assert vocabulary.words == ("a",)
    long = "a " * MAX_CHARACTERS
    assert len(tokenize(long)) * 2 == MAX_CHARACTERS


def test_vocabulary_is_ordered_by_frequency_then_name() -> None:
    vocabulary = Vocabulary.build(["b a", "c b", "b c d"])
    assert vocabulary.words == ("b", "c", "a", "d")
    assert vocabulary.numbers == {"b": 2, "c": 3, "a": 4, "d": 5}
    assert len(vocabulary) == 6
    assert Vocabulary.build(["b a", "c b", "b c d"], min_count=2).words == ("b", "c")


@given(st.lists(utf8_text, max_size=6))
def test_vocabulary_and_numbers_round_trip(texts: list[str]) -> None:
    vocabulary = Vocabulary.from_json(Vocabulary.build(texts).to_json())
    assert vocabulary == Vocabulary.build(texts)
    encoded = encode(texts, vocabulary)
    for text, row, length in zip(texts, encoded.padded(), encoded.lengths, strict=True):
        words = [vocabulary.words[number - 2] for number in row[:length] if number > 1]
        assert words == tokenize(text, vocabulary.cut)
        assert not row[length:].any()


def test_vocabulary_files(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    vocabulary = Vocabulary.build(["na\u00efve words"])
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    with pytest.raises(DatasetError, match="cannot be read"):
        Vocabulary.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{}", '{"words": "ab"}', '{"words": [1]}', '{"words": ["a", "a"]}', "[" * 9**5],
)
def test_damaged_vocabulary_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match="not a vocabulary") as caught:
        Vocabulary.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_encode_pads_cuts_and_marks_unknown_words() -> None:
    vocabulary = Vocabulary(("a", "b"))
    encoded = encode(["a b", "x a", "...", "a b a b a b a"], vocabulary, max_length=6)
    assert encoded.padded().tolist() == [
        [2, 3, 0, 0, 0, 0],
        [1, 2, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [2, 3, 2, 3, 2, 3],
    ]
    assert encoded.lengths.tolist() == [2, 2, 1, 6]
    assert encoded.tokens.dtype == encoded.lengths.dtype == np.int32
    assert encode(["a " * 999], vocabulary).padded().shape == (1, MAX_LENGTH)
    assert encode(["a"], vocabulary).padded().shape == (1, MIN_LENGTH)
    assert encode([], vocabulary).padded().shape == (0, MIN_LENGTH)


def test_a_batch_is_no_wider_than_it_must_be() -> None:
    encoded = encode(["a", "a " * 7, "a " * 30], Vocabulary(("a",)))
    assert encoded.batch(np.array([0])).shape == (1, MIN_LENGTH)
    batch = encoded.batch(np.array([1, 0]))
    assert batch.tolist() == [[2] * 7, [2] + [0] * 6]
    batch[:] = 9
    assert encoded.tokens.max() == 2, "a batch is a copy"
