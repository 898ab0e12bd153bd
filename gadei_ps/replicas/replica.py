"""`python -m gadei_ps.replicas.replica`: one replica of a run: its job, its learners, its rounds.

Its settings come as JSON on standard input. The process that was started ends once the replica has
begun, or with one line on standard error. The replica continues in a session of its own: neither
the end of Ray nor that of a terminal ends it. Its output goes to its log.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from gadei_ps.commands import daemon, jobs
from gadei_ps.commands.run import RunOptions, run_learners
from gadei_ps.errors import GadeiError, JobInUse, JobNotFound, in_words
from gadei_ps.machine import interrupts, process
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.replicas import config, sockets
from gadei_ps.replicas.program import Program, opened
from gadei_ps.replicas.rounds import Rounds

BEFORE_S = 30.0
"""A job of this name that a killed process has left ends in this time; another one is joined."""
LEAVE_S = 30.0
"""Time limit until the group continues without a replica that leaves (s)."""
STOP_S = 1.0
ANSWERED_S = 2.0
"""Time limit until the actor knows how the replica has ended (s)."""
STAY_S = 300.0
"""Time limit until a command that follows the run has the weights at its end (s)."""
LOOK_S = 0.1
TAIL_BYTES = 4096
_OURS = re.compile(r"gadei-ps: |replica: |\d\d:\d\d:\d\d \[")
"""Lines of a log that learners have not printed."""
_ASKED = {"leave": "leaving", "stop": "stopping"}
NUMBER_VARIABLE = "GADEI_PS_MACHINE"
COUNT_VARIABLE = "GADEI_PS_MACHINES"


@dataclass(frozen=True)
class Settings:
    """Settings of one replica.

    run: settings of the run, as in GROUPS.toml. number, group: of the replica. command: of a
    learner, which runs in this directory. program: a Program instead of it, whose data are at this
    path. log: file of the output.
    """

    run: dict[str, Any]
    number: int
    group: int
    command: list[str]
    directory: str
    log: str
    program: dict[str, Any] | None
    data: str


class Replica:
    """The process of one replica, from its start to the end of its learners."""

    def __init__(self, settings: Settings) -> None:
        """Lock the replica. Raises JobInUse if another process has it; UsageError without data."""
        self.settings = settings
        self._program = Program(**settings.program) if settings.program is not None else None
        self._data = "" if self._program is None else opened(settings.data)
        run, number = config.from_mapping(settings.run, "run"), settings.number
        self._run, self._job = run, config.job_name(run.name, number)
        self._lock = sockets.replica_lock(run.name, number)
        self._rounds = Rounds(run, number, settings.group, self._job, _log)
        self._asked = ""
        self._error: str | None = None
        """Reason why the replica cannot continue."""
        self._is_seen = self._is_ending = False
        self._stays_until: float | None = None
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._summary: dict[str, Any] = {"exit_code": 1}
        self._server = sockets.Server(sockets.replica_path(run.name, number), self.answer)

    def run(self) -> None:
        """Train until the learners end, or until a request to end. For the main thread."""
        self._rounds.start(self._fail)
        try:
            self._summary = self._train()
        except Interrupted as interrupted:
            name = process.signal_name(interrupted.number)
            self._summary = {"exit_code": 128 + interrupted.number, "interrupted": name}
        except (GadeiError, OSError, MemoryError) as error:
            code = error.exit_code if isinstance(error, GadeiError) else 1
            self._summary = {"exit_code": code, "error": in_words(error)}
            print(f"gadei-ps: {in_words(error)}", file=sys.stderr, flush=True)
        finally:
            # A stop that comes now, or twice, interrupts nothing any more.
            with contextlib.suppress(Interrupted), interrupts.held():
                self._is_ending = True
                self._close()

    def _close(self) -> None:
        """Report how the replica has ended, and leave nothing."""
        self._rounds.end()
        if self._asked:
            self._summary |= {"exit_code": 0, "asked": self._asked, "interrupted": None}
        elif self._error is not None:
            self._summary |= {"exit_code": 1, "error": self._error, "interrupted": None}
        elif self._summary["exit_code"] and "error" not in self._summary:
            killed = _killed(self._summary)
            failed = any(one["exit_code"] for one in self._summary.get("ended", ()))
            self._summary |= {"reason": killed or _last_line(self.settings.log, theirs=failed)}
        self._summary |= {"log": self.settings.log}
        self._ended.set()
        self._answered.wait(ANSWERED_S)
        self._server.close()
        self._lock.release()

    def _train(self) -> dict[str, Any]:
        run, job = self._run, self._job
        os.environ[NUMBER_VARIABLE] = str(self.settings.number)
        os.environ[COUNT_VARIABLE] = str(run.machines)
        command = self.settings.command
        joined = RunOptions(run.learners, run.restart, join=True, survives=False)
        if self._program is not None:
            command = self._program.command(self._data)
            joined = replace(joined, device=self._program.device, stays=self._stays)
        options = replace(joined, overrides=run.overrides(), join=False)
        until = time.monotonic() + BEFORE_S
        while not (self._asked or self._error):
            there = daemon.running(job)
            late = time.monotonic() > until
            try:
                if not there or late:
                    return run_learners(job, command, joined if there else options)
            except JobInUse:
                if late:
                    raise
            interrupts.check()
            time.sleep(LOOK_S)
        return {"exit_code": 0}  # it was to end while the job of a killed process ended

    def _stays(self) -> bool:
        """Return whether the job stays after its learners have ended successfully."""
        self._stays_until = self._stays_until or time.monotonic() + STAY_S
        return not (self._asked or self._error) and time.monotonic() < self._stays_until

    # -- requests, in threads of their own -------------------------------------------------------

    def answer(self, what: str, **how: Any) -> Any:
        """Return the answer to a request."""
        if what == "status":
            return self.facts()
        if what == "settings":
            return asdict(self.settings) | {"data": self._data, "version": self._rounds.version}
        if what == "await":
            self._ended.wait()
            threading.Timer(LOOK_S, self._answered.set).start()
            return {"summary": self._summary, "pid": os.getpid()}
        if what == "signal":
            os.kill(os.getpid(), how["signal"])
        elif what in ("leave", "stop"):
            if what != self._asked:  # it is asked again where the first time may be lost
                self._asked = what
                threading.Thread(target=self._end, args=(what,), name=what, daemon=True).start()
        else:
            raise GadeiError(f"unknown request {what!r}")
        return None

    def _fail(self, why: str) -> None:
        """End the replica, which cannot be a member of its group."""
        self._error = why
        threading.Thread(target=self._end, args=("stop",), name="fail", daemon=True).start()

    def _end(self, what: str) -> None:
        """End the exchanges, then the job, and with it the learners."""
        try:
            if what == "leave":
                self._rounds.leave(LEAVE_S)
            self._rounds.end()
            jobs.stop(self._job, drain=False, timeout_s=STOP_S)
        except JobNotFound:
            os.kill(os.getpid(), signal.SIGTERM)  # it is not there yet
        except (GadeiError, OSError) as error:
            os.kill(os.getpid(), signal.SIGTERM)
            print(f"gadei-ps: {in_words(error)}", file=sys.stderr, flush=True)

    def facts(self) -> dict[str, Any]:
        """Return the status of the replica."""
        settings = self.settings
        # First, so that the job has at least these rounds.
        exchange = self._rounds.facts.as_dict()
        state = "trained" if self._stays_until else "training"
        job = None
        try:
            job = jobs.status(self._job)
            self._is_seen = True
        except (GadeiError, OSError):  # also for a moment while another watchdog adopts the job
            state = state if self._is_seen else "starting"
        if self._is_ending or (job and job["phase"] == "draining"):
            state = "ending"
        return {
            "run": self._run.name,
            "machine": settings.number,
            "group": settings.group,
            "pid": os.getpid(),
            "state": _ASKED.get(self._asked, state),
            "log": settings.log,
            "exchange": exchange,
            "job": job,
        }


def _log(line: str) -> None:
    print(f"replica: {line}", file=sys.stderr, flush=True)


class _Log(io.RawIOBase):
    """Standard output and error: what a full disk has no room for is lost, and nothing else."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            os.write(2, data)
        return len(data)


