"""The watchdog process: makes the job's memory, starts the parameter server, answers requests.

One thread, one selector: the control socket, a pidfd for each process it looks after, and a timer.
It never waits for any of them. Death is told by the kernel, through the pidfd.

    startup     lock the job's name, remove what a dead job left, make control, start the server
    main_loop   until a stop is asked for and done, or the server dies
    shutdown    end the server, remove sockets and segments
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from gadei_ps import _native, control, layout, log, process, runtime, sync, weights
from gadei_ps.config import JobConfig
from gadei_ps.control import Attach, Detach, Offer, SetWork, Status, StopJob
from gadei_ps.errors import (
    ControlError,
    GadeiError,
    JobFailed,
    JobInUse,
    JobStopped,
    ModelMismatch,
    NoSharedMemory,
    UsageError,
)
from gadei_ps.layout import Phase, Role, Stop, Work
from gadei_ps.watchdog import status
from gadei_ps.watchdog.memory import JobMemory, clear_stale
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.sockets import Client, ControlServer, failure

TICK_S = 0.1
BUSY_TICK_S = 0.002  # while a learner's leaving or a stop is under way
READY_TIMEOUT_S = 180.0  # the first start on a machine compiles the kernels
LEAVE_TIMEOUT_S = 10.0
NOW_S = 1.0  # what learners get to leave by themselves when a stop does not drain
SERVER_EXIT_S = 5.0


@dataclass
class Stopping:
    """A stop under way."""

    until: float
    waiting: list[Client]


class Supervisor:
    """One job's watchdog."""

    def __init__(
        self,
        config: JobConfig,
        *,
        verbose: bool = False,
        quiet: bool = False,
        as_json: bool = False,
    ) -> None:
        self.config = config
        self.memory = JobMemory(config)
        self.sync = sync.parse(config.sync)
        flags = {"--verbose": verbose, "--quiet": quiet, "--json": as_json}
        self._server_flags = [flag for flag, given in flags.items() if given]
        self._log = log.get(job=config.name)
        self._selector = selectors.DefaultSelector()
        self._sockets: ControlServer | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._roster = Roster(self.memory, self._selector, self._log)
        self._stopping: Stopping | None = None
        self._failed = ""
        self._signalled = False
        self._expire_at = 0.0

    @property
    def _control(self) -> np.void:
        return self.memory.control.view(layout.CONTROL)

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> int:
        """The whole life of the job; returns the exit code."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _: os.read(wake_read, 64))
        try:
            self.startup()
            return self.main_loop()
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
        for name in clear_stale(self.config.name):
            self._log.warning("removed a dead job's segment", segment=name[1:])
        self.memory.create_control(self.sync)
        self._start_server()
        self._make_configured_model()
        self._wait_until_serving()
        path = runtime.socket_path(self.config.name)
        self._sockets = ControlServer(path, self._selector, self._handle)
        self._log.info("ready", socket=str(path), pid=os.getpid(), sync=str(self.sync))

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

    def _start_server(self) -> None:
        command = [sys.executable, "-m", "gadei_ps.server", self.config.name, str(self.sync)]
        # The server writes the log to stderr: stdout belongs to the command's result.
        self._server = process.spawn(command + self._server_flags, stdout=2)
        fd = os.pidfd_open(self._server.pid)
        self._selector.register(fd, selectors.EVENT_READ, lambda _: self._server_died(fd))

    def _make_configured_model(self) -> None:
        if self.config.weights is not None:
            # Imported here: only jobs that name a file pay for it.
            from safetensors.numpy import load_file

            try:
                arrays = load_file(self.config.weights)
            except Exception as error:
                raise UsageError(f"{self.config.weights}: {error}") from None
            missing = set(self.config.buffers) - arrays.keys()
            if missing:
                raise UsageError(f"{self.config.weights} has no tensor {min(missing)!r} (buffers)")
            model = weights.place(
                weights.Tensor(
                    name,
                    array.shape,
                    Role.BUFFER if name in self.config.buffers else Role.PARAMETER,
                )
                for name, array in arrays.items()
            )
            self._create_model(model, model.flatten(arrays))
        elif self.config.tensors:
            model = weights.place(
                weights.Tensor(one.name, tuple(one.shape), Role[one.role.upper()])
                for one in self.config.tensors
            )
            # Takes no memory, so that a model too large is an error of /dev/shm.
            self._create_model(model, np.broadcast_to(np.float32(0), (model.elements,)))

    def _create_model(self, model: weights.Model, values: np.ndarray) -> None:
        self.memory.create_model(model, values)
        self._control["model_ready"] = 1
        self.memory.ring_bells()
        self._log.info("model", tensors=len(model.tensors), values=model.values)

    def _wait_until_serving(self) -> None:
        until = time.monotonic() + READY_TIMEOUT_S
        told = time.monotonic() + 3.0
        while not int(self._control["lease_state"]):
            self._poll(0.01)
            if self._failed:
                raise JobFailed(self._failed)
            if self._signalled:
                raise JobStopped("stopped before the job was ready")
            now = time.monotonic()
            if now > until:
                raise JobFailed("the parameter server did not get ready; see its messages above")
            if told and now > told:
                self._log.info("compiling the kernels; later starts take them from the cache")
                told = 0.0
        self._control["phase"] = Phase.SERVING

    def main_loop(self) -> int:
        """Returns 0 after a stop that was asked for, 1 after a failure."""
        while True:
            busy = self._stopping is not None or self._roster.leaving
            self._poll(BUSY_TICK_S if busy else TICK_S)
            self._roster.free_rows()
            if self._signalled and self._stopping is None:
                self._begin_stop(drain=True, timeout_s=LEAVE_TIMEOUT_S)
            if self._failed:
                self._log.error("the job has failed", reason=self._failed)
                return 1
            if self._stopping is not None and self._stopped():
                return 0
            if self._sockets is not None and time.monotonic() > self._expire_at:
                self._sockets.expire()
                self._expire_at = time.monotonic() + 1.0

    def _poll(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)

    def shutdown(self) -> None:
        """Ends the server, answers who waits, and removes all that is the job's."""
        made = hasattr(self.memory, "control")
        if made:
            # In this order: a learner that sees the stop sees also why.
            self._control["phase"] = Phase.FAILED if self._failed else Phase.STOPPED
            _native.store32(
                self.memory.control.address + layout.offset(layout.CONTROL, "stop"), Stop.NOW
            )
            self.memory.ring_bells()
        if self._server is not None:
            self._end_server()
        if self._sockets is not None:
            if self._stopping is not None:
                final = failure(JobFailed(self._failed)) if self._failed else self._report()
                for client in self._stopping.waiting:
                    self._sockets.reply(client, final)
            self._sockets.shut_down()
        self._roster.close()
        if made:
            self.memory.remove()
        if self._lock is not None:
            # Removed while locked: whoever opened it before sees that the name is gone or free.
            runtime.lock_path(self.config.name).unlink(missing_ok=True)
            os.close(self._lock)
        self._selector.close()
        if made:
            self._log.info("stopped")

    def _end_server(self) -> None:
        assert self._server is not None
        self._server.terminate()
        try:
            self._server.wait(SERVER_EXIT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    # -- processes ----------------------------------------------------------------------------

    def _server_died(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        assert self._server is not None
        code = self._server.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._failed = f"the parameter server (pid {self._server.pid}) ended {how}"
        self._control["lease_state"] = 0

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

    def _stopped(self) -> bool:
        assert self._stopping is not None
        if not self.memory.rings:
            return True
        if time.monotonic() > self._stopping.until:
            if self._roster.rows:
                self._log.warning("learners still attached", rows=self._roster.rows)
            return True
        return False

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
            case SetWork():
                return self._set_work(request)
            case StopJob():
                self._begin_stop(request.drain, request.timeout_s)
                assert self._stopping is not None
                self._stopping.waiting.append(client)
                return None

    def _report(self) -> dict[str, Any]:
        report = status.report(self.memory, str(self.sync))
        if self._server is not None:
            with contextlib.suppress(psutil.Error):
                memory = psutil.Process(self._server.pid).memory_info()
                report["server_private_bytes"] = memory.rss - memory.shared
        return report

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
        model = weights.place(offered)
        if not client.fds:
            raise ControlError("an offer comes with a file of initial values")
        self._create_model(model, _read_values(client.fds[0], model))
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
        control_["batches"], control_["epochs"], control_["seed"] = wanted
        control_["next"] = 0
        control_["epochs_done"] = 0
        address = self.memory.control.address + layout.offset(layout.CONTROL, "work")
        _native.store32(address, Work.WORKING)
        self.memory.ring_bells()
        return {"set": True}


def _read_values(fd: int, model: weights.Model) -> np.ndarray:
    """Initial values from a learner's file; read, not mapped, so that it cannot shrink below us."""
    size = os.fstat(fd).st_size
    if size != model.elements * 4:
        raise ControlError(f"initial values: a file of {size} bytes, not {model.elements * 4}")
    try:
        values = np.empty(model.elements, np.float32)
    except MemoryError:
        raise NoSharedMemory(f"no memory for a model of {model.elements * 4 >> 20} MiB") from None
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


def serve(
    config: JobConfig, *, verbose: bool = False, quiet: bool = False, as_json: bool = False
) -> int:
    """Runs a job's watchdog in this process until it is stopped; returns the exit code."""
    supervisor = Supervisor(config, verbose=verbose, quiet=quiet, as_json=as_json)
    try:
        return supervisor.run()
    except GadeiError as error:
        if isinstance(error, JobStopped):
            return 0
        raise
