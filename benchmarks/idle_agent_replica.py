"""A replica of `bench idle_agent`, alone in its group: python -m ... JOB

Its coordinator is in the same process, in the place of an actor of Ray. It prints a line once the
replica is a member of its group.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from gadei_ps.groups.coordinator import Group
from gadei_ps.replicas import sockets
from gadei_ps.replicas.rounds import Rounds, Settings

NEVER = 10**9
LOOK_S = 0.05


class Alone:
    """A coordinator of one replica."""

    def __init__(self) -> None:
        self._group = Group(None, True, (), ["0"], time.monotonic())
        self._lock = threading.Lock()
        self._changes = 0

    def answer(self, what: str, **how: Any) -> Any:
        """The answer to a request of the replica."""
        with self._lock:
            self._group.report(how["report"], time.monotonic())
            while self._group.step(time.monotonic(), {}):
                self._changes += 1
            told = {"reply": self._group.reply(how["report"]), "changes": self._changes}
        return told | {"began": 1, "store": ("", 0), "host": "127.0.0.1"}


def main() -> None:
    run = sys.argv[1]  # its job has the same name
    sockets.Server(sockets.actor_path(run, 0), Alone().answer)
    settings = Settings(*(run, 0, 0, run, NEVER, "outer:1:0", True, "float32", False, False, 3.0))
    rounds = Rounds(settings, print)
    rounds.start(sys.exit)
    while rounds.facts.state != "member":
        time.sleep(LOOK_S)
    print("member", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
