"""Two pid namespaces that share /dev/shm and not the runtime directory, as containers may.

Pids and the lock of a job's name prove nothing there. The kernel's locks on the control segment
do:
two watchdogs never both have a job, and what lives in the other namespace is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support
from shell import Cli, Running, is_running
from support import eventually, live_weights, segments, status
from support.supervised import TOML, VALUES, call, gradient_of, team

from gadei_ps.errors import ControlError
from gadei_ps.job.control import StopJob, ask
from gadei_ps.learners.client import Client
from gadei_ps.memory import holds, presence, shm

ONES = np.ones(VALUES, np.float32)
APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def _why_not() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare(1)"
    done = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return done.stderr.strip()


WHY_NOT = _why_not()
pytestmark = pytest.mark.skipif(
    bool(WHY_NOT), reason=f"this user cannot make a pid namespace: {WHY_NOT}"
)


class Apart:
    """Runs gadei-ps in pid namespaces of their own, with another runtime directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runtime = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
        self._children: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, module: str = "gadei_ps") -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*APART, sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env=os.environ | {"GADEI_PS_RUNTIME_DIR": str(self.runtime)},
        )
        self._children.append(child)
        return child

    def refused(self, *arguments: object) -> str:
        """The one line with which a command fails."""
        child = self.start(*arguments)
        _, output = child.communicate(timeout=support.PATIENCE_S)
        assert child.returncode == 1, output
        assert output.count("\n") == 1, output
        return output

    def socket(self, job: str) -> str:
        return str(self.runtime / f"{job}.sock")

    def close(self) -> None:
        """Kill all of them: with its first process a namespace ends."""
        for child in self._children:
            child.kill()
            child.communicate()
        shutil.rmtree(self.runtime)


@pytest.fixture
def apart(cli: Cli) -> Iterator[Apart]:
    made = Apart(cli.directory)
    yield made
    made.close()


def names_of(job: str) -> set[str]:
    return {name for name in segments(job) if f".{job}." in name}


def test_a_job_that_lives_elsewhere_is_left_alone(cli: Cli, apart: Apart, job_name: str) -> None:
    """Whichever of its processes live, down to one learner; once all are dead, it is adopted."""
    file = f"{job_name}.toml"
    watchdog = cli.serve(job_name, "standby = false\n" + TOML)
    with team(job_name, 1) as (child,):
        pushed = 0

        def push() -> None:
            nonlocal pushed
            call(child, "push", gradient_of(ONES))
            assert call(child, "wait_applied") is None
            pushed += 1
            assert status(job_name)["version"] == pushed if is_running(job_name) else True
            np.testing.assert_array_equal(live_weights(job_name)[:VALUES], -pushed * ONES)

        push()
        server = status(job_name)["server_pid"]
        before = names_of(job_name)

        # All of it lives.
        run = ("run", job_name, "--device", "host", "--", "true")
        for arguments in (("serve", file), ("serve", "--fresh", file), run):
            assert "running elsewhere" in apart.refused(*arguments), arguments
        for command in ("status", "stop"):
            assert "running elsewhere" in apart.refused(command, job_name)
        listed = apart.start("ls", "--json").communicate(timeout=support.PATIENCE_S)[0]
        (job,) = (one for one in json.loads(listed)["jobs"] if one["name"] == job_name)
        assert (job["state"], job["watchdog_pid"]) == ("elsewhere", None)
        collected = apart.start("gc", job_name)
        assert collected.communicate(timeout=support.PATIENCE_S)[0] == "nothing to remove\n"
        push()

        # Its server and its learner live.
        watchdog.signal(signal.SIGKILL)
        for flags in ((), ("--fresh",)):
            assert "running elsewhere" in apart.refused("serve", *flags, file)
        push()

        # Its learner lives.
        os.kill(server, signal.SIGKILL)
        eventually(lambda: not presence.living(job_name).anyone)
        assert "learner 0" in apart.refused("serve", file)
        assert names_of(job_name) == before
        child.kill()

    # Nothing of it lives.
    served = apart.start("serve", file)
    eventually(
        lambda: presence.living(job_name).watchdog and is_running(apart.socket(job_name)),
        what=lambda: served.poll(),
    )
    assert status(apart.socket(job_name))["version"] == pushed
    assert presence.living(job_name).elsewhere
    # And we are elsewhere now.
    assert "running elsewhere" in cli("serve", file).error
    assert not cli("gc", job_name, "--json").json["removed"]
    with pytest.raises(ControlError, match="does not see; learners must share the watchdog's pid"):
        Client(apart.socket(job_name))
    assert ask(apart.socket(job_name), StopJob())["gradients_applied"] == pushed
    assert served.wait(support.PATIENCE_S) == 0
    assert not names_of(job_name)


def test_of_two_that_start_at_once_one_serves(cli: Cli, job_name: str, tmp_path: Path) -> None:
    file = cli.directory / f"{job_name}.toml"
    file.write_text("standby = false\n" + TOML)
    two = [Apart(cli.directory), Apart(cli.directory)]
    try:
        children = [one.start("serve", file.name) for one in two]
        eventually(
            lambda: any(is_running(one.socket(job_name)) for one in two),
            what=lambda: [child.poll() is not None and child.communicate() for child in children],
        )
        eventually(lambda: any(child.poll() is not None for child in children))
        loser = next(n for n, child in enumerate(children) if child.poll() is not None)
        output = children[loser].communicate()[1]
        # The last: the other one is just making the job's memory.
        refused = ("running elsewhere", "just been started", "in use", "another start is at work")
        assert any(one in output for one in refused), output
        assert output.count("\n") == 1
        ask(two[1 - loser].socket(job_name), StopJob())
        assert children[1 - loser].wait(support.PATIENCE_S) == 0
    finally:
        for one in two:
            one.close()


def test_a_learner_of_a_deeper_namespace_is_refused_at_once(
    cli: Cli, apart: Apart, job_name: str
) -> None:
    """It would see neither server nor watchdog, and take them for dead."""
    cli.serve(job_name, TOML)
    script = f"from gadei_ps.learners.client import Client; Client({str(runtime(job_name))!r})"
    done = subprocess.run(
        [*APART, sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "ControlError: the watchdog cannot watch process" in done.stderr
    assert "must share the watchdog's pid namespace" in done.stderr
    assert not status(job_name)["learners"]


def runtime(job: str) -> Path:
    from gadei_ps.job import paths

    return paths.socket_path(job)


def test_the_locks_end_with_their_processes(cli: Cli, job_name: str) -> None:
    watchdog: Running = cli.serve(job_name, TOML)

    def held() -> list[bool]:
        fd = shm.open_segment(shm.segment_name(job_name, "control"), writable=False)
        try:
            return [holds.held(fd, byte) for byte in (holds.WATCHDOG, *holds.SERVERS)]
        finally:
            os.close(fd)

    server = status(job_name)["server_pid"]
    assert held() == [True, True, False]
    watchdog.signal(signal.SIGKILL)
    assert held() == [False, True, False], "the server has not inherited it"
    os.kill(server, signal.SIGKILL)
    eventually(lambda: held() == [False, False, False])
