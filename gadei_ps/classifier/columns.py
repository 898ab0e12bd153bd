"""Finds out which columns of a file hold the sentences and the labels, and whether it has a header.

A column is that which the user names, else the one named `text` or `label`, else the only one with
a name that is usual for it. A first row is not a header if one of its values occurs in a later row
of the same column too, as labels do and headers do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from gadei_ps.classifier.records import Row, error, list_names

TEXT, LABEL = "text", "label"
HELD = {TEXT: "the sentences", LABEL: "the labels"}
OPTIONS = {TEXT: "--text-column", LABEL: "--label-column"}
_TEXTS = """
    text texts sentence sentences review review_text reviewtext message messages comment comments
    comment_text content body utterance utterances tweet question query description document sms
    title headline article phrase input post
"""
_LABELS = """
    label labels class classes category categories intent intents sentiment target topic tag
    polarity rating stars score language lang emotion airline_sentiment y output
"""
USUAL = {TEXT: frozenset(_TEXTS.split()), LABEL: frozenset(_LABELS.split())}
"""Names that columns usually have, in lower case."""


class Columns(NamedTuple):
    """Positions of the columns in a row, from 0.

    names: of all columns, empty without a header. line: of the header, 0 without one. label: None
    where no labels are wanted. notice: what is worth a word for the user; empty if all is as usual.
    """

    text: int
    label: int | None
    names: tuple[str, ...]
    line: int
    notice: str


def find(
    path: str | PathLike[str],
    head: Sequence[Row],
    names: Sequence[str] | None,
    wanted: dict[str, str | None],
) -> Columns:
    """Find the columns that `wanted` has: TEXT, or TEXT and LABEL, each with its name if given.

    head: the first rows, at least one. names: of the columns where the file's format has them; else
    the first row may be a header. A column is also given by its number, from 1. Raises DatasetError
    for a column that is missing, is there twice, or could be one of several.
    """
    line, first = 0, list(names or ())
    if names is None:
        line, first = head[0].line, [field.strip() for field in head[0].fields]
    if len(first) < len(wanted):
        what = "there is only one column" if first else "there is no column"
        raise error(path, line or None, what, "give one of sentences and one of labels")
    given = {role: _given(path, line, first, role, name) for role, name in wanted.items() if name}
    by_name = any(wanted[role] in first for role in given)
    usual = all(first.count(role) == 1 for role in wanted)
    again = "" if names is not None or by_name or usual else _again(head)
    if not again and names is None and len(first) == 1 and not given and not _is_usual(first[0]):
        again = first[0]  # one column without a name that is known: all rows are sentences
    if again:
        return _without_header(path, head, given, wanted, again)
    found = dict(given)
    for role in wanted:
        if role not in found:
            found[role] = _usual(path, line, first, role, found)
    _check_different(path, line, found)
    odd = [role for role in wanted if first[found[role]] != (wanted[role] or role)]
    notice = ", ".join(f"column {first[found[role]]!r} holds {HELD[role]}" for role in odd)
    return Columns(found[TEXT], found.get(LABEL), tuple(first), line, notice)


def _given(path: str | PathLike[str], line: int, first: list[str], role: str, name: str) -> int:
    count = first.count(name)
    if count == 1:
        return first.index(name)
    if not count and name.isdecimal() and 1 <= int(name) <= len(first):
        return int(name) - 1
    raise _missing(path, line, first, role, name, count)


def _usual(
    path: str | PathLike[str], line: int, first: list[str], role: str, found: dict[str, int]
) -> int:
    """The column for a role that the user has not named."""
    if count := first.count(role):
        if count == 1:
            return first.index(role)
        raise _missing(path, line, first, role, role, count)
    left = [at for at in range(len(first)) if at not in found.values()]
    other = LABEL if role == TEXT else TEXT
    for names in ({role}, USUAL[role]):
        those = [at for at in left if first[at].lower() in names]
        if len(those) == 1:
            return those[0]
        if those:
            what = f"columns {list_names([first[at] for at in those])} may all be the {role}s"
            raise error(path, line or None, what, f"choose one with {OPTIONS[role]}")
    # Of two columns, the one that is not the other's.
    rest = [at for at in left if first[at].lower() not in USUAL[other]]
    if len(first) == 2 and len(rest) == 1 and len(left) - len(rest) + len(found) == 1:
        return rest[0]
    raise _missing(path, line, first, role, role, 0)


def _missing(
    path: str | PathLike[str], line: int, first: list[str], role: str, name: str, count: int
) -> Exception:
    what = f"{count} columns" if count else "no column"
    return error(
        path,
        line or None,
        f"{what} named {name!r}; the columns are {list_names(first)}",
        f"give a name or a number with {OPTIONS[role]}",
    )


def _is_usual(name: str) -> bool:
    return name.lower() in USUAL[TEXT] | USUAL[LABEL]


def _again(head: Sequence[Row]) -> str:
    """A value of the first row that stands in the same column of another row; empty if none does.

    Rows that equal the first one do not count: files may have been put together with their headers.
    """
    first = [field.strip() for field in head[0].fields]
    others = [[field.strip() for field in row.fields] for row in head[1:]]
    for fields in others:
        if fields != first:
            for one, other in zip(first, fields, strict=False):
                if one and one == other:
                    return one
    return ""


def _without_header(
    path: str | PathLike[str],
    head: Sequence[Row],
    given: dict[str, int],
    wanted: dict[str, str | None],
    again: str,
) -> Columns:
    width = len(head[0].fields)
    found = dict(given)
    why = "line 1 is not a header"
    if width > 1:
        why += f" ({list_names([again])} stands in later rows too)"
    if len(found) < len(wanted):
        if width > 2:
            numbers = " ".join(f"{OPTIONS[role]} N" for role in wanted)
            what = f"{why}, and there are {width} columns"
            raise error(path, head[0].line, what, f"give their numbers: {numbers}")
        lengths = [
            sum(len(row.fields[at]) for row in head if at < len(row.fields)) for at in (0, 1)
        ]
        longer = int(width == 2 and lengths[1] > lengths[0])
        text = found.get(TEXT, width - 1 - found[LABEL] if LABEL in found else longer)
        found = {TEXT: text, LABEL: found.get(LABEL, width - 1 - text)}
    found = {role: found[role] for role in wanted}
    _check_different(path, head[0].line, found)
    notice = f"{why}: column {found[TEXT] + 1} holds the sentences"
    if LABEL in found:
        notice += f", column {found[LABEL] + 1} the labels"
    return Columns(found[TEXT], found.get(LABEL), (), 0, notice)


def _check_different(path: str | PathLike[str], line: int, found: dict[str, int]) -> None:
    if len(set(found.values())) < len(found):
        options = " and ".join(OPTIONS.values())
        raise error(
            path, line or None, "sentences and labels are the same column", f"give {options}"
        )
