"""A job whose processes were in another pid namespace, for example in a container that is gone.

Its pids mean nothing here: they may be other processes', even with the same start times. So only
evidence of the kernel counts: locks on the control segment, and whether a ring is open for
writing.
"""

from __future__ import annotations

import time

import numpy as np

from gadei_ps.errors import JobInUse, NotOurs
from gadei_ps.memory import holds, presence, shm
from gadei_ps.memory.layout import ServerState

NOWHERE = 0  # no namespace has this number: pids in the memory mean nothing to any process
LET_GO_S = 15.0  # for a server that has lost its watchdog while it started


def check_dead(job: str, control: np.void) -> None:
    """Raise JobInUse if a server or a learner of the job lives. The caller holds the watchdog's
    lock."""
    if presence.living(job).servers:
        raise JobInUse(presence.elsewhere(job))
    roster = control["roster"]
    for row in np.flatnonzero(roster["generation"] != roster["retired"]).tolist():
        try:
            written = holds.is_written(shm.segment_name(job, f"ring.{row}"))
        except (FileNotFoundError, NotOurs):
            continue
        if written:
            raise JobInUse(
                f"learner {row} of job {job!r} is running elsewhere (in another container or pid "
                "namespace): end it there first"
            )


def take_over(job: str, control: np.void) -> None:
    """Make sure, after check_dead(), that no server of the job begins to serve there any more.

    One may just have been starting when its watchdog died. It takes its lock, then looks whether it
    is still named; here the names are removed first, and then the locks are looked at. The memory
    is of no namespace meanwhile: if this fails, or its process is killed, every next watchdog looks
    at the locks again, in whichever namespace it starts. Raises JobInUse.
    """
    # First, so that nobody reads pids that are removed as those of the dead.
    control["header"]["owner_namespace"] = NOWHERE
    _forget_processes(control)
    _wait_for_servers(job)
    # Again: a server that had its lock may have entered itself until it ended.
    _forget_processes(control)


def _forget_processes(control: np.void) -> None:
    """Clear the pids of the dead, before the job's pids are those of this namespace."""
    control["watchdog_pid"] = control["lease_pid"] = control["fork_server_pid"] = 0
    control["server"]["pid"] = 0
    control["server"]["state"] = ServerState.NONE
    control["roster"]["pid"] = 0


def _wait_for_servers(job: str) -> None:
    """Wait until no server has a lock: one that is not named any more ends. Raises JobInUse."""
    until = time.monotonic() + LET_GO_S
    while presence.living(job).servers:
        if time.monotonic() > until:
            raise JobInUse(presence.elsewhere(job))
        time.sleep(0.01)
