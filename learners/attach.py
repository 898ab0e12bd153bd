"""Entry and exit of a learner: offer the model, get a place, map its memory, detach."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gadei_ps import _native
from gadei_ps.errors import GadeiError, JobFailed, JobNotFound, SegmentError, UsageError, in_words
from gadei_ps.job.control import (
    RECONNECT_S,
    Attach,
    Detach,
    LastingConnection,
    Offer,
    OnNote,
    TensorOffer,
    memory_file,
)
from gadei_ps.job.parameter_groups import group_numbers, without
from gadei_ps.learners.optimizer_settings import OptimizerSettings
from gadei_ps.memory import layout, segment, weights
from gadei_ps.memory.layout import CONTROL, Phase, Role, SegmentKind
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor
from gadei_ps.show.progress import ProgressLines

DETACH_TIMEOUT_S = 1.0
SILENT = OptimizerSettings()
LEARNER_VARIABLE = "GADEI_PS_LEARNER"
ALONE_VARIABLE = "GADEI_PS_ALONE"
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Place:
    """A row of the roster and the mapped segments: control and weights can only be read."""

    job: str
    row: int
    generation: int
    control: Segment
    weights: Segment
    ring: Segment


def number() -> int:
    """Return the learner's number as `run` and the job give it; -1 if none is given."""
    given = os.environ.get(LEARNER_VARIABLE, "")
    return int(given) if given.isdecimal() and len(given) < 10 else -1


def _is_alone() -> bool:
    """Return whether a user has started this learner alone, by `attach` or without a command."""
    alone = os.environ.get(ALONE_VARIABLE) == str(os.getpid())
    return alone or LEARNER_VARIABLE not in os.environ


def listener() -> OnNote | None:
    """Return the display of a large model's progress, if a user has started this learner alone."""
    # `run` and `train` report it once for all of their learners.
    return (
        ProgressLines() if _is_alone() and sys.stderr is not None and sys.stderr.isatty() else None
    )


def offer(
    connection: LastingConnection,
    tensors: Arrays,
    buffers: Arrays,
    progress: OnNote | None = None,
    settings: OptimizerSettings = SILENT,
    aliases: Mapping[str, str] | None = None,
    frozen: Arrays | None = None,
) -> None:
    """Make the job's model, or check that it is this one. progress: see Connection.request.

    settings: of the optimizer, if the model is made. aliases: further names, each with the tensor's
    own, for exports. Raises ModelMismatch, NoSharedMemory, or UsageError for settings that no
    optimizer has.
    """
    groups = settings.groups or ()
    group_of = group_numbers(tensors, groups)
    given = [Tensor(name, np.shape(array), group=group_of[name]) for name, array in tensors.items()]
    for group in without(given, groups):
        raise UsageError(
            f"groups[{group}]: {' '.join(groups[group].match)!r} names no parameter that is in no "
            "group before it; correct the name or leave the group out"
        )
    frozen = frozen or {}
    for role, others in ((Role.BUFFER, buffers), (Role.FROZEN, frozen)):
        given += [
            Tensor(name, np.shape(array), role, dtype=dtype_of(name, array))
            for name, array in others.items()
        ]
    further: dict[str, list[str]] = {}
    for alias, of in (aliases or {}).items():
        if of not in tensors and of not in buffers and of not in frozen:
            raise UsageError(f"aliases: {alias!r} is given for {of!r}, and no tensor has that name")
        further.setdefault(of, []).append(alias)
    model = weights.place(replace(one, aliases=tuple(further.get(one.name, ()))) for one in given)
    arrays = {**tensors, **buffers, **frozen}
    # Tensor by tensor: a copy of all of them would take as much memory as the model once more.
    fd = memory_file(
        model.words * 4,
        ((one.start * 4, _bytes(arrays[one.name], one.dtype)) for one in model.every if one.count),
    )
    try:
        connection.request(
            Offer(
                number=number(),
                tensors=[
                    TensorOffer(
                        name=one.name,
                        shape=list(one.shape),
                        role=one.role.value,
                        aliases=list(one.aliases) or None,
                        group=one.group,
                        dtype=one.dtype,
                    )
                    for one in model.every
                ],
                optimizer=settings.for_watchdog(),
            ),
            fds=[fd],
            on_note=progress,
        )
    finally:
        os.close(fd)


