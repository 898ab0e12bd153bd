"""The watchdog process: owns the job's memory, supervises its processes, answers requests.

One thread, one selector: the control socket, a pidfd for each process it looks after, and a timer.
It never waits for any of them. Death is told by the kernel, through the pidfd. Servers and learners
live on when it dies; the next watchdog of the job adopts them.

    startup     lock the job's name, adopt what lives or begin anew, start the servers
    main_loop   until a stop is asked for and done, or there is no use in going on
    shutdown    end the servers, remove sockets and segments
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import selectors
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gadei_ps import _native, sync
from gadei_ps.errors import (
    CheckpointError,
    ControlError,
    GadeiError,
    JobFailed,
    JobInUse,
    JobStopped,
    ModelMismatch,
    NoSharedMemory,
)
from gadei_ps.job import control, modes
from gadei_ps.job import paths as runtime
from gadei_ps.job.config import JobConfig, check_room
from gadei_ps.job.control import (
    Attach,
    Checkpoint,
    Detach,
    Offer,
    SetSync,
    SetWork,
    Status,
    StopJob,
)
from gadei_ps.machine import log
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import Phase, Role, Stop, Work
from gadei_ps.watchdog import model, status
from gadei_ps.watchdog.checkpoints import Checkpoints
from gadei_ps.watchdog.learners import JobLearners
from gadei_ps.watchdog.liveness import Start
from gadei_ps.watchdog.memory import JobMemory, clear_dead
from gadei_ps.watchdog.model import First
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.sockets import Client, ControlServer, failure

TICK_S = 0.1
BUSY_TICK_S = 0.002  # while a learner's leaving or a stop is under way
FILES = 4096
SLOW_TICK_S = 1.0  # for what may be seen a second late
START_SILENT_S = 180.0  # how long a start may go without progress
TELL_S = 15.0  # between two lines on a start that takes long
LEAVE_TIMEOUT_S = 10.0
NOW_S = 1.0  # what learners get to leave by themselves when a stop does not drain
SAVE_S = 600.0  # for the last checkpoint; a disk that blocks must not keep the job for ever
ENDING_S = 15.0  # for what comes after that


@dataclass
class Stopping:
    """A stop under way."""

    until: float
    waiting: list[Client]
    saving_until: float = 0.0
    saved: bool = False
    problem: str = ""  # why there is no last checkpoint


@dataclass(frozen=True)
class Options:
    """How a watchdog is started.

    fresh: what a dead watchdog has left in memory, and checkpoints, are not used. resume: whether
    checkpoints are looked for; a job that does not is a command's own. checkpoint: to go on from
    instead of what is in memory. quiet, verbose, as_json: of the servers' log. start_silent_s: how
    long the start may make no progress.
    """

    fresh: bool = False
    resume: bool = True
    checkpoint: Path | None = None
    verbose: bool = False
    quiet: bool = False
    as_json: bool = False
    start_silent_s: float = START_SILENT_S

    @property
    def flags(self) -> list[str]:
        given = {"--verbose": self.verbose, "--quiet": self.quiet, "--json": self.as_json}
        return [flag for flag, wanted in given.items() if wanted]


class Supervisor:
    """One job's watchdog."""

    def __init__(
        self, config: JobConfig, options: Options | None = None, notify: Notify | None = None
    ) -> None:
        self.config = config
        self.options = options or Options()
        self.memory = JobMemory(config)
        self._notify = notify or Notify()
        self._log = log.get(job=config.name)
        self._selector = selectors.DefaultSelector()
        self._sockets: ControlServer | None = None
        self._lock: int | None = None
        self._roster = Roster(self.memory, self._selector, self._log, config.learner_timeout_s)
        self._servers = Servers(
            self.memory,
            self._selector,
            self._log,
            self.options.flags,
            config.hang_s,
            config.orphan_s,
            self._fail,
        )
        self._checkpoints = Checkpoints(self.memory, self._selector, self._log)
        self._learners: JobLearners | None = None
        self._stopping: Stopping | None = None
        self._failed = ""
        self._begun = False
        self._leave = False  # servers, learners and memory go on without us
        self._keep = False  # the memory does
        self._signalled = False
        self._had_learners = False
        self._names_lost = False
        self._slow_at = 0.0
        self._rate = (0.0, 0)

    @property
    def _control(self) -> np.void:
        return self.memory.control.view(layout.CONTROL)

    @property
    def _sync(self) -> str:
        """The synchronization model in force."""
        return modes.text(self.memory.control, modes.done(self.memory.control))

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> int:
        """The whole life of the job; returns the exit code."""
        _allow_files()
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _: os.read(wake_read, 64))
        try:
            self.startup()
            self._begun = True
            return self.main_loop()
        except JobStopped:
            self._keep = self.memory.adopted  # for the next serve; it was not ours for a moment
            raise
        except BaseException:
            # A mistake of ours, or a machine out of memory, must not cost the job: whoever serves
            # it next finds it as it is.
            self._leave = self._begun or self.memory.adopted
            raise
        finally:
            self.shutdown()
            signal.set_wakeup_fd(previous)
            os.close(wake_read)
            os.close(wake_write)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def startup(self) -> None:
        """Raises GadeiError when the job cannot be started; shutdown() then cleans up."""
        self._take_lock()
        anew = self.options.fresh or self.options.checkpoint is not None
        if not anew:
            self.memory.adopt()
        stop = Stop.GO
        if self.memory.adopted:
            stop = Stop(int(self._control["stop"]))
            self._servers.adopt()
            self._roster.adopt()
        else:
            for name in clear_dead(self.config.name):
                self._log.warning("removed a dead job's segment", segment=name[1:])
            self.memory.create_control(sync.parse(self.config.sync))
            self._control["temporary"] = not self.options.resume
            self._make_first_model()
        self._wait_until_serving()
        path = runtime.socket_path(self.config.name)
        self._sockets = ControlServer(path, self._selector, self._handle)
        if self.config.learners is not None:
            self._learners = JobLearners(self.config.learners, self.memory, str(path), self._log)
            if self.memory.adopted:
                self._learners.adopt()
        self._notify.ready()
        self._log.info(
            "adopted" if self.memory.adopted else "ready",
            socket=str(path),
            pid=os.getpid(),
            sync=self._sync,
            version=int(self._control["version"]),
        )
        if self._sync != str(sync.parse(self.config.sync)):
            self._log.warning(
                "the job keeps the synchronization model that it has; gadei-ps set changes it",
                sync=self._sync,
                file=str(sync.parse(self.config.sync)),
            )
        if stop != Stop.GO:
            self._log.warning("finishing the stop that another watchdog had begun")
            self._begin_stop(drain=stop == Stop.DRAIN, timeout_s=LEAVE_TIMEOUT_S)

    def _take_lock(self) -> None:
        path = runtime.lock_path(self.config.name)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise JobInUse(
                    f"job {self.config.name!r} is running already; choose another name, or stop "
                    f"it: gadei-ps stop {self.config.name}"
                ) from None
            # Whoever held it before may have removed the file since we opened it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.stat()):
                    break
            os.close(fd)
        self._lock = fd

    def _make_first_model(self) -> None:
        """From a checkpoint, from the job file, or not yet: then the first learner brings it."""
        first = None
        if self.options.resume and not self.options.fresh:
            first = model.from_checkpoint(self.config, self.options.checkpoint, self._log)
        first = first or model.configured(self.config)
        if first is not None:
            self._create_model(first)

    def _create_model(self, first: First) -> None:
        self.memory.create_model(first.model, first.values, first.snapshot)
        self._control["model_ready"] = 1
        self.memory.ring_bells()
        self._log.info("model", tensors=len(first.model.tensors), values=first.model.values)

    def _wait_until_serving(self) -> None:
        start = Start(self.options.start_silent_s)
        tell_at = time.monotonic() + TELL_S
        while not self._servers.serving or not int(self._control["lease_state"]):
            now = time.monotonic()
            self._servers.look(now)
            self._poll(0.01)
            if self._failed:
                raise JobFailed(self._failed)
            if self._signalled:
                raise JobStopped("stopped before the job was ready")
            if start.hangs(now, self._servers.cpu_s()):
                raise JobFailed(
                    "the parameter server did not get ready: it made no progress for "
                    f"{start.silent_s:g} s; see its messages above"
                )
            if now >= tell_at:
                tell_at = now + TELL_S
                # A warning, so that commands that log no more than that show it.
                self._log.warning(
                    "still starting: the first start on a machine compiles the kernels, which "
                    "takes a minute of processor time or two",
                    processor_s=round(start.cpu_s),
                )
                self._notify.starting(start.silent_s + TELL_S)
            self._notify.watchdog()
        self._control["phase"] = Phase.SERVING

    def main_loop(self) -> int:
        """Returns 0 after a stop that was asked for, 1 after a failure."""
        while True:
            stopping = self._stopping is not None and not self._stopping.saving_until
            busy = stopping or self._roster.leaving
            self._poll(BUSY_TICK_S if busy else TICK_S)
            now = time.monotonic()
            self._roster.free_rows()
            if self._signalled and self._stopping is None:
                self._begin_stop(drain=True, timeout_s=LEAVE_TIMEOUT_S)
            self._servers.look(now)
            if self._learners is not None:
                self._learners.look(now, self._stopping is not None)
            if self._failed:
                self._log.error("the job has failed", reason=self._failed)
                return 1
            if self._stopping is not None and self._stopped(now):
                if self._stopping.problem:
                    self._log.error("stopped", reason=self._without_checkpoint())
                return 1 if self._stopping.problem else 0
            if now >= self._slow_at:
                self._slow_at = now + SLOW_TICK_S
                self._look_around(now)
            self._notify.watchdog()

    def _look_around(self, now: float) -> None:
        """What need not be seen at once."""
        if self._sockets is not None:
            self._sockets.expire()
        self._roster.kill_hung(now)
        if self._stopping is None:
            self._checkpoints.look(now)
        self._had_learners = self._had_learners or bool(self._roster.rows)
        if self._is_idle() and self._stopping is None:
            self._log.info("the last learner has left: stopping")
            self._begin_stop(drain=True, timeout_s=LEAVE_TIMEOUT_S)
        lost = self.memory.names_lost()
        if lost and not self._names_lost:
            self._names_lost = True
            self._log.error(
                "segments have lost their names: what runs goes on, but no learner or server can "
                "be added; stop the job, and serve it again from its last checkpoint. Did logind "
                "remove them (RemoveIPC)? gadei-ps doctor tells",
                segment=lost[0][1:],
            )
        self._tell_status(now)

    def _is_idle(self) -> bool:
        """Whether the last learner has left and the job shall not wait for another."""
        if self.config.when_idle != "stop" or self._roster.rows or self._roster.leaving:
            return False
        if self._learners is not None:
            return self._learners.over
        return self._had_learners

    def _tell_status(self, now: float) -> None:
        if not self._notify.enabled:
            return
        version = int(self._control["version"])
        since, before = self._rate
        self._rate = (now, version)
        rate = (version - before) / (now - since) if since else 0.0
        count = len(self._roster.rows)
        self._notify.status(
            f"{count} learner{'' if count == 1 else 's'}, version {version}, {rate:.0f}/s"
        )

    def _fail(self, why: str) -> None:
        self._failed = why

    def _poll(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)

    def shutdown(self) -> None:
        """Ends the servers, answers who waits, and removes all that is the job's.

        But for the memory of a job whose last checkpoint failed: it holds what that would have.
        """
        made = hasattr(self.memory, "control") and not (self._leave or self._keep)
        unsaved = self._stopping is not None and bool(self._stopping.problem)
        if made:
            phase = Phase.KEPT if unsaved else Phase.STOPPED
            # In this order: a learner that sees the stop sees also why.
            self._control["phase"] = Phase.FAILED if self._failed else phase
            _native.store32(
                self.memory.control.address + layout.offset(layout.CONTROL, "stop"), Stop.NOW
            )
            self.memory.ring_bells()
        if self._learners is not None and not self._leave:
            self._learners.end()
        self._checkpoints.end()
        if not self._leave:
            self._servers.end()
        if self._sockets is not None:
            if self._stopping is not None:
                final = failure(JobFailed(self._failed)) if self._failed else self._report()
                if self._stopping.problem:
                    final = failure(CheckpointError(self._without_checkpoint()))
                for client in self._stopping.waiting:
                    self._sockets.reply(client, final)
            self._sockets.shut_down()
        self._roster.close()
        # What has lost its names nobody can adopt.
        if made and (int(self._control["phase"]) != Phase.KEPT or self.memory.names_lost()):
            self.memory.remove()
        self.memory.close()
        if self._lock is not None:
            # Removed while locked: whoever opened it before sees that the name is gone or free.
            runtime.lock_path(self.config.name).unlink(missing_ok=True)
            os.close(self._lock)
        self._selector.close()
        self._notify.close()
        if self._begun and made:
            self._log.info("stopped")

    # -- stopping -----------------------------------------------------------------------------

    def _begin_stop(self, drain: bool, timeout_s: float) -> None:
        self._log.info("stopping", drain=drain)
        wanted = Stop.DRAIN if drain else Stop.NOW
        self._control["stop"] = max(wanted, int(self._control["stop"]))
        self._control["phase"] = Phase.DRAINING
        until = time.monotonic() + (timeout_s if drain else NOW_S)
        if self._stopping is None:
            self._stopping = Stopping(until, [])
        self._stopping.until = min(self._stopping.until, until)
        self.memory.ring_bells()
        self._notify.stopping(timeout_s + ENDING_S + (SAVE_S if self._saves_at_the_end else 0.0))

    def _without_checkpoint(self) -> str:
        assert self._stopping is not None
        rest = (
            "its segments have lost their names, so what came after is gone"
            if self._names_lost
            else "what it has learned stays in memory: go on with gadei-ps serve, or drop it with "
            f"gadei-ps gc {self.config.name}"
        )
        return (
            f"job {self.config.name!r} has stopped at version {int(self._control['version'])}, but "
            f"its last checkpoint failed: {self._stopping.problem}; the newest is of version "
            f"{int(self._control['checkpoint_version'])}; {rest}"
        )

    @property
    def _saves_at_the_end(self) -> bool:
        wanted = self.config.checkpoint is not None and self.config.checkpoint.on_stop
        return wanted and self.memory.state is not None

    def _stopped(self, now: float) -> bool:
        """Whether nothing is left to wait for: learners, then the last checkpoint."""
        stopping = self._stopping
        assert stopping is not None
        if not stopping.saving_until:
            if self.memory.rings and now <= stopping.until:
                return False
            if self._roster.rows:
                self._log.warning("learners still attached", rows=self._roster.rows)
            stopping.saving_until = now + SAVE_S
            fresh = int(self._control["version"]) != int(self._control["checkpoint_version"])
            if not self._saves_at_the_end or not (fresh or not int(self._control["checkpoints"])):
                return True

            def heard(outcome: dict[str, Any]) -> None:
                stopping.saved = True
                stopping.problem = outcome.get("error", "")

            try:
                self._checkpoints.ask(heard)
            except CheckpointError as error:
                heard({"error": str(error)})
        if not stopping.saved and now > stopping.saving_until:
            stopping.saved, stopping.problem = True, f"the disk took longer than {SAVE_S:.0f} s"
        return stopping.saved

    # -- requests -----------------------------------------------------------------------------

    def _handle(self, client: Client, request: control.Request) -> dict[str, Any] | None:
        match request:
            case Status():
                return self._report()
            case Offer():
                return self._offer(client, request)
            case Attach():
                return self._attach(client, request)
            case Detach():
                return self._detach(client, request)
            case SetSync():
                return self._set_sync(request)
            case SetWork():
                return self._set_work(request)
            case Checkpoint():
                self._checkpoint(client)
                return None
            case StopJob():
                self._begin_stop(request.drain, request.timeout_s)
                assert self._stopping is not None
                self._stopping.waiting.append(client)
                return None

    def _report(self) -> dict[str, Any]:
        report = status.report(self.memory)
        report["server_private_bytes"] = self._servers.private_bytes()
        report["standby_pid"] = self._servers.standby_pid
        report["last_checkpoint"] = self._checkpoints.last or None
        report["names_lost"] = self._names_lost
        report["saves_on_stop"] = self._saves_at_the_end
        return report

    def _checkpoint(self, client: Client) -> None:
        """The reply comes when the checkpoint is on the disk, or is not."""
        self._refuse_when_stopping()

        def heard(outcome: dict[str, Any]) -> None:
            if self._sockets is not None:
                failed = not outcome["ok"]
                error = CheckpointError(outcome.get("error", ""))
                self._sockets.reply(client, failure(error) if failed else outcome)

        self._checkpoints.ask(heard)

    def _refuse_when_stopping(self) -> None:
        if self._stopping is not None:
            raise JobStopped(f"job {self.config.name!r} is stopping")

    def _offer(self, client: Client, request: Offer) -> dict[str, Any]:
        self._refuse_when_stopping()
        offered = [
            weights.Tensor(one.name, tuple(one.shape), Role(one.role)) for one in request.tensors
        ]
        if self.memory.model is not None:
            weights.check_same(self.memory.model, offered)
            return {"made": False}
        placed = weights.place(offered)
        if not client.fds:
            raise ControlError("an offer comes with a file of initial values")
        self._create_model(First(placed, _read_values(client.fds[0], placed)))
        return {"made": True}

    def _attach(self, client: Client, request: Attach) -> dict[str, Any]:
        self._refuse_when_stopping()
        if self.memory.model is None or self.memory.weights is None:
            raise ModelMismatch(
                "the job has no model yet: attach with the model's tensors, "
                "or give tensors in the job file"
            )
        row, generation = self._roster.attach(client.pid, request.name)
        return {
            "job": self.config.name,
            "job_id": self.memory.job_id.hex(),
            "row": row,
            "generation": generation,
            "control": self.memory.control.name,
            "weights": self.memory.weights.name,
            "ring": self.memory.rings[row].name,
        }

    def _detach(self, client: Client, request: Detach) -> dict[str, Any]:
        self._roster.detach(client.pid, request.row, request.generation)
        return {}

    def _set_sync(self, request: SetSync) -> dict[str, Any]:
        self._refuse_when_stopping()
        job = self.config.name
        attached = len(self._roster.rows)
        learners = self.config.learners.count if self.config.learners else attached or None
        try:
            wanted = sync.parse(request.sync)
            wanted.check(learners)
            check_room(wanted)
        except sync.SpecError as error:
            raise ControlError(str(error)) from None
        memory = self.memory.control
        if modes.wanted(memory) != modes.done(memory):
            raise ControlError(
                f"job {job!r} is just changing to "
                f"{modes.text(memory, modes.wanted(memory))}; ask again once it has"
            )
        wave = int(self._control["wave"])
        if int(self._control["work"]) == Work.WORKING and wanted.wave != wave:
            raise ControlError(
                f"the job hands out batches of waves of {wave}, not {wanted.wave}: "
                "that cannot change while it works on them"
            )
        if self.memory.model is None:
            modes.begin(memory, wanted)  # no server has looked at it yet
            return {"changes": True, "sync": str(wanted)}
        # A file may have been written anew.
        if str(wanted) == self._sync and "file" not in wanted.parameters:
            return {"changes": False, "sync": str(wanted)}
        self._log.info("changing the synchronization model", sync=str(wanted))
        modes.ask(memory, wanted)
        self.memory.ring_bells()
        return {"changes": True, "sync": str(wanted)}

    def _set_work(self, request: SetWork) -> dict[str, Any]:
        self._refuse_when_stopping()
        control_ = self._control
        wanted = (request.batches, request.epochs, request.seed)
        if int(control_["work"]) != Work.NONE:
            have = tuple(int(control_[name]) for name in ("batches", "epochs", "seed"))
            if have != wanted:
                raise ControlError(
                    "the job hands out work already: batches, epochs, seed are "
                    f"{have}, not {wanted}"
                )
            return {"set": False}
        memory = self.memory.control
        if modes.wanted(memory) != modes.done(memory):
            coming = sync.parse(modes.text(memory, modes.wanted(memory)))
            if coming.wave != int(control_["wave"]):
                raise ControlError(
                    f"the job is just changing to {coming}, with waves of {coming.wave}; ask again"
                )
        control_["batches"], control_["epochs"], control_["seed"] = wanted
        control_["next"] = 0
        control_["epochs_done"] = 0
        address = self.memory.control.address + layout.offset(layout.CONTROL, "work")
        _native.store32(address, Work.WORKING)
        self.memory.ring_bells()
        return {"set": True}


