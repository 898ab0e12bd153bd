"""`gadei-ps run` and `attach`: a user's own program as learners of a job.

`run` starts learners as torchrun does and watches them until they end. If their job is not running
yet, `run` serves it until then.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from gadei_ps import sync
from gadei_ps.commands import daemon, jobs, saved
from gadei_ps.commands.daemon import Daemon, kept_version
from gadei_ps.commands.durations import APPLY_S, DRAIN_S, GRACE_S, ORPHANS_END_S
from gadei_ps.commands.early import Child
from gadei_ps.commands.own import OwnLearners
from gadei_ps.commands.served import Attached, Served, launch
from gadei_ps.errors import (
    GadeiError,
    JobDiffers,
    JobNotFound,
    JobStopped,
    NoAnswer,
    UsageError,
    in_words,
    reason_of,
)
from gadei_ps.job import config, paths
from gadei_ps.job.config import JobConfig
from gadei_ps.job.control import Launch, Status
from gadei_ps.job.diagnosis import locked
from gadei_ps.machine import gpus, interrupts
from gadei_ps.machine.foreground import suspends
from gadei_ps.machine.interrupts import Interrupted
from gadei_ps.machine.launch import ALONE_VARIABLE, JOB_VARIABLE, Compute, Ended, Learners
from gadei_ps.machine.output import Output
from gadei_ps.memory import presence
from gadei_ps.memory.layout import Stop
from gadei_ps.memory.shm import check_job_name
from gadei_ps.show import view
from gadei_ps.show.counts import counted, mostly_refused
from gadei_ps.show.optimizer_line import advice, start
from gadei_ps.show.plain import print_text
from gadei_ps.show.progress import ProgressLines, Training, above
from gadei_ps.storage import checkpoint
from gadei_ps.storage.export import check as check_export
from gadei_ps.storage.export import export as write_weights
from gadei_ps.storage.snapshot import Snapshot
from gadei_ps.watchdog import restart
from gadei_ps.watchdog.restart import GIVE_UP, USEFUL_S, Exit, Policy

LEARNERS_POLL_S = 0.05
STAY_POLL_S = 0.2
REPORT_INTERVAL_S = 1.0
AWAIT_SILENT_S = 0.5  # longest wait without a line
ENDED = "the learners of its run have ended"
NEVER_JOINED = (
    "no learner joined job {!r}: does the script make a gadei_ps Optimizer or Client, without the "
    "name of another job?"
)
POLICY = Policy(longest_s=1.0)  # of learners that are killed
FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class RunOptions:
    """Options of `run`.

    restart: how often killed learners are started again in all; None: until one is killed again and
    again without useful work, or by a fault of the program. overrides: parts of a job's
    configuration, from flags. device, gpus, devices_per_learner: as given by the flags of the same
    name. join: also a job whose learners run another program. fresh: a job that `run` makes begins
    from zero. survives: it stays in memory for the next `run` if the learners fail. reads: an only
    learner without log_dir has this process's standard input. out: file for the weights at the end.
    log_dir: directory for a file of each learner's output. quiet: no lines on how training goes,
    which there are in a terminal only. stays: returns whether the job is still wanted, once all
    learners have ended well.
    """

    learners: int = 1
    restart: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    device: str = "auto"
    gpus: str | None = None
    devices_per_learner: int | None = None
    join: bool = False
    fresh: bool = False
    survives: bool = True
    reads: bool = False
    out: Path | None = None
    log_dir: Path | None = None
    stdout: int | None = None
    quiet: bool = False
    verbose: bool = False
    stays: Callable[[], bool] | None = None


def run_learners(
    job: str, command: Sequence[str], options: RunOptions, child: Child | None = None
) -> dict[str, Any]:
    """Run the learners to their end; return the summary that `run --json` prints.

    child: a process for the watchdog of a new job.

    job: name or socket of a running job, a job file, or the name of a new job. `exit_code` of the
    summary is 1 if a learner failed, all were killed or most gradients were refused, and 4 if the
    job is another process's and was stopped while they ran; 128 + N after signal N. The first
    signal is passed on to the learners, which have GRACE_S to end; the second one ends them at
    once; the third one raises Interrupted. Raises GadeiError. An error has a note if the job stays
    in memory.
    """
    check_command(command)
    if options.out is not None:
        check_export(options.out)
    is_name = not job.endswith(".toml") and "/" not in job
    if is_name:
        _await_end(job)
    if (is_name and daemon.running(job)) or (not job.endswith(".toml") and "/" in job):
        if options.overrides or options.fresh:
            names = [*options.overrides, *(["fresh"] if options.fresh else [])]
            given = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise UsageError(
                f"{given}: job {job!r} is running and has its configuration; leave out the option, "
                "or stop the job first"
            )
        attached = Attached(job)
        wanted_numbers = launch(options.learners, command)
        if not options.join:
            _print(joining(attached.before, wanted_numbers))
        compute = _one_more(attached, options)
        return _Run(attached, command, options, compute, wanted_numbers).run()
    if options.join:
        raise JobNotFound(
            f"--join: no job {job!r} is running; gadei-ps ls shows the jobs there are"
        )
    if job.endswith(".toml"):
        wanted = config.with_overrides(config.load(Path(job)), options.overrides, job)
    else:
        name = check_job_name(job)
        wanted = config.with_overrides(
            config.from_mapping({"name": name}, "job"), options.overrides, f"job {name}"
        )
    config.check_sync(wanted, options.learners, f"run --learners {options.learners}")
    compute = _compute(options)
    served = Daemon(
        wanted,
        verbose=options.verbose,
        learners=options.learners,
        fresh=options.fresh,
        survives=options.survives,
        child=child,
    )
    begun = False
    try:
        with served:
            begun = True
            _check_continues(served, options)
            numbers = launch(options.learners, command)
            summary = _Run(Served(served), command, options, compute, numbers).run()
    except BaseException as error:
        # JobDiffers names what to do; the memory that another JobInUse finds is another command's.
        ours = not isinstance(error, JobDiffers) and (begun or daemon.restartable(wanted.name))
        if ours and served.keeps and (text := view.kept(_kept(wanted) | {"job": wanted.name})):
            error.add_note(text)
        raise
    return summary | _kept(wanted) if served.keeps else summary


def joining(report: Mapping[str, Any], wanted: Launch) -> str:
    """A line about the running job that learners are about to join. report: its status.

    Raises UsageError if commands that run have started learners with other programs in it.
    """
    job, number = report["job"], len(report["learners"])
    since = time.strftime("%H:%M", time.localtime(report["started"]))
    programs = [one for one in report["commands"] if one["command"]]
    ours = wanted.command, wanted.directory
    if programs and all((one["command"], one["directory"]) != ours for one in programs):
        other = programs[0]
        raise UsageError(
            f"job {job!r} has been running since {since} with another program: "
            f"{other['command']!r} in {other['directory']}; give another job name, or add --join "
            "(or use gadei-ps attach) to train the same model"
        )
    return (
        f"job {job!r} has been running since {since} and has {counted(number, 'learner')}: joining "
        "it; another name starts another job"
    )


def _await_end(job: str) -> None:
    """Wait while a job starts or ends, such as one whose launcher was just killed."""
    begin, printed = time.monotonic(), False
    while _starts_or_ends(job) and (now := time.monotonic()) < begin + ORPHANS_END_S:
        if not printed and now > begin + AWAIT_SILENT_S:
            printed = True
            _print(f"waiting up to {ORPHANS_END_S:g} s: job {job!r} is starting or ending")
        time.sleep(LEARNERS_POLL_S)


def _starts_or_ends(job: str) -> bool:
    try:
        return bool(jobs.status(job)["phase"] == "draining")
    except NoAnswer:  # a watchdog that hangs; the request that follows says so
        return False
    except (GadeiError, OSError):
        # At its start a watchdog has its lock alone, and at its end nothing for a moment.
        with contextlib.suppress(GadeiError, OSError):
            living = presence.living(job)
            return locked(paths.lock_path(job)) or (living.watchdog and not living.elsewhere)
    return False


def _check_continues(served: Daemon, options: RunOptions) -> None:
    """Print where a job continues. Raises JobDiffers for options that it cannot apply."""
    report = served.request(Status())
    if not report["version"]:
        return
    job, wanted = report["job"], options.overrides.get("sync")
    if wanted is not None and str(sync.parse(wanted)) != report["sync"]:
        raise JobDiffers(
            f"--sync {wanted}: job {job!r} continues from memory with {report['sync']}; leave out "
            "the option, or start the job from zero with --fresh"
        )
    _print(f"job {job!r} continues at version {report['version']:,}; --fresh starts it from zero")


NOTHING_KEPT: Mapping[str, Any] = {"kept_version": None, "kept_in": None}


def _kept(wanted: JobConfig) -> dict[str, Any]:
    """Find the weights of a job after its end: in memory, or in a directory of checkpoints."""
    if (version := kept_version(wanted.name)) is not None:
        return {"kept_version": version, "kept_in": "memory"}
    if wanted.checkpoint is not None:
        directory = wanted.checkpoint_directory()
        with contextlib.suppress(GadeiError, OSError):
            for one in checkpoint.found(directory)[:1]:
                return {"kept_version": one.version, "kept_in": str(directory)}
    return dict(NOTHING_KEPT)


def _compute(options: RunOptions) -> Compute:
    """Choose the learners' devices. Raises UsageError or DeviceError before anything is started."""
    compute = Compute.choose(options.device, options.gpus, options.devices_per_learner)
    if shared := compute.shared(options.learners):
        _print(shared)
    if compute.why:
        _print(f"warning: {compute.why}; no GPU is assigned to learners")
    elif compute.each is not None:
        return compute  # virtual workers need no CuPy, and print themselves where they compute
    elif why := compute.without():
        if compute.gpus or gpus.has_driver():
            _print(f"learners compute on the host: {why}")
    elif options.device == "cuda" and compute.gpus:  # with auto, a script may not use them
        names = list(dict.fromkeys(compute.gpus))
        _print(f"learners can use CUDA on {counted(len(names), 'GPU')}: {', '.join(names)}")
    return compute