def dtype_of(name: str, array: npt.NDArray[Any]) -> str:
    """Return the type of a buffer or frozen tensor. Raises UsageError if a job cannot have it."""
    kind = np.asarray(array).dtype
    if kind not in weights.NAME_OF:
        kinds = ", ".join(weights.DTYPES)
        raise UsageError(f"tensor {name!r} is {kind}: a job has values of {kinds}")
    return weights.NAME_OF[kind]


def _bytes(array: npt.NDArray[Any], dtype: str) -> memoryview:
    values = np.ascontiguousarray(array, weights.DTYPES[dtype])
    return values.reshape(-1).view(np.uint8).data


def warn(text: str) -> None:
    """Warn at the line of the user's script, which may have called us by way of torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("gadei_ps.", "torch.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def connected(path: str, patience_s: float = 10.0) -> LastingConnection:
    """Connect to the watchdog of the command that has started this learner, or to its next one.

    That command replaces a watchdog that dies, while the servers continue. Raises JobNotFound if
    none comes in time, or at once without a server, and ControlError.
    """
    from gadei_ps.job.faults import Processes

    until = time.monotonic() + patience_s
    while True:
        try:
            return LastingConnection(path)
        except JobNotFound:
            with contextlib.suppress(GadeiError, OSError):
                job = Processes(Path(path).stem)
                if (job.server() or job.standby()) and time.monotonic() < until:
                    time.sleep(RECONNECT_S)
                    continue
            raise


def attach(
    connection: LastingConnection,
    name: str,
    progress: OnNote | None = None,
    settings: OptimizerSettings = SILENT,
    *,
    buffers: bool = False,
    replica: bool = False,
) -> Place:
    """Get a place for this process. A place whose memory cannot be mapped is given back.

    progress: `on_note` of Connection.request. settings: of the optimizer. Warns if the job has
    others; raises UsageError where that is from another script, from a checkpoint or a default.
    buffers: whether the learner may write the job's buffers. replica: whether it is a replica.
    """
    asked = Attach(
        name=name[:31],
        number=number(),
        optimizer=settings.for_watchdog(),
        buffers=buffers,
        replica=replica,
    )
    reply = connection.request(asked, on_note=progress)
    if "notice" in reply and (number() <= 0 or _is_alone()):  # one of a team prints it
        warn(reply["notice"])
    owner = connection.peer_uid  # not our own, where root attaches to another user's job
    try:
        return Place(
            reply["job"],
            reply["row"],
            reply["generation"],
            _map(reply, owner, "control", SegmentKind.CONTROL, writable=False),
            _map(reply, owner, "weights", SegmentKind.WEIGHTS, writable=False),
            _map(reply, owner, "ring", SegmentKind.RING, writable=True),
        )
    except BaseException:
        detach(connection, reply["row"], reply["generation"], os.getpid())
        raise


def _map(
    reply: dict[str, Any], owner: int, part: str, kind: SegmentKind, *, writable: bool
) -> Segment:
    job_id = bytes.fromhex(reply["job_id"])
    try:
        return segment.attach(reply[part], kind, writable=writable, job_id=job_id, owner=owner)
    except FileNotFoundError:
        raise JobFailed(
            f"segment {reply[part][1:]} is gone; is /dev/shm shared with the watchdog, and "
            "did logind remove it (RemoveIPC)? run gadei-ps doctor"
        ) from None
    except OSError as error:
        raise SegmentError(f"segment {in_words(error)}") from None


def detach(
    connection: LastingConnection,
    row: int,
    generation: int,
    pid: int,
    place: Place | None = None,
    learner: _native.Learner | None = None,
) -> None:
    """Leave, if this is still process `pid` and not a fork of it, and close the connection."""
    if os.getpid() != pid:
        return
    if learner is not None:
        learner.shut()  # what is published is complete before anyone can see that it leaves
    patience_s = DETACH_TIMEOUT_S
    if place is not None:
        # If no watchdog receives the request, the next one reads this word.
        _native.store(place.ring.word(layout.RING, "detached"), 1)
        if int(place.control.view(CONTROL)["phase"]) >= Phase.STOPPED:
            patience_s = 0.0
    try:
        connection.request(Detach(row=row, generation=generation), patience_s=patience_s)
    except GadeiError:
        pass  # the job is gone, or has evicted this learner already
    finally:
        connection.close()
