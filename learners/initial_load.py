"""Loads that the learners of a job share: all run the same script, and one of them writes.

The watchdog decides which (watchdog/initial_load.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Literal

from gadei_ps.errors import GadeiError, PushTimeout
from gadei_ps.job.control import LastingConnection, Load
from gadei_ps.learners.gradients import Assigned
from gadei_ps.learners.waiting import deadline

LOAD_POLL_S = 0.02  # between two requests, while another learner writes
ABANDON_TIMEOUT_S = 3.0  # for another watchdog to receive that this learner does not write

What = Literal["state", "weights"]
Write = Callable[[float | None], object]
"""Called with the deadline."""


class InitialLoad:
    """Loads of one learner, in agreement with the others."""

    def __init__(self, connection: LastingConnection, generation: int) -> None:
        """Load for the learner of this generation."""
        self._connection = connection
        self._generation = generation
        self._last: dict[What, int] = {"state": 0, "weights": 0}
        """Digests of what this learner has loaded last."""

    def share(
        self,
        what: What,
        digest: int,
        write: Write,
        timeout_s: float | None,
        *,
        steps: int = 0,
        gives: int = 0,
    ) -> bool:
        """Write, or wait until another learner has written the same.

        steps, gives: as in control.Load. Returns false if the job keeps something else. Raises
        PushTimeout, and what write() raises.
        """
        before = self._last[what]
        digest = _hash(repr((before, digest)).encode()) if before else digest
        request = Load(
            what=what,
            generation=self._generation,
            digest=digest,
            steps=steps,
            gives=gives,
            after=before,
        )
        done = self._write_when_asked(request, write, timeout_s)
        self._last[what] = digest
        return done

    def write_state(self, write: Write, timeout_s: float | None) -> None:
        """Write the optimizer's state in the middle of training, whatever others have loaded."""
        request = Load(generation=self._generation, digest=1, steps=0, gives=0, after=0, again=True)
        self._write_when_asked(request, write, timeout_s)

    def _write_when_asked(self, request: Load, write: Write, timeout_s: float | None) -> bool:
        """Return false if the job keeps another load. After an error nobody waits for this one."""
        until = deadline(timeout_s)
        try:
            while (answer := self._ask(request)) == "wait":
                if until is not None and time.monotonic() >= until:
                    raise PushTimeout(
                        f"another learner has not loaded the {request.what} within {timeout_s} s"
                    )
                time.sleep(LOAD_POLL_S)
            if answer == "write":
                write(until)
                self._ask(request.model_copy(update={"done": True}))
        except BaseException:
            with contextlib.suppress(GadeiError, OSError):
                self._ask(request.model_copy(update={"gives_up": True}), ABANDON_TIMEOUT_S)
            raise
        return answer != "other"

    def _ask(self, request: Load, patience_s: float = 10.0) -> str:
        return str(self._connection.request(request, patience_s=patience_s)["answer"])


def digest_of(assigned: Sequence[Assigned], besides: object) -> int:
    """Return a digest of what is loaded; never 0."""
    arrays = (array.data for one in assigned for array in one.arrays)
    return _hash(repr(besides).encode(), *arrays)


def _hash(*parts: bytes | memoryview) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(part)
    return int.from_bytes(found.digest(), "big") >> 1 or 1
