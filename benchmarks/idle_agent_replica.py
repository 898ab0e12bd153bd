"""A replica of `bench idle_agent`, alone in its group: python -m ... JOB

Its coordinator is in the same process, in the place of an actor of Ray. It prints a line once the
replica is a member of its group.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from gadei_ps.groups.coordinator import Group
from gadei_ps.replicas import config, sockets
from gadei_ps.replicas.rounds import Rounds

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
        return told | {"began": 1, "host": "127.0.0.1"}


def main() -> None:
    name = f"idle-{os.getpid()}"
    values = {"name": name, "every": NEVER, "rule": "outer:1:0", "groups": [{"machines": 1}]}
    sockets.Server(sockets.actor_path(name, 0), Alone().answer)
    rounds = Rounds(config.from_mapping(values, "run"), 0, 0, sys.argv[1], print)
    rounds.start(sys.exit)
    while rounds.facts.state != "member":
        time.sleep(LOOK_S)
    print("member", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
