"""Letters between agents: a message of their agreement, and where agents can be reached, as bytes.

A letter is JSON. What comes from another machine is checked in all its fields before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from gadei_ps.errors import AgentError
from gadei_ps.groups import messages
from gadei_ps.groups.membership import Member, View
from gadei_ps.groups.messages import Message

MOST_BYTES = 1 << 18
MOST_AGENTS = 1024
"""Agents in an address book."""
MOST_TERMS = 1000
_MOST = 2**63
_MOST_NUMBER = 2**64
"""What a frame has room for."""
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Entry:
    """Where a life of an agent can be reached."""

    incarnation: Annotated[int, Field(ge=0, lt=2**63)]
    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, lt=2**16)]


Book = dict[int, Entry]
"""Agents by their numbers."""


@dataclass(frozen=True)
class Letter:
    """What an agent sends to another one. book: where the sender and others can be reached.

    terms: settings of the sender that all machines of a group must have alike, in words.
    """

    message: Message
    book: Book
    terms: str = ""


_BODIES: Mapping[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (
        *(messages.Prepare, messages.Promise, messages.Refused, messages.Accept),
        *(messages.Accepted, messages.Ready, messages.Join, messages.Leave, messages.Notice),
        *(messages.Offer, messages.Choice, messages.Aim),
    )
}
_MEMBER: TypeAdapter[Member] = TypeAdapter(Member)
_VIEW: TypeAdapter[View | None] = TypeAdapter(View | None)
_BOOK: TypeAdapter[Book] = TypeAdapter(
    dict[Annotated[int, Field(ge=0, lt=2**32)], Entry],
)

_TERMS: TypeAdapter[str] = TypeAdapter(Annotated[str, Field(max_length=MOST_TERMS)])


def encode(letter: Letter) -> bytes:
    """The letter as bytes."""
    message = letter.message
    kind = type(message.body).__name__
    return json.dumps(
        {
            "kind": kind,
            "sender": message.sender,
            "view": _VIEW.dump_python(message.view, mode="json"),
            "body": _BODIES[kind].dump_python(message.body, mode="json"),
            "book": _BOOK.dump_python(letter.book, mode="json"),
            "terms": letter.terms,
        },
        separators=(",", ":"),
    ).encode()


def decode(data: bytes) -> Letter:
    """The letter in these bytes. Raises AgentError, in one line, if they are none."""
    try:
        found = json.loads(data)
        body = _BODIES[found["kind"]].validate_python(found["body"])
        view = _VIEW.validate_python(found["view"])
        sender = _MEMBER.validate_python(found["sender"])
        book = _BOOK.validate_python(found["book"])
        terms = _TERMS.validate_python(found["terms"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        what = " ".join(f"{where} {first['msg']}".split())[:200]
        raise AgentError(f"sends a letter that cannot be read: {what}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise AgentError("sends what is no letter") from None
    least = -1 if isinstance(body, messages.Ready) else 0
    for one in _within((sender, view, body)):
        if isinstance(one, int):
            if not least <= one < _MOST_NUMBER:
                raise AgentError("sends a letter with an impossible number")
        elif isinstance(one, View):
            if not one.members or not (0 <= one.generation < _MOST and 0 <= one.settled < _MOST):
                raise AgentError("sends a letter with an impossible view")
        elif not _has_number(one) or not 0 <= one.incarnation < _MOST:
            raise AgentError("sends a letter of machines that have no numbers")
    if len(book) > MOST_AGENTS:
        raise AgentError("sends a letter with an impossible number of addresses")
    return Letter(Message(sender, view, body), book, terms)


def pack_book(book: Book) -> bytes:
    """An address book alone, as bytes."""
    return _BOOK.dump_json(book)


def unpack_book(data: bytes) -> Book:
    """The address book in these bytes. Raises AgentError."""
    try:
        book = _BOOK.validate_json(data)
    except ValidationError:
        raise AgentError("sends an address book that cannot be read") from None
    if len(book) > MOST_AGENTS:
        raise AgentError("sends an address book of an impossible length")
    return book


def _has_number(one: Member) -> bool:
    return bool(_NUMBER.fullmatch(one.machine)) and int(one.machine) < 2**32


def _within(what: object) -> Iterator[Member | View | int]:
    """All members, views and other numbers that are in it, in whatever depth."""
    if isinstance(what, Member | int):
        yield what
        return
    if isinstance(what, View):
        yield what
    if isinstance(what, tuple | frozenset):
        for one in what:
            yield from _within(one)
    elif is_dataclass(what):
        for field in fields(what):
            yield from _within(getattr(what, field.name))