def _print(text: str) -> None:
    print_text(f"gadei-ps: {text}")


def check_command(command: Sequence[str]) -> None:
    """Raise UsageError for a program that cannot be started."""
    program = command[0]
    if shutil.which(program) is not None:
        return
    if program.endswith(".py") and Path(program).is_file():
        raise UsageError(f"{program} is not an executable program; write: python {program}")
    raise UsageError(f"there is no program {program!r} to start; give its path or check PATH")


def become_learner(job: str, command: Sequence[str], options: RunOptions) -> NoReturn:
    """Replace this process by the command, with the job in its environment.

    Of the options, only device, gpus and devices_per_learner are used. Raises JobNotFound,
    UsageError, DeviceError.
    """
    check_command(command)
    attached = Attached(job)
    compute = _one_more(attached, options)
    numbers = attached.reserve(Launch())
    env = os.environ | {JOB_VARIABLE: attached.socket, ALONE_VARIABLE: str(os.getpid())}
    env |= numbers.environment(numbers.first) | compute.environment(0)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), env)
    except OSError as error:
        raise UsageError(f"cannot start {command[0]!r}: {reason_of(error)}") from None


def attach_and_wait(job: str, command: Sequence[str], options: RunOptions) -> dict[str, Any]:
    """Run one more learner as a child to its end; return the summary. Raises GadeiError."""
    check_command(command)
    attached = Attached(job)
    return _Run(attached, command, options, _one_more(attached, options), Launch()).run()


