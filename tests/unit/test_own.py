"""Learners of a job that a command has started, and those that have done something."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np

from gadei_ps.commands.own import OwnLearners
from gadei_ps.memory.layout import CONTROL

LEARNER = "import os; print(os.getpid(), flush=True); os.execvp('sleep', ['sleep', '1e6'])"


def test_learners_in_sessions_of_their_own() -> None:
    learner = f"s.run([{sys.executable!r}, '-c', {LEARNER!r}], start_new_session=True)"
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess as s; {learner}"], stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        pid = int(launcher.stdout.readline())
        control = np.zeros(1, CONTROL)[0]
        own = OwnLearners(control)
        rows = control["roster"]
        rows["pid"][:2], rows["generation"][:2] = (os.getpid(), pid), (1, 2)
        own.look({launcher.pid})
        assert (own.joined, own.attached, own.others) == (True, 1, 1)
        rows["applied"][0] = 1
        own.look({launcher.pid})
        assert not own.has_applied(launcher.pid), "it is of the other one"
        rows["applied"][1] = 1
        own.look({launcher.pid})
        assert own.has_applied(launcher.pid)
        os.kill(pid, signal.SIGKILL)
