"""The watchdog process: owns the job's memory, supervises its processes, answers requests.

One thread, one selector: the control socket, a pidfd for each process, and a timer. The watchdog
never waits for one of them alone, and segments are made in another thread (worker.py). The kernel
reports deaths through the pidfds. Servers and learners live on when the watchdog dies; the next
watchdog of the job adopts them.

    startup     lock the job's name, adopt what lives or start over, start the servers
    main_loop   until a stop is complete, or the job has failed
    shutdown    end the servers, remove sockets and segments
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from typing import Any

from gadei_ps import _native, sync
from gadei_ps.errors import JobFailed, JobInUse, JobStopped, NotSaved, in_words
from gadei_ps.job import paths, service, sync_change
from gadei_ps.job.config import JobConfig
from gadei_ps.job.lock_file import NameLock, awaited
from gadei_ps.machine import cgroups, log, process
from gadei_ps.memory import layout, presence
from gadei_ps.memory.layout import Kept, Phase, Stop
from gadei_ps.memory.reserve import Progress
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.totals import total
from gadei_ps.show.counts import counted
from gadei_ps.storage import checkpoint
from gadei_ps.watchdog import initial_model
from gadei_ps.watchdog.checkpoints import Checkpoints
from gadei_ps.watchdog.cleanup import clear_dead
from gadei_ps.watchdog.durations import LEAVE_TIMEOUT_S, MONITORS_END_S, STOP_END_S
from gadei_ps.watchdog.history import History
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.learners import JobLearners
from gadei_ps.watchdog.liveness import Start, progress
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.monitors import Monitors
from gadei_ps.watchdog.notify import Notify
from gadei_ps.watchdog.requests import Requests
from gadei_ps.watchdog.roster import Roster
from gadei_ps.watchdog.serve_options import Options
from gadei_ps.watchdog.servers import Servers
from gadei_ps.watchdog.sockets import check_files, remove_dead
from gadei_ps.watchdog.stopping import Stopping
from gadei_ps.watchdog.wanted import Wanted
from gadei_ps.watchdog.worker import Worker

TICK_S = 0.1
BUSY_TICK_S = 0.002  # while a learner's leaving or a stop is under way
SLOW_TICK_S = 1.0  # for what may be seen a second late
START_LOG_INTERVAL_S = 15.0  # between two lines on a start that takes long
PROGRESS_INTERVAL_S = 0.5  # between two notes that the start makes progress
LIMIT_DRAIN_S = 30.0  # for learners whose job has reached a limit
EXAMINE_TIMEOUT_S = 10.0  # for the directory of checkpoints, on a disk that may block


class Supervisor:
    """One job's watchdog."""

    def __init__(
        self, config: JobConfig, options: Options | None = None, notify: Notify | None = None
    ) -> None:
        self.config = config
        self.options = options or Options()
        self.memory = JobMemory(config, config.learners_to_come(self.options.learners))
        self._notify = notify or Notify()
        self._log = log.get(job=config.name)
        self._selector = selectors.DefaultSelector()
        self._requests: Requests | None = None
        self._lock: NameLock | None = None
        self._worker = Worker(self._selector)
        self._roster = Roster(
            self.memory, self._selector, self._log, config.learner_timeout_s, self._worker.drop
        )
        self._servers = Servers(self.memory, self._selector, self._log, self._fail, self.options)
        self._checkpoints = Checkpoints(self.memory, self._selector, self._log)
        self._history = History(self.memory, self._selector, self._log)
        self._monitors = Monitors(config, self._selector, self._log)
        self._learners = JobLearners(config.learners, self.memory, "", self._log)
        self._stopping = Stopping(
            self.memory,
            self._roster,
            self._checkpoints,
            self._notify,
            self._log,
            lambda: self._servers.blocked,
        )
        self._failed = ""
        self._begun = False
        self._leave = False  # servers, learners and memory continue without this process
        self._keep = False  # the memory does
        self.signalled = False
        self._slow_at = 0.0
        self._kills = cgroups.Kills()
        self._wanted = Wanted(config.name, self._log)
        self._rate = (0.0, 0)

    @property
    def _sync(self) -> str:
        """The synchronization model in force."""
        return sync_change.text(self.memory.control, sync_change.in_force(self.memory.control))

    # -- life ---------------------------------------------------------------------------------

    def run(self) -> int:
        """The whole life of the job; returns the exit code."""
        process.allow_files(process.MANY_FILES)
        process.end_last()
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
            self._keep = self.memory.adopted  # for the next watchdog: this one never owned it
            raise
        except BaseException as error:
            self._notify.failed(in_words(error))
            # An error in this program, or a machine out of memory, must not cost the job: the next
            # watchdog finds it as it is. Where the job is to end, there is no next one.
            self._keep = self._begun or self.memory.adopted
            self._leave = self._keep and not self.options.finish
            raise
        finally:
            self.shutdown()
            signal.set_wakeup_fd(previous)
            os.close(wake_read)
            os.close(wake_write)

    def _on_signal(self, number: int, frame: object) -> None:
        self.signalled = True

    def startup(self) -> None:
        """Raise GadeiError when the job cannot be started; shutdown() then cleans up."""
        process.check_proc()
        if not self.options.finish:
            check_files()
        # A job that runs is adopted even if a library has been removed meanwhile.
        if not (self.options.finish or presence.server_pids(self.config.name)):
            self.config.curves.check()
        self._take_over(adopts=not self.options.fresh and self.options.checkpoint is None)
        stop = Stop.GO
        if self.memory.adopted:
            stop = Stop(int(self.memory.words["stop"]))
            self._servers.adopt()
            self._roster.adopt(time.monotonic())
            self.memory.words["temporary"] = self.options.kept
            if self.options.survives and not self._roster.rows:
                self.memory.reopen_script()
            self._examine_checkpoints()
        else:
            for name in clear_dead(self.config.name):
                self._log.warning("removed a dead job's segment", segment=name[1:])
            if self.options.finish:
                remove_dead(paths.socket_path(self.config.name))
                self._notify.status("nothing of the job was left to be ended")
                raise JobStopped("nothing of the job is left to be ended")
            self.memory.create_control(sync.parse(self.config.sync))
            self.memory.words["temporary"] = self.options.kept
            self._make_first_model()
        self._wait_until_serving()
        self._requests = Requests(
            self._selector,
            self.memory,
            self._roster,
            self._servers,
            self._checkpoints,
            self._stopping,
            self._worker,
            self._history,
        )
        self._learners.socket = str(paths.socket_path(self.config.name))
        if self.memory.adopted:
            self._learners.adopt()
        self._wanted.tick()  # before units of learners that wait for this one
        self._notify.ready()
        self._log_start()
        if stop != Stop.GO:
            self._log.warning("finishing the stop that another watchdog had begun")
            self._stopping.begin(drain=stop == Stop.DRAIN, timeout_s=LEAVE_TIMEOUT_S)
        elif self.options.finish:
            self._stopping.begin(drain=True, timeout_s=LEAVE_TIMEOUT_S)

    def _take_over(self, *, adopts: bool) -> None:
        """Lock the job's name, and adopt its memory.

        Raises what NameLock() and JobMemory.adopt() raise.
        """
        was_locked = False

        def take() -> None:
            nonlocal was_locked
            try:
                self._lock = self._lock or NameLock(self.config.name)
            except JobInUse:
                was_locked = True
                raise
            if adopts:
                self.memory.adopt(is_own=self.options.recorded)

        # Memory whose job was never locked here is that of a living watchdog elsewhere.
        awaited(self.config.name, take, lambda: was_locked and not self.signalled)

    def _log_start(self) -> None:
        self._log.info(
            "adopted" if self.memory.adopted else "ready",
            socket=self._learners.socket,
            pid=os.getpid(),
            sync=self._sync,
            version=int(self.memory.words["version"]),
        )
        if self.memory.adopted:
            self._log.info(initial_model.started(self.memory))
        if self.options.notice:
            self._log.warning(self.options.notice)
        file = str(sync.parse(self.config.sync))
        if self._sync != file:
            kept = "the job keeps the synchronization model that it has; gadei-ps set changes it"
            self._log.warning(kept, sync=self._sync, file=file)

    def _make_first_model(self) -> None:
        """Make the model of a checkpoint or the job file; else the first learner brings it."""

        def make(progress: Progress) -> tuple[InitialModel, tuple[Segment, Segment]] | None:
            first = None
            if self.config.checkpoint is not None:
                checkpoint.check(self.config.checkpoint_directory())
            if self.options.resume and not self.options.fresh:
                first = initial_model.from_checkpoint(
                    self.config, self.options.checkpoint, self._log
                )
            first = first or initial_model.configured(self.config)
            if first is None:
                return None
            return first, self.memory.make_model(first, progress)

        outcome: list[tuple[Any, BaseException | None]] = []
        task = self._worker.ask("the model", make, lambda *made: outcome.append(made))
        warn_at = time.monotonic() + START_LOG_INTERVAL_S
        while not outcome:
            self._poll_in_start(TICK_S)  # shutdown() waits for the current piece
            done = task.progress.done, progress(time.process_time(), self.options.start_silent_s)
            self._notify.starting(self.options.start_silent_s, done)
            if time.monotonic() >= warn_at:
                warn_at = time.monotonic() + START_LOG_INTERVAL_S
                self._log.warning(f"still starting: {task.text}")
        found, error = outcome[0]
        if error is not None:
            raise error
        if found is not None:
            first, made = found
            initial_model.enter(self.memory, first, made, self._log)

    def _examine_checkpoints(self) -> None:
        """Examine checkpoints before the job resumes from memory. Does not wait if any of it lives.

        Raises CheckpointMistake if nothing lives and no checkpoint could be made; the memory stays.
        """
        if not self.options.resume or self.options.finish:
            return
        self._checkpoints.examine()
        if self._servers.running or self._roster.rows:
            return
        until = time.monotonic() + EXAMINE_TIMEOUT_S
        while self._checkpoints.unsure and time.monotonic() < until:
            self._poll_in_start(TICK_S)
        self._checkpoints.refuse()

    def _wait_until_serving(self) -> None:
        start = Start(self.options.start_silent_s)
        report_at, reported_s = 0.0, -1.0
        warn_at = time.monotonic() + START_LOG_INTERVAL_S
        while not self._servers.serving or not int(self.memory.words["lease_state"]):
            now = time.monotonic()
            self._servers.tick(now)
            self._poll_in_start(0.01)
            if self._failed:
                raise JobFailed(self._failed)
            if self._servers.why_alone and not self._servers.running:
                raise JobFailed(
                    "no server can start: gadei-ps has been replaced since this start began; "
                    "serve the job again"
                )
            if start.hangs(now, self._servers.loading_s()):
                raise JobFailed(
                    "the parameter server did not get ready: it made no progress for "
                    f"{start.silent_s:g} s; see its messages above"
                )
            if start.cpu_s > reported_s and now >= report_at:
                report_at, reported_s = now + PROGRESS_INTERVAL_S, start.cpu_s
                self._notify.progress(start.silent_s)
            if now >= warn_at:
                warn_at = now + START_LOG_INTERVAL_S
                # A warning, so that commands that log no more than that show it.
                self._log.warning(
                    "still starting: the first start of an installation compiles the kernels, "
                    "which takes up to half a minute of processor time",
                    processor_s=round(start.cpu_s),
                )
        self.memory.words["phase"] = Phase.SERVING

    def _poll_in_start(self, timeout_s: float) -> None:
        """Raise JobStopped if a signal has come."""
        self._poll(timeout_s)
        if self.signalled:
            raise JobStopped("stopped before the job was ready")
        self._notify.watchdog()

    def main_loop(self) -> int:
        """Return the exit code: 0 after a stop, 1 after a failure, or that of NotSaved."""
        assert self._requests is not None
        while True:
            busy = self._stopping.learners_leave or self._roster.leaving or self._servers.expects
            self._poll(BUSY_TICK_S if busy else TICK_S)
            now = time.monotonic()
            self._roster.free_rows()
            self._history.begin(now)
            self._requests.tick(now)
            if self.signalled and not self._stopping.begun:
                self._stopping.begin(drain=True, timeout_s=LEAVE_TIMEOUT_S)
            reason = _reached(self.memory)
            if reason and not self._stopping.begun:
                self._stopping.asked = True
                self._stopping.begin(True, LIMIT_DRAIN_S, reason, finished=True)
            self._servers.tick(now)
            self._learners.tick(now, self._stopping.begun)
            if self._failed:
                self._log.error("the job has failed", reason=self._failed)
                self._notify.failed(self._failed)
                if self._stays and not self.memory.names_lost():
                    self._log.error(f"its memory stays: {service.next_steps(self.config.name)}")
                return 1
            if self._stopping.begun and self._stopping.over(now):
                if not self._stopping.problem:
                    self._notify.status(self._stopping.done())
                    return 0
                self._log.error("stopped", reason=self._stopping.report())
                self._notify.failed(self._stopping.report())
                return NotSaved.exit_code
            if now >= self._slow_at:
                self._slow_at = now + SLOW_TICK_S
                self._look_around(now)
            self._notify.watchdog()

    def _look_around(self, now: float) -> None:
        """Look at everything that may be seen a second late."""
        if self._requests is not None:
            self._requests.expire(self._lock)
        self._roster.tick(now)
        self._roster.kill_hung(now)
        self._history.tick(now, self._servers.take_failovers())
        self._monitors.look(now)
        if not self._stopping.begun:
            self._checkpoints.tick(now)
            self._wanted.tick()
        if self._is_idle() and not self._stopping.begun:
            self._log.info("the last learner has left: stopping")
            self._stopping.begin(True, LEAVE_TIMEOUT_S, finished=self._learners.finished)
        lost = self.memory.names_lost()
        if lost and not self.memory.unnamed:
            self.memory.unnamed = True
            unit = service.of(self.config.name)
            again = unit.systemctl("restart") if unit else "gadei-ps serve"
            self._log.error(
                "segments have lost their names: what runs continues, but no learner or server can "
                f"be added; stop the job, and serve it again from its last checkpoint ({again}). "
                "Did logind remove them (RemoveIPC)? Run gadei-ps doctor",
                segment=lost[0][1:],
            )
        if killed := self._kills.describe():
            self._log.error("a process of this control group is dead", reason=killed)
        self._report_status(now)

    def _is_idle(self) -> bool:
        """Return whether the last learner has left and the job ends then.

        The launcher of `run` ends its job itself, and decides whether the memory stays.
        """
        roster = self._roster
        if self.options.survives or self.memory.config.when_idle != "stop":
            return False
        if roster.rows or roster.leaving or roster.joining:
            return False
        return self._learners.over if self._learners.all else self._roster.had_any

    def _report_status(self, now: float) -> None:
        if not self._notify.enabled:
            return
        version = int(self.memory.words["version"])
        since, before = self._rate
        self._rate = (now, version)
        rate = (version - before) / (now - since) if since else 0.0
        learners = counted(len(self._roster.rows), "learner")
        parts = [f"{learners}, version {version}, {rate:.0f}/s", self._wanted.problem]
        if self.memory.unnamed:
            parts.append("segments have lost their names: stop the job")
        parts.append(self._checkpoints.warning)
        self._notify.status("; ".join(filter(None, parts)))

    @property
    def _stays(self) -> bool:
        """Whether the job's memory is for the next watchdog."""
        temporary = int(self.memory.words["temporary"]) == Kept.NEVER
        failed = bool(self._failed) and self._begun and not temporary
        return failed or int(self.memory.words["phase"]) == Phase.KEPT

    @property
    def _survives(self) -> bool:
        """Whether the memory is for the next `run`: its launcher has died, or wants it so."""
        unsaved = not self._stopping.asked and not self._stopping.saves
        trained = self.memory.model is not None and int(self.memory.words["version"]) > 0
        return self.options.survives and unsaved and trained

    def _fail(self, why: str) -> None:
        self._failed = why

    def _poll(self, timeout_s: float) -> None:
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)

    def shutdown(self) -> None:
        """End the servers, answer waiting clients, and remove everything of the job.

        The memory stays if the last checkpoint failed, because it holds what the checkpoint lacks,
        if the job has failed, because the next start may continue with it, and if the launcher of
        `run` was killed. Most jobs of commands have no next start. Whatever fails here, the job's
        name and memory are free afterwards.
        """
        with contextlib.ExitStack() as last:
            last.callback(self._notify.close)
            last.callback(self._selector.close)
            if self._lock is not None:
                last.callback(self._lock.release)
            last.callback(self.memory.release)
            last.callback(self.memory.close)
            ended = self._end()
        if self._begun and ended:
            self._log.info("stopped")

    def _end(self) -> bool:
        """End the job; return False if it waits for another watchdog."""
        made = hasattr(self.memory, "control") and not (self._leave or self._keep)
        if made:
            kept = self._stopping.problem or self._survives
            phase = Phase.KEPT if kept else Phase.STOPPED
            # In this order: a learner that sees the stop also sees the reason.
            self.memory.words["phase"] = Phase.FAILED if self._failed else phase
            _native.store32(self.memory.control.word(layout.CONTROL, "stop"), Stop.CLOSED)
            self.memory.ring_bells()
        if not self._leave:
            self._learners.close()
        self._checkpoints.close()
        self._history.close(self._stopping.finished, self._servers.take_failovers())
        self._monitors.finish()  # after the last line of the history
        self._servers.close(leave=self._leave)
        if self._requests is not None:
            self._requests.close(self._failed)
        else:
            self._worker.close()
        self._roster.close()
        # Memory without names cannot be adopted.
        if made and (not self._stays or self.memory.names_lost()):
            self.memory.remove()
        self._notify.more_time(MONITORS_END_S + STOP_END_S)
        self._notify.watchdog()
        self._monitors.end(0.0 if self._leave else MONITORS_END_S)
        return made


def serve(config: JobConfig, options: Options | None = None, notify: Notify | None = None) -> int:
    """Run a job's watchdog in this process until it is stopped; return the exit code."""
    try:
        return Supervisor(config, options, notify).run()
    except JobStopped:
        return 0


def _reached(memory: JobMemory) -> str:
    """Return the limit that the job has reached, for messages; empty before that."""
    limits, words = memory.config.stop_after, memory.words
    state = memory.state_words if memory.state is not None else None
    done = {
        "gradients": total(words, "applied", state) if limits.gradients else 0,
        "samples": total(words, "samples", state) if limits.samples else 0,
        "epochs": int(words["epochs_done"]),
    }
    for what, limit in limits.model_dump().items():
        if limit and done[what] >= limit:
            return f"stop_after: {done[what]:,} of {limit:,} {what}"
    return ""