def _one_more(attached: Attached, options: RunOptions) -> Compute:
    """Choose the devices of learners that join the job's present learners."""
    return _compute(options).beside(one["pid"] for one in attached.before["learners"])


# -- the learners ---------------------------------------------------------------------------------


class _Run:
    """The learners of one command, from their start to the last one's end."""

    def __init__(
        self,
        job: Attached | Served,
        command: Sequence[str],
        options: RunOptions,
        compute: Compute,
        wanted: Launch,
    ) -> None:
        """wanted: numbers of the learners."""
        self.job = job
        self.wanted = wanted
        self.own: OwnLearners
        self.counts: dict[str, int] = {}
        self.options = options
        self.command = command
        self.compute = compute
        self.last: dict[str, Any] = job.before
        self.ended: dict[int, Ended] = {}
        self.missed: list[Ended] = []  # ended for good; the job may await them
        self.pids: set[int] = set()
        self.restarts = 0
        self.exits: dict[int, tuple[Exit, ...]] = {}
        self.due: dict[int, float] = {}  # when learners are started again
        self.held: Callable[[], Snapshot] | None = None  # weights that outlive the job
        self.begin = time.monotonic()
        self.first_gradient = 0.0
        self.reported = 0.0
        self.making, self.awaiting = ProgressLines(), ProgressLines()
        shows = not options.quiet and options.stdout is None and sys.stderr.isatty()
        self.progress = Training() if shows else None
        self.printed = False  # what the job does with gradients
        self.end = 0.0
        self.stopped = False
        self.asked = Stop.GO
        self.signal: int | None = None  # that has asked the learners to end
        self.unsaved = ""
        self.output: Output | None = None

    def run(self) -> dict[str, Any]:
        """Raise GadeiError, and Interrupted at the third signal."""
        self.own = OwnLearners(self.job.control)
        with interrupts.first_told() as signalled:
            try:
                with self._learners() as learners, suspends(learners.suspend):
                    self._watch(learners, signalled)
            except Interrupted:  # which has ended the learners
                self.signal = signalled()
            self.end = time.monotonic()
            self.stopped = self.job.was_stopped()
            self._stay(signalled)
            self._finish()
            self.signal = signalled() or self.signal
        return self._summary()

    def _watch(self, learners: Learners, signalled: Callable[[], int | None]) -> None:
        """Watch the learners until the last one has ended for good."""
        until, runs = math.inf, True
        while (learners.pids or self.due) and time.monotonic() < until:
            self.pids.update(learners.pids)
            self.own.look(self.pids)
            if runs and not self._look_at_job():
                runs, until = False, min(until, self._announce_end(learners))
            if runs:
                self._report_missed()
            if self.signal is None and (number := signalled()) is not None:
                until = time.monotonic() + GRACE_S
                self._pass_on(number, learners)
            self._look_at_learners(learners)
            time.sleep(LEARNERS_POLL_S)
        if learners.pids:
            _print(f"{counted(len(learners.pids), 'learner')} did not end in time: ended")

    def _pass_on(self, number: int, learners: Learners) -> None:
        self.signal = number
        self.job.keep(self._keeps_after_signal)
        name = signal.Signals(number).name
        _print(f"{name}: the learners have {GRACE_S:g} s to end; once more ends them at once")
        learners.signal(number)

    @property
    def _keeps_after_signal(self) -> bool:
        """Ctrl-C ends a job whose weights nobody has asked for; a closed terminal does not."""
        return self.options.out is not None or self.signal == signal.SIGHUP

    def _stay(self, signalled: Callable[[], int | None]) -> None:
        """Wait while the job is wanted without its learners, if they have ended well."""
        if self.options.stays is None or any(one.code for one in self.ended.values()):
            return
        while self.job.report() is not None and self.options.stays() and signalled() is None:
            time.sleep(STAY_POLL_S)

    def _finish(self) -> None:
        """Take the weights once the ended learners' gradients are applied, and end the job."""
        until = time.monotonic() + APPLY_S
        while (report := self.job.report()) is not None:
            self._take(report)
            self.own.look(self.pids)
            if not self.own.attached or time.monotonic() > until:
                break
            time.sleep(LEARNERS_POLL_S)
        if self.options.out is not None:
            self._write(self.options.out, report is None)
            self.job.keep(bool(self.unsaved))
        elif self.signal is not None:
            self.job.keep(self._keeps_after_signal)
        else:
            self.job.keep(report is not None and self._has_failed)
        self.counts = self.own.counts()
        others = self.own.others
        if report is not None and others and isinstance(self.job, Served):
            _print(f"waiting up to {DRAIN_S:g} s for {counted(others, 'attached learner')} to end")
        finished = self.signal is None and not self._has_failed
        self.last = self.job.end(ENDED if others else "", finished=finished) or self.last
        if self.own.alone:  # what was not applied in time is in the job's last counts
            self.counts = self.own.counts()

    def _write(self, out: Path, is_over: bool) -> None:
        """Write the weights to the file of `--out`; the job stays in memory if that fails.

        is_over: the job was stopped meanwhile, and is not in memory any more.
        """
        try:
            self._export(out)
        except (GadeiError, OSError) as error:
            self.unsaved = f"{out} is not written: {in_words(error)}"
            if is_over and self.held is not None:
                self.unsaved += self._rescue()
            _print(self.unsaved)

    def _rescue(self) -> str:
        """Write the weights elsewhere: to the disk, else to the runtime directory."""
        for directory in (config.state_directory(), paths.directory()):
            path = directory / f"{self.last['job']}.safetensors"
            with contextlib.suppress(GadeiError, OSError):
                directory.mkdir(parents=True, exist_ok=True)
                self._export(path)
                return f"; the weights are in {path}"
        return ""

    def _export(self, out: Path) -> None:
        job = str(self.last.get("job"))
        held = self.held or saved.hold(job)
        if held is None:
            raise JobStopped(f"job {job!r} was stopped meanwhile")
        write_weights(held(), out)

    @property
    def _has_failed(self) -> bool:
        codes = [one.code for one in self.ended.values()]
        return any(code > 0 for code in codes) or not any(code == 0 for code in codes)

    @contextlib.contextmanager
    def _learners(self) -> Iterator[Learners]:
        options, numbers = self.options, self.job.reserve(self.wanted)
        if options.learners > 1 or options.log_dir is not None:
            self.output = Output(
                options.learners,
                first=numbers.first,
                stdout=options.stdout or 1,
                directory=options.log_dir,
            )
        with contextlib.closing(self.output) if self.output else contextlib.nullcontext():
            learners = Learners(
                self.command,
                numbers,
                self.job.socket,
                stdout=options.stdout,
                compute=self.compute,
                output=self.output,
                reads=options.reads and self.output is None,
            )
            try:
                yield learners
            finally:
                learners.stop(grace_s=0.0)

    def _look_at_job(self) -> bool:
        """False once the job has ended."""
        now = time.monotonic()
        if self.first_gradient and now - self.reported < REPORT_INTERVAL_S:
            return True
        self.reported = now
        report = self.job.report()
        if report is None:
            return False
        if report["watchdog_pid"] is None and self.last["watchdog_pid"] is not None:
            _print("no watchdog answers; the learners continue, and the next watchdog adopts them")
        self._take(report)
        if self.progress is not None:
            for line in self.progress(report, now, shutil.get_terminal_size().columns - 11):
                self._print_beside_learners(line)
        if report.get("making"):
            self.making(report["making"])
        if begins := report.get("start"):
            of = counted(begins["of"], "learner")
            text = f"{begins['learners']} of {of} there: the first step waits for all"
            self.awaiting({"text": text})
        if not self.first_gradient and report["version"] > self.job.before["version"]:
            self.first_gradient = now
        return True

    def _take(self, report: dict[str, Any]) -> None:
        """Keep a status. Print once what the job does with gradients, when it has its model."""
        self.last = report
        if self.options.out is not None and self.held is None and report["model"] is not None:
            with contextlib.suppress(GadeiError, OSError):
                self.held = saved.hold(report["job"])
        before = self.job.before["version"]  # of a continued job, its script may change settings
        settled = not before or report["learners"] or report["version"] > before
        if not self.printed and report["model"] is not None and settled:
            self.printed = True
            self._print_beside_learners(start(report))
            against = "" if self.job.says_sync else advice(report, self.options.learners)
            if against:
                self._print_beside_learners(against)

    def _print_beside_learners(self, text: str) -> None:
        """Like _print; if a learner has the terminal, its own line, such as a bar, stays."""
        if self.output is None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            print(above(f"gadei-ps: {text}"), end="", file=sys.stderr, flush=True)
        else:
            _print(text)

    def _look_at_stop(self) -> Stop:
        """Return the job's request to its learners to end; once it is Stop.NOW, it stays so."""
        if self.asked != Stop.NOW:
            self.asked = Stop(int(self.job.control["stop"]))
        return self.asked

    def _announce_end(self, learners: Learners) -> float:
        """Report that the job has ended before its learners; return until when these may run.

        After an orderly stop a script may do what comes after its training. Learners that have not
        joined the job do not learn of its end.
        """
        if not learners.pids:
            return math.inf
        if self._look_at_stop() == Stop.NOW or not self.own.joined:
            _print(f"the job has ended; its learners have {GRACE_S:g} s to finish")
            return time.monotonic() + GRACE_S
        _print("the job has ended; waiting for its learners to finish")
        return math.inf

    def _look_at_learners(self, learners: Learners) -> None:
        """Killed learners are started again, but not after a signal or a stop."""
        restarts = self.signal is None and self._look_at_stop() == Stop.GO
        now = time.monotonic()
        for one in learners.ended():
            if one.code == JobStopped.exit_code and self._look_at_stop() != Stop.GO:
                one = replace(one, code=0)  # it has printed why it has ended
            if one.typed:
                self.signal = signal.SIGINT
                self.job.keep(self._keeps_after_signal)
                restarts = False
            wait, why = self._wait_before(one, now) if restarts else (None, "")
            if wait is None:
                self.ended[one.index] = one
                self.missed.append(one)
            else:
                self.restarts += 1
                self.due[one.index] = now + wait
            if one.code == 0:
                continue
            if self.output is not None:
                self.output.catch_up()  # the reason is above this line
            left = len(learners.pids) + len(self.due)
            what = f"{left} left" if left else "none is left"
            if wait is not None:
                what = f"started again in {wait:g} s" if wait else "started again"
            elif why:
                what = f"not restarted: {why}; {what}"
            _print(f"learner {one.index} (pid {one.pid}) {one.how}; {what}")
        if not restarts:
            self.due.clear()
        for index in [index for index, at in self.due.items() if at <= now]:
            del self.due[index]
            learners.start(index)

    def _wait_before(self, one: Ended, now: float) -> tuple[float | None, str]:
        """Return the delay (s) of the restart of an ended learner; None: no restart, and why."""
        if one.code >= 0:
            return None, ""
        if self.options.restart is not None:
            return (0.0 if self.restarts < self.options.restart else None), ""
        if -one.code in FAULTS:
            return None, "a fault of the program (with --restart N, it is restarted)"
        died = Exit(now, one.seconds > USEFUL_S and self.own.has_applied(one.pid))
        exits = restart.remembered((*self.exits.get(one.index, ()), died), POLICY)
        self.exits[one.index] = exits
        wait = restart.delay(exits, now, POLICY)
        if wait < GIVE_UP:
            return wait, ""
        useless = f"within {USEFUL_S:g} s of its start or without an applied gradient"
        return None, f"{POLICY.limit} deaths in a row {useless}"

    def _report_missed(self) -> None:
        """Report learners that have ended, while the job awaits all of them for the first step.

        Not yet of one that the job still takes for present: it would count twice.
        """
        if not self.last.get("start"):
            return
        there = {one["pid"] for one in self.last["learners"] if not one["leaving"]}
        for one in [one for one in self.missed if one.pid not in there]:
            self.missed.remove(one)
            self.job.leave_out(one.index)

    def _summary(self) -> dict[str, Any]:
        counts = self.counts
        training = self.end - self.first_gradient if self.first_gradient else 0.0
        refused = mostly_refused(counts)
        if refused:
            _print(refused)
        lost = not (self.own.joined or self.signal or self.stopped or self._has_failed)
        if lost:
            _print(NEVER_JOINED.format(self.last.get("job")))
        if self.signal:
            code = 128 + self.signal
        elif self.stopped:
            code = JobStopped.exit_code
        else:
            code = int(self._has_failed or bool(self.unsaved) or bool(refused) or lost)
        out = self.options.out
        return {
            "job": self.last.get("job"),
            "learners": self.options.learners,
            **counts,
            "samples_per_s": counts["samples"] / training if training > 0 else None,
            "gradients_per_s": counts["gradients_applied"] / training if training > 0 else None,
            "seconds": self.end - self.begin,
            "restarts": self.restarts,
            "ended": [
                {"learner": index, "pid": one.pid, "exit_code": one.code}
                for index, one in sorted(self.ended.items())
            ],
            "interrupted": signal.Signals(self.signal).name if self.signal else None,
            "out": str(out) if out is not None and not self.unsaved else None,
            "exit_code": code,
            **NOTHING_KEPT,
        }