def _killed(summary: dict[str, Any]) -> str:
    """Describe a learner that was killed, and therefore printed no error; empty if none was."""
    for one in summary.get("ended", ()):
        if one["exit_code"] < 0:
            how = process.signal_name(-one["exit_code"])
            return f"learner {one['learner']} was killed by {how}"
    return ""


def _last_line(log: str, *, theirs: bool) -> str:
    """Return the last line of learners, or of `run`, which knows why none has trained."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    if theirs:
        found = [one for one in lines if one.strip() and not _OURS.match(one)]
    else:
        found = [one.removeprefix("gadei-ps: ") for one in lines if one.startswith("gadei-ps: ")]
    return found[-1].strip()[:300] if found else ""


def main() -> None:
    """Become the replica, in a session of its own, and report when it has begun."""
    raw = sys.stdin.read()
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        with os.fdopen(ours, "rb") as stream:
            error = stream.read().decode()
        if error != "begun":
            print(error or "gadei-ps: the replica has ended", file=sys.stderr)
        sys.stderr.flush()
        os._exit(0 if error == "begun" else 1)
    os.close(ours)
    os.setsid()
    with contextlib.suppress(PermissionError):  # Ray lowers the priority of its workers
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    try:
        settings = Settings(**json.loads(raw))
        log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's threads block SIGINT
        interrupts.install()
        replica = Replica(settings)
    except (GadeiError, OSError) as error:
        os.write(theirs, f"gadei-ps: {in_words(error)}".encode())
        os._exit(1)
    os.write(theirs, b"begun")
    os.close(theirs)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout = sys.stderr = io.TextIOWrapper(_Log(), write_through=True)
    replica.run()


if __name__ == "__main__":
    main()
