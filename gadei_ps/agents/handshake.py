"""Who is at the other end of a connection: both sides prove that they hold the job's token.

    caller    hello: version, link, generation, numbers, the founding, the job, a nonce
    listener  answer: a nonce, and a proof over hello and nonce
    caller    a proof over the same
    listener  verdict: what it thinks of the hello

A proof is an HMAC-SHA256 by the token. Only a caller that has proved itself learns more than
whether the version fits. What is sent after that is neither encrypted nor signed, except by TLS.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from gadei_ps.agents import frames
from gadei_ps.errors import CallRefused, UsageError

MAGIC = b"GPSAGENT"
VERSION = frames.VERSION
LEAST_TOKEN = 16
_HELLO = struct.Struct("<8sHHQIIQI32s32s")
_ANSWER = struct.Struct("<8sHH32s32s")
_VERDICT = struct.Struct("<H")
_PROOF_BYTES = 32


class Link(enum.IntEnum):
    """What a connection is for."""

    DATA = 1
    BEATS = 2
    MODELS = 3
    LETTERS = 4
    STATE = 5


class Verdict(enum.IntEnum):
    """What a listener thinks of a call."""

    WELCOME = 0
    VERSION = 1
    TOKEN = 2
    JOB = 3
    OLD = 4
    NOT_AWAITED = 5
    SIZE = 6
    BUSY = 7


_WORDS = {
    Verdict.TOKEN: "has another token: give all agents of a job the same one",
    Verdict.JOB: "is an agent of another job: look at its address",
    Verdict.OLD: "knows a newer generation of the group: ask for the present one",
    Verdict.NOT_AWAITED: "does not await this agent: it begins or ends, or has other members",
    Verdict.BUSY: "answers too many calls at once: try again",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What all agents of a job share. token: bytes that nobody else knows.

    founding: of the group: another word each time that it begins anew. Agents with another one are
    let in for models alone.
    """

    job: str
    token: bytes
    founding: str = ""

    def __post_init__(self) -> None:
        if len(self.token) < LEAST_TOKEN:
            raise UsageError(
                f"a token of {len(self.token)} bytes can be guessed: use at least {LEAST_TOKEN}"
            )

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.job.encode()).digest()

    @property
    def founding_sum(self) -> int:
        return zlib.crc32(self.founding.encode())

    def proof(self, side: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.digest(self.token, side + hello + nonce, "sha256")


@dataclass(frozen=True, slots=True)
class Hello:
    """Who calls whom, and what for. values: of the model."""

    link: Link
    generation: int
    caller: int
    called: int
    values: int = 0


def call(connection: socket.socket, hello: Hello, identity: Identity, until: float) -> None:
    """The caller's side. Raises CallRefused, whose `verdict` tells why, and OSError."""
    said = _HELLO.pack(
        *(MAGIC, VERSION, hello.link, hello.generation, hello.caller, hello.called, hello.values),
        *(identity.founding_sum, identity.digest, secrets.token_bytes(32)),
    )
    frames.send(connection, [said], until)
    answer = frames.receive_bytes(connection, _ANSWER.size, until)
    magic, version, code, nonce, proof = _ANSWER.unpack(answer)
    if magic != MAGIC:
        raise refusal(Verdict.NOT_AWAITED, "is no agent of gadei-ps: look at its address")
    if version != VERSION or code == Verdict.VERSION:
        raise refusal(
            Verdict.VERSION,
            f"speaks version {version} of the agents' protocol, this agent version {VERSION}: "
            "use the same gadei-ps on all machines",
        )
    if not hmac.compare_digest(proof, identity.proof(b"listener", said, nonce)):
        raise refusal(Verdict.TOKEN)
    frames.send(connection, [identity.proof(b"caller", said, nonce)], until)
    (code,) = _VERDICT.unpack(frames.receive_bytes(connection, _VERDICT.size, until))
    if code == Verdict.SIZE:
        raise refusal(
            Verdict.SIZE,
            f"has a model of another size, and this machine's has {hello.values:,} values: use the "
            "same model on all machines",
        )
    if code != Verdict.WELCOME:
        known = code in _WORDS
        raise refusal(Verdict(code) if known else Verdict.NOT_AWAITED)


def refusal(verdict: Verdict, words: str | None = None) -> CallRefused:
    """The error of a call that was refused."""
    return CallRefused(words or _WORDS[verdict], verdict)


def answer(
    connection: socket.socket,
    identity: Identity,
    judge: Callable[[Hello], Verdict],
    until: float,
) -> Hello:
    """The listener's side up to the verdict, which the caller of this function gives.

    Returns the hello, which is welcome so far. Raises CallRefused, in words about the caller, when
    it is not and has been told so, and OSError.
    """
    said = frames.receive_bytes(connection, _HELLO.size, until)
    magic, version, link, generation, caller, called, values, founding, job, _ = _HELLO.unpack(said)
    if magic != MAGIC:
        raise refusal(Verdict.NOT_AWAITED, "is no agent of gadei-ps")
    nonce = secrets.token_bytes(32)
    if version != VERSION:
        zeros = bytes(32)
        told = _ANSWER.pack(MAGIC, VERSION, Verdict.VERSION, zeros, zeros)
        frames.send(connection, [told], until)
        raise refusal(Verdict.VERSION, f"speaks version {version}, this agent version {VERSION}")
    proof = identity.proof(b"listener", said, nonce)
    frames.send(connection, [_ANSWER.pack(MAGIC, VERSION, Verdict.WELCOME, nonce, proof)], until)
    theirs = frames.receive_bytes(connection, _PROOF_BYTES, until)
    if not hmac.compare_digest(theirs, identity.proof(b"caller", said, nonce)):
        _tell(connection, Verdict.TOKEN, until)
        raise refusal(Verdict.TOKEN, "has another token")
    if not hmac.compare_digest(job, identity.digest):
        _tell(connection, Verdict.JOB, until)
        raise refusal(Verdict.JOB, "is an agent of another job")
    if link not in set(Link):
        _tell(connection, Verdict.NOT_AWAITED, until)
        raise refusal(Verdict.NOT_AWAITED, f"asks for link {link}, and there is no such link")
    hello = Hello(Link(link), generation, caller, called, values)
    is_ours = founding == identity.founding_sum or link == Link.MODELS
    verdict = judge(hello) if is_ours else Verdict.NOT_AWAITED
    if verdict != Verdict.WELCOME:
        _tell(connection, verdict, until)
        raise refusal(verdict, f"is refused: {verdict.name.lower().replace('_', ' ')}")
    return hello


def welcome(connection: socket.socket, patience_s: float = 1.0) -> None:
    """Tells the caller that it is welcome. Raises OSError."""
    _tell(connection, Verdict.WELCOME, time.monotonic() + patience_s)


def _tell(connection: socket.socket, verdict: Verdict, until: float) -> None:
    frames.send(connection, [_VERDICT.pack(verdict)], until)
