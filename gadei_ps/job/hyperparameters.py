"""The numbers of a job's optimizer: those in force, and those that are to be.

Servers read the packed optimizer (`hyper`) in control for every gradient. To change it, the
watchdog writes `hyper_next` and then raises `numbers_wanted`. The active server copies it to
`hyper` while every shard stands at the same gradient, and then stores the same number as
`numbers_done`. If it dies before that store, all shards wait until the next server has copied it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL
from gadei_ps.memory.segment import Segment

Packed = npt.NDArray[np.float64]
"""Hyperparameters of each group of parameters, shape (groups, PACKED)."""


def in_force(control: Segment) -> int:
    """Number of the last change that took effect."""
    return _native.load(control.word(CONTROL, "numbers_done"))  # SYNC POINT: numbers in force


def requested(control: Segment) -> int:
    """Number of the last change that was asked for."""
    return _native.load(control.word(CONTROL, "numbers_wanted"))  # SYNC POINT: numbers


def initialize(control: Segment, packed: Packed) -> None:
    """Watchdog, before the job's first gradient."""
    control.view(CONTROL)["hyper"][: len(packed)] = packed
    control.view(CONTROL)["groups"] = len(packed)


def request(control: Segment, packed: Packed) -> bool:
    """Watchdog, whenever: these are wanted. False if a change to others is still under way."""
    view, number = control.view(CONTROL), in_force(control)
    if requested(control) != number:
        return bool((view["hyper_next"][: len(packed)] == packed).all())
    if (view["hyper"][: len(packed)] == packed).all():
        return True
    view["hyper_next"][: len(packed)] = packed
    _native.store(control.word(CONTROL, "numbers_wanted"), number + 1)  # SYNC POINT: numbers
    for bell in ("manager_bell", "shard_bell"):
        _native.bell(control.word(CONTROL, bell))
    return True


def are_in_force(control: Segment, packed: Packed) -> bool:
    """Return whether servers apply gradients with these."""
    same = (control.view(CONTROL)["hyper"][: len(packed)] == packed).all()
    return requested(control) == in_force(control) and bool(same)


def apply(control: Segment, number: int) -> None:
    """Active server, while all shards stand at the same gradient."""
    view = control.view(CONTROL)
    groups = int(view["groups"])
    view["hyper"][:groups] = view["hyper_next"][:groups]
    view["numbers_version"] = view["version"]
    _native.store(control.word(CONTROL, "numbers_done"), number)  # SYNC POINT: numbers in force


def read(control: np.void, at: int) -> tuple[int, Packed]:
    """Any process: the numbers, whole, and how many changes they have had.

    control: CONTROL; at: its address. While a change is under way, those that are to be.
    """
    done_at = at + layout.offset(CONTROL, "numbers_done")
    wanted_at = at + layout.offset(CONTROL, "numbers_wanted")
    while True:
        before = _native.load(done_at), _native.load(wanted_at)
        name = "hyper" if before[0] == before[1] else "hyper_next"
        packed: Packed = control[name][: int(control["groups"])].copy()
        if (_native.load(done_at), _native.load(wanted_at)) == before:
            return before[1], packed
