"""Synchronization model of a job: its text and number in control, and the shards' mode.

The watchdog writes the next model's text beside that of the one in force and then its number, as
`sync_wanted`. The active server makes the change at a barrier and then writes the same number, as
`sync_done`. So a server that dies between them leaves a job that has the one or the other model.
"""

from __future__ import annotations

import numpy as np

from gadei_ps import _native, sync
from gadei_ps.job import hyperparameters
from gadei_ps.machine import log
from gadei_ps.memory.layout import CONTROL, Mode
from gadei_ps.memory.segment import Segment
from gadei_ps.sync import SyncModel

MODE_BITS = 2  # of the word, below the count of changes


def in_force(control: Segment) -> int:
    """Number of the model in force."""
    return _native.load(control.word(CONTROL, "sync_done"))


def requested(control: Segment) -> int:
    """Number of the model that is asked for, the same unless a change is under way."""
    return _native.load(control.word(CONTROL, "sync_wanted"))


def text(control: Segment, number: int) -> str:
    """The model of that number, the one in force or the one wanted, as `sync.parse` reads it."""
    line: np.ndarray = control.view(CONTROL)["sync_text"][number % 2]
    return line.tobytes().rstrip(b"\0").decode(errors="replace")


def model(control: Segment, number: int) -> SyncModel:
    """A new model object of that number. If its file is gone, it awaits all learners; logged.

    No job starts or changes without the file; but a failover must work even if it is lost later.
    """
    made = sync.parse(text(control, number))
    try:
        made.check(None)
    except sync.SpecError as error:
        log.get().error(
            "continuing without the file of the model: waiting for all learners", reason=str(error)
        )
    return made


def awaits_start(control: Segment) -> bool:
    """Return whether the first superstep is to come under a model whose learners start together."""
    if int(control.view(CONTROL)["superstep"]) or in_force(control) or requested(control):
        return False
    return sync.parse(text(control, 0)).awaits_start


def initialize(control: Segment, model: SyncModel) -> None:
    """Watchdog, in a new job: the first model."""
    _write(control, 0, model)
    enforce(control, 0, model)


def request(control: Segment, model: SyncModel) -> None:
    """Watchdog, while no change is under way: another model is wanted."""
    number = in_force(control) + 1
    _write(control, number, model)
    _native.store(control.word(CONTROL, "sync_wanted"), number)


def enforce(control: Segment, number: int, model: SyncModel) -> None:
    """Active server: the shards do as the model of that number wants it."""
    view = control.view(CONTROL)
    view["report"] = model.uses_pushes
    view["wave"] = model.wave
    changes = number + hyperparameters.in_force(control)
    set_mode(control, changes, Mode.ON_ARRIVAL if model.on_arrival else Mode.COLLECT)


def set_mode(control: Segment, changes: int, mode: Mode) -> int:
    """Store the mode, in the active server, and return its word.

    The shards read it before each pass over the rings.

    changes: of the model and of the hyperparameters together, including the current one. The pauses
    are added, so that no shard's answer to one of them is taken for its answer to the next one.
    """
    changes += int(control.view(CONTROL)["pauses"])
    word = (changes << MODE_BITS | mode) & 0xFFFFFFFF
    address = control.word(CONTROL, "mode")
    if _native.load32(address) != word:
        _native.store32(address, word)  # SYNC POINT: mode
        _native.bell(control.word(CONTROL, "shard_bell"))
    return word


def _write(control: Segment, number: int, model: SyncModel) -> None:
    view = control.view(CONTROL)
    raw = str(model).encode()
    line = view["sync_text"][number % 2]
    line[:] = 0
    line[: len(raw)] = np.frombuffer(raw, np.uint8)
