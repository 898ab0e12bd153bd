"""The stages of a server: the one table of which combinations of its words are legal.

The entry of a server in the control segment has `pid`, `state` and `confirmed`; `lease_pid` is the
active server. Three processes store these words: the watchdog enters a server and clears its entry,
the server sets `state` and `confirmed`, and the next active server sets `lease_pid`. A reader may
look between two stores, so the table also has these combinations. The leases decide which server
serves; these words report it.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final

import numpy as np

from gadei_ps.memory.layout import ServerState


class Stage(IntEnum):
    """The stage of a server, as other processes see it."""

    ILLEGAL = auto()
    """A combination that no sequence of stores leads to."""
    ABSENT = auto()
    """There is no server, or it is being entered or cleared."""
    STARTING = auto()
    """It loads, compiles or maps what it needs to stand by."""
    STANDBY = auto()
    """Everything is loaded and mapped, and its threads wait for the leases."""
    BEGINNING = auto()
    """Active before its start was complete; it does not have the leases of all shards yet."""
    RECOVERING = auto()
    """Active after it stood by; it does not have the leases of all shards yet."""
    SERVING = auto()
    """Active, and has had the leases of all shards: another server may stand by."""
    COMPILING = auto()
    """The same, and compiles code for the optimizer of a new model."""
    REPLACED = auto()
    """It has served, and another server is active: it died, and its entry is not cleared yet."""


class Leases(IntEnum):
    """Leases that a server has taken. It never releases one, except `standby_lease` in the end."""

    NONE = 0
    HEIR = 1
    """It may wait for the leases of managers and shards."""
    MANAGERS = 2
    """It is active."""
    ALL = 3
    """It is active and has had those of all shards; the next server may take `standby_lease`."""


READY: Final = frozenset((Stage.STANDBY, Stage.RECOVERING, Stage.SERVING))
"""Servers that serve, or can do so at once."""
ACTIVE: Final = frozenset((Stage.BEGINNING, Stage.RECOVERING, Stage.SERVING, Stage.COMPILING))

_NAMED, _ACTIVE, _REIGNS = True, True, True
_NONE, _STARTING, _READY = ServerState

TABLE: Final[dict[tuple[bool, int, bool, bool], Stage]] = {
    # named, state, active, confirmed. An entry without a pid keeps the others for a moment.
    **{
        (False, state, False, confirmed): Stage.ABSENT
        for state in ServerState
        for confirmed in (False, True)
    },
    (_NAMED, _STARTING, False, False): Stage.STARTING,
    (_NAMED, _READY, False, False): Stage.STANDBY,
    (_NAMED, _STARTING, _ACTIVE, False): Stage.BEGINNING,
    (_NAMED, _READY, _ACTIVE, False): Stage.RECOVERING,
    (_NAMED, _READY, _ACTIVE, _REIGNS): Stage.SERVING,
    (_NAMED, _STARTING, _ACTIVE, _REIGNS): Stage.COMPILING,
    (_NAMED, _READY, False, _REIGNS): Stage.REPLACED,
    (_NAMED, _STARTING, False, _REIGNS): Stage.REPLACED,
}
"""Every legal combination; all others are Stage.ILLEGAL."""


def stage(control: np.void, number: int) -> Stage:
    """Return the stage of a server. control: CONTROL. number: of its entry, 0 or 1."""
    entry = control["server"][number]
    # What is stored last is read first: `confirmed` implies READY, and READY implies a pid.
    confirmed, state, pid = bool(entry["confirmed"]), int(entry["state"]), int(entry["pid"])
    return of_words(pid=pid, state=state, confirmed=confirmed, active=int(control["lease_pid"]))


def of_words(*, pid: int, state: int, confirmed: bool, active: int) -> Stage:
    """Return the stage by the words. active: pid of the active server."""
    key = (pid != 0, state, pid != 0 and pid == active, confirmed)
    return TABLE.get(key, Stage.ILLEGAL)