def _allow_files() -> None:
    """256 learners with their mappings and 512 clients are more than a soft limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _read_values(fd: int, placed: weights.Model) -> np.ndarray:
    """Initial values from a learner's file; read, not mapped, so that it cannot shrink below us."""
    size = os.fstat(fd).st_size
    if size != placed.elements * 4:
        raise ControlError(f"initial values: a file of {size} bytes, not {placed.elements * 4}")
    try:
        values = np.empty(placed.elements, np.float32)
    except MemoryError:
        raise NoSharedMemory(f"no memory for a model of {placed.elements * 4 >> 20} MiB") from None
    view = values.data.cast("B")
    at = 0
    while at < len(view):
        try:
            count = os.preadv(fd, [view[at:]], at)
        except OSError as error:
            raise ControlError(f"initial values: {error.strerror}") from None
        if not count:
            raise ControlError(f"initial values: {at} bytes of {len(view)}")
        at += count
    return values


def serve(config: JobConfig, options: Options | None = None, notify: Notify | None = None) -> int:
    """Runs a job's watchdog in this process until it is stopped; returns the exit code."""
    supervisor = Supervisor(config, options, notify)
    try:
        return supervisor.run()
    except GadeiError as error:
        if isinstance(error, JobStopped):
            return 0
        raise
