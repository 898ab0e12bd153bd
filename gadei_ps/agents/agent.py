"""`python -m gadei_ps.agents.agent`: the agent of one machine, beside its job.

Its settings come as a line of JSON on standard input, so that the token stands in no command line;
more lines may follow (orders.py). It prints lines of JSON: where it listens, its standing in its
group, which rounds the job has, with a checksum of the group's weights, what people are to know,
and at last why it has ended. SIGTERM asks it to leave its group.

Exit codes: 0 it has left; 4 its job was stopped; 75 the group goes on without it, start it again
with `joins`; 2 another life would end as well; others as for each command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gadei_ps.agents import addresses, orders, threads, tls
from gadei_ps.agents.driver import Driver
from gadei_ps.agents.events import EXPELLED, GIVEN_UP, LEFT, LOST, TRAINED, Mistake
from gadei_ps.agents.handshake import Identity
from gadei_ps.agents.letters import MOST_AGENTS, Entry
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.neighbours import Group
from gadei_ps.agents.owning import OwningTraining, StandingOwner
from gadei_ps.agents.state import NOT_FINITE
from gadei_ps.agents.training import JobTraining, StandingTraining
from gadei_ps.errors import GadeiError, JobStopped, UsageError, in_words, invalid
from gadei_ps.groups import reading
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.membership import MOST_MEMBERS, Member, View
from gadei_ps.groups.shares import Shares
from gadei_ps.job.number_types import Real, Whole
from gadei_ps.machine import log
from gadei_ps.sync.parameters import SpecError

CLOSE_S = 5.0
AGAIN = 75
"""Exit code: a new life may join."""
_TELLING = threading.Lock()
_CODES = {
    LEFT: 0,
    TRAINED: JobStopped.exit_code,
    EXPELLED: AGAIN,
    GIVEN_UP: AGAIN,
    LOST: AGAIN,
    NOT_FINITE: UsageError.exit_code,
}
Number = Annotated[Whole, Field(ge=0, lt=2**31)]


class Tls(BaseModel):
    """PEM files: this agent's certificate and key, and who signs all agents'."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    certificate: Path
    key: Path
    authority: Path


