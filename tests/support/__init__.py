"""Helpers that tests share."""

from support.frames import Loose, decoded_frame, payload_of, rows_payload, same, written
from support.jobs import (
    Pusher,
    config,
    daemon,
    kill_all,
    learner,
    live_weights,
    remove_segments,
    ring_of,
    segments,
    status,
)
from support.processes import FAULTS, FORK, Child, Manager, Stopped, children, described, fork, gone
from support.quick import QuickDaemon
from support.rig import Rig
from support.waiting import PATIENCE_S, eventually, spin

__all__ = [
    "FAULTS",
    "FORK",
    "PATIENCE_S",
    "Child",
    "Loose",
    "Manager",
    "Pusher",
    "QuickDaemon",
    "Rig",
    "Stopped",
    "children",
    "config",
    "daemon",
    "decoded_frame",
    "described",
    "eventually",
    "fork",
    "gone",
    "kill_all",
    "learner",
    "live_weights",
    "payload_of",
    "remove_segments",
    "ring_of",
    "rows_payload",
    "same",
    "segments",
    "spin",
    "status",
    "written",
]
