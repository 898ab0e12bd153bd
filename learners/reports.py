"""Values that a script reports beside the loss, such as an accuracy, for the history."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gadei_ps.errors import ControlError, UsageError
from gadei_ps.job.control import MOST_REPORTED, REPORTED_NAME, Reported, pack

SEND_S: Final = 1.0  # between two messages
_NAME: Final = re.compile(REPORTED_NAME)
TAKEN: Final = ("loss", "samples", "samples_per_s", "staleness", "learners")


class Reports:
    """Sums of the values of one learner since its last message to the watchdog.

    No call waits for the watchdog: what cannot be sent now goes with the next message. Not for
    several threads at once.
    """

    def __init__(self, path: Path) -> None:
        """path: of the job's control socket."""
        self._path = path
        self._sums: dict[str, list[Any]] = {}
        """Sum, which may be a tensor on a device, and number of the values, by name."""
        self._sent_at = time.monotonic()

    def add(self, values: Mapping[str, Any]) -> None:
        """Add values, and send what there is about once a second. Raises UsageError."""
        for name, value in values.items():
            known = self._sums.get(name)
            if known is None:
                _check(name, len(self._sums))
                known = self._sums[name] = [0.0, 0]
            if getattr(value, "is_cuda", False):  # it is not waited for
                known[0] = known[0] + value.detach().reshape(())
                known[1] += 1
                continue
            number = _number(name, value)
            if math.isfinite(number):
                known[0] += number
                known[1] += 1
        if time.monotonic() - self._sent_at >= SEND_S:
            self.send()

    def send(self) -> None:
        """Send what there is, if the watchdog takes it at once. Raises nothing."""
        self._sent_at = time.monotonic()
        sums = {name: (float(one), count) for name, (one, count) in self._sums.items() if count}
        means = {name: (one / count, count) for name, (one, count) in sums.items()}
        finite = {name: one for name, one in means.items() if math.isfinite(one[0])}
        if finite:
            try:
                data = pack(Reported(values=finite).model_dump())
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.setblocking(False)
                    connection.connect(str(self._path))
                    if connection.send(data) < len(data):
                        return
            except (OSError, ControlError):
                return
        for one in self._sums.values():
            one[:] = [0.0, 0]


def _check(name: str, known: int) -> None:
    if not _NAME.fullmatch(name) or name in TAKEN:
        taken = f", except {', '.join(TAKEN)}" if name in TAKEN else ""
        raise UsageError(
            f"report({name[:60]}=...): a name is 1 to 40 letters, digits, '_', '-', '.' and '/', "
            f"beginning with a letter{taken}"
        )
    if known >= MOST_REPORTED:
        raise UsageError(
            f"report({name}=...): a learner reports at most {MOST_REPORTED} values by name"
        )


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(value, "shape", None)
        what = f"{type(value).__name__} of shape {list(shape)}" if shape else repr(value)[:60]
        raise UsageError(f"report({name}={what}): give one number") from None