class Settings(BaseModel):
    """What one agent is told.

    group: its name, the same for all its agents, and for those of all groups that exchange models.
    number: of this agent, among all of these. agents: addresses, as HOST:PORT, by the agents'
    numbers: of all that begin the group together; or, where this one joins, of some that are in it,
    and perhaps of others that were. after: number of the life before, for one that joins.
    group_number: which of the groups it is. founding: another word each time that this group begins
    anew: agents of its lives before are not heard. sources: for each group whose models it takes,
    numbers and addresses of some of its agents. wire: the format of the models that it gives to
    others.
    listen: where this one listens. address: where others reach it, if that is not the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    job: str
    group: str = Field(min_length=1, max_length=100)
    number: Number
    agents: dict[Number, str] = Field(min_length=1, max_length=MOST_AGENTS)
    joins: bool = False
    after: Whole = Field(0, ge=0)
    group_number: Number = 0
    founding: str = Field("", max_length=100)
    sources: dict[Number, dict[Number, str]] = Field(default_factory=dict, max_length=64)
    wire: Wire = Wire.FLOAT32
    listen: str
    address: str | None = None
    token: str = Field(repr=False)
    tls: Tls | None = None
    rule: str = "replace"
    every: Whole = Field(gt=0, description="gradients of a round")
    divides: Whole | None = Field(
        None, ge=1, le=1024, description="groups that divide each pass over the batches; None: none"
    )
    overlap: bool = Field(True, description="whether learners train on while groups exchange")
    silence_s: Real = Field(1.0, gt=0, le=3600)
    piece_s: Real = Field(5.0, gt=0, le=3600)
    patience_s: Real = Field(60.0, ge=0, le=86400, description="for the job, and for all to start")

    @field_validator("agents")
    @classmethod
    def _agents(cls, value: dict[int, str]) -> dict[int, str]:
        for one in value.values():
            addresses.parse(one)
        return value

    @field_validator("sources")
    @classmethod
    def _sources(cls, value: dict[int, dict[int, str]]) -> dict[int, dict[int, str]]:
        for group, agents in value.items():
            if not agents:
                raise ValueError(f"name an agent of group {group}")
            for one in agents.values():
                addresses.parse(one)
        return value

    @field_validator("listen", "address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            addresses.parse(value)
        return value

    def contacts(self) -> dict[int, Entry]:
        """The other agents."""
        others = {n: addresses.parse(text) for n, text in self.agents.items() if n != self.number}
        return {number: Entry(0, *address) for number, address in others.items()}

    def place(self) -> Group:
        """The group, and where others can be reached whose models it takes."""
        sources = {
            group: {number: addresses.parse(text) for number, text in agents.items()}
            for group, agents in self.sources.items()
        }
        return Group(self.group_number, sources)


def read(raw: str) -> Settings:
    """Settings from JSON. Raises UsageError in one line."""
    try:
        settings = Settings.model_validate_json(raw)
    except ValidationError as error:
        raise UsageError(f"agent: {invalid(error, 'settings')}") from None
    if settings.joins and not settings.contacts():
        raise UsageError("agent: agents: name one that is in the group, to join it")
    if not settings.joins and settings.number not in settings.agents:
        raise UsageError(
            f"agent: agents: number {settings.number} is not among those that begin the group"
        )
    if not settings.joins and len(settings.agents) > MOST_MEMBERS:
        raise UsageError(
            f"agent: agents: {len(settings.agents)} begin a group: at most {MOST_MEMBERS} can"
        )
    if settings.divides is not None and not settings.group_number < settings.divides:
        raise UsageError(
            f"agent: divides: group {settings.group_number} is none of {settings.divides} groups, "
            "which count from 0"
        )
    if settings.group_number in settings.sources:
        raise UsageError(
            f"agent: sources: group {settings.group_number} is this one's own; name others"
        )
    if settings.address is None and addresses.parse(settings.listen)[0] in ("0.0.0.0", "::"):
        raise UsageError(
            f"agent: address: others cannot call {settings.listen}; say where they reach this agent"
        )
    return settings


def run(settings: Settings, told: Iterable[str] = ()) -> int:
    """One life of the agent; returns its exit code. told: orders that come. Raises GadeiError."""
    try:
        rule = reading.parse(settings.rule)
    except SpecError as error:
        raise UsageError(f"agent: rule: {error}") from None
    identity = Identity(settings.group, settings.token.encode(), settings.founding)
    contexts = None
    if settings.tls is not None:
        given = settings.tls
        host, _ = addresses.parse(settings.address or settings.listen)
        contexts = tls.checked(given.certificate, given.key, given.authority, host=host)
    # A life that comes later has a greater number, also where the clock goes back.
    life = max(int(time.time() * 1000), settings.after + 1) if settings.joins else 0
    me = Member(str(settings.number), life)
    training = _training(settings, me)
    door = Listener(addresses.parse(settings.listen), identity, contexts)
    view = None
    if not settings.joins:
        view = View(0, tuple(Member(str(number), 0) for number in sorted(settings.agents)))
    address = door.address
    if settings.address is not None:
        host, port = addresses.parse(settings.address)
        address = host, port or address[1]
    driver = Driver(
        *(door, me, address, training, rule, view),
        group=settings.place(),
        wire=settings.wire,
        owning=training if isinstance(training, OwningTraining) else None,
        silence_s=settings.silence_s,
        piece_s=settings.piece_s,
        start_s=settings.patience_s,
        told=lambda standing: _tell(**asdict(standing)),
    )
    signal.signal(signal.SIGTERM, lambda *_: driver.leave())
    try:
        driver.post.learn(settings.contacts())
        _tell(address=address, incarnation=me.incarnation, values=training.values)
        threads.start("agent-orders", _obey, driver, told)
        if settings.joins:
            driver.join([Member(str(number), 0) for number in settings.contacts()])
        ended = driver.run()
    finally:
        training.interrupt()
        unused = driver.close(CLOSE_S)
        door.close()
    _tell(ended=ended)
    code = UsageError.exit_code if isinstance(ended, Mistake) else _CODES.get(ended, 1)
    if code:
        print(f"gadei-ps: {ended}", file=sys.stderr, flush=True)
    if not unused:
        os._exit(code)  # what is still under way must not meet the end of the memory that it uses
    training.close()
    return code


def _training(settings: Settings, me: Member) -> JobTraining:
    facts = settings.job, settings.every, settings.patience_s, _written, _noted
    if settings.divides is not None:
        kind = OwningTraining if settings.overlap else StandingOwner
        return kind(*facts, me, Shares(settings.group_number, settings.divides))
    return (JobTraining if settings.overlap else StandingTraining)(*facts)


def _obey(driver: Driver, told: Iterable[str]) -> None:
    """Thread: carries out what comes; what is no order changes nothing."""
    for line in told:
        try:
            driver.obey(orders.read(line))
        except UsageError as error:
            print(f"gadei-ps: {error}", file=sys.stderr, flush=True)


def _written(rounds: int, checksum: int) -> None:
    _tell(rounds=rounds, checksum=checksum)


def _noted(line: str) -> None:
    _tell(note=line)


def _tell(**facts: Any) -> None:
    with _TELLING:
        print(json.dumps(facts), flush=True)


def main() -> None:
    """Prints an error in one line."""
    threads.guard()
    log.outlive_reader()
    try:
        told = orders.lines(sys.stdin.fileno())
        code = run(read(next(told, "")), told)
    except (GadeiError, OSError, MemoryError) as error:
        print(f"gadei-ps: {in_words(error)}", file=sys.stderr)
        code = error.exit_code if isinstance(error, GadeiError) else 1
    sys.exit(code)


if __name__ == "__main__":
    main()
