"""A job's daemon as a child of a command: start it, wait until it is ready, end it.

`python -m gadei_ps.commands.daemon` is that child; `gadei-ps serve` runs the same in the
foreground.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from gadei_ps import errors
from gadei_ps.commands import jobs
from gadei_ps.errors import ControlError, GadeiError, JobFailed, JobInUse, JobNotFound, JobStopped
from gadei_ps.job import control, paths
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.control import Status
from gadei_ps.machine import interrupts, log, process
from gadei_ps.watchdog import restart
from gadei_ps.watchdog.liveness import Start
from gadei_ps.watchdog.restart import Exit, Policy

START_SILENT_S = 200.0  # longer than the watchdog lets its servers be silent
GONE_S = 2.0
END_TIMEOUT_S = 60.0  # the watchdog's own limits add up to less, unless the disk blocks
ORPHAN_S = 10.0
POLICY = Policy(limit=20)
CONFIG_VARIABLE = "GADEI_PS_CONFIG"


class Daemon:
    """A watchdog that lives as long as this process and the block it is used in.

    If it is killed, the next use of this object starts another one, which adopts the job. If this
    process is killed, the watchdog is told by the kernel, ends the servers and removes the job's
    segments. Use it from a thread that lives as long.

    The job begins anew, unless its configuration says where checkpoints lie.
    """

    def __init__(
        self,
        config: JobConfig,
        *,
        verbose: bool = False,
        silent: bool = False,
        policy: Policy = POLICY,
        start_silent_s: float = START_SILENT_S,
    ) -> None:
        """silent: not even warnings and errors are logged. policy: how often it may be killed.

        start_silent_s: how long the watchdog's start may make no progress.
        """
        # Should watchdog and launcher be killed together, nobody else would end the servers soon.
        self.config = config.model_copy(update={"orphan_s": min(config.orphan_s, ORPHAN_S)})
        self.socket = paths.socket_path(config.name)
        self._command = process.module_command("gadei_ps.commands.daemon")
        if verbose:
            self._command.append("--verbose")
        if silent:
            self._command.append("--silent")
        self._silent = silent
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: tuple[Exit, ...] = ()
        self._policy = policy
        self._start_silent_s = start_silent_s

    def __enter__(self) -> Self:
        if running(self.config.name):
            raise JobInUse(
                f"job {self.config.name!r} is running already; choose another name, or stop it: "
                f"gadei-ps stop {self.config.name}"
            )
        absence = jobs.absence(self.config.name)
        if absence is not None:
            raise JobInUse(absence)
        self._start(fresh=self.config.checkpoint is None)
        return self

    def _start(self, *, fresh: bool) -> None:
        read, write = os.pipe()
        env = os.environ | {CONFIG_VARIABLE: self.config.model_dump_json()}
        flags = ["--fresh"] if fresh else []
        try:
            self._process = process.spawn(
                [*self._command, *flags, str(write)],
                env=env,
                stdout=2,
                pass_fds=[write],
                how=signal.SIGTERM,
            )
        finally:
            os.close(write)
        try:
            self._wait_ready(read)
        except BaseException:
            self.end()
            raise
        finally:
            os.close(read)

    def _wait_ready(self, read: int) -> None:
        """The child writes into the pipe why it could not start; it is ready when it answers."""
        os.set_blocking(read, False)
        said = b""
        assert self._process is not None
        # A watchdog that waits for its servers uses the processor a little, too.
        start = Start(self._start_silent_s)
        while not start.hangs(time.monotonic(), [process.cpu_s(self._process.pid)]):
            interrupts.check()
            with contextlib.suppress(BlockingIOError):
                part = os.read(read, 4096)
                said += part
                if not part:
                    break
            if self.socket.exists() and self._answers():
                return
            time.sleep(0.005)
        text = said.decode(errors="replace").strip()
        kind, _, message = text.partition(":")
        if message:
            raise _error_class(kind)(message.strip())
        where = "--verbose shows why" if self._silent else "its messages stand above"
        raise JobFailed(f"the daemon did not get ready; {where}")

    def _answers(self) -> bool:
        """Whether a watchdog answers, and it is ours: another may have taken the name before us."""
        assert self._process is not None
        try:
            answer = control.ask(str(self.socket), Status(), 1.0)
            return bool(answer["watchdog_pid"] == self._process.pid)
        except (JobNotFound, ControlError):
            return False

    def check(self) -> None:
        """Starts another watchdog if it was killed; raises if there is no use in that.

        JobFailed: the job has failed, JobStopped: somebody has stopped it.
        """
        assert self._process is not None
        with interrupts.held():
            code = self._process.poll()
        if code is None:
            return
        if code == 0:
            raise JobStopped(f"job {self.config.name!r} has been stopped")
        if code > 0:
            raise JobFailed(f"the daemon of job {self.config.name!r} has failed")
        now = time.monotonic()
        died = Exit(now, useful=False)
        self._deaths = restart.remembered((*self._deaths, died), self._policy)
        if restart.delay(self._deaths, now, self._policy) == restart.GIVE_UP:
            how = process.signal_name(-code)
            raise JobFailed(
                f"the daemon of job {self.config.name!r} was killed by {how} again and again"
            )
        self._start(fresh=False)

    def request(self, message: Any, timeout_s: float = 10.0) -> dict[str, Any]:
        """One request to the job, by its next watchdog if need be. Raises as check() does."""
        while True:
            try:
                return control.ask(str(self.socket), message, timeout_s)
            except (JobNotFound, ControlError):
                # The socket goes a moment before the process does.
                assert self._process is not None
                before = self._process
                with contextlib.suppress(subprocess.TimeoutExpired):
                    before.wait(GONE_S)
                self.check()
                if self._process is before:
                    raise

    def end(self) -> None:
        """Ends the watchdog, which ends the servers and cleans up; if it cannot, so do we."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        # Also one that was ended while it adopted the job leaves it as it was.
        if self._process.returncode < 0 or self.config.checkpoint is None:
            jobs.drop(self.config.name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def running(job: str) -> bool:
    """Whether a watchdog answers at the job's socket."""
    try:
        with control.Connection(job):
            return True
    except (JobNotFound, ControlError):
        return False


def _error_class(name: str) -> type[GadeiError]:
    found = getattr(errors, name, JobFailed)
    return found if isinstance(found, type) and issubclass(found, GadeiError) else JobFailed


def main() -> None:
    """The child. Its last argument is the descriptor on which it says why it could not start."""
    from gadei_ps.watchdog.supervisor import Options, serve

    say = int(sys.argv[-1])
    os.set_inheritable(say, False)
    if "--silent" in sys.argv:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    verbose = "--verbose" in sys.argv
    log.set_up(verbose=verbose, quiet=not verbose)
    config = from_mapping(json.loads(os.environ.pop(CONFIG_VARIABLE)), "job")
    try:
        options = Options(
            fresh="--fresh" in sys.argv,
            resume=config.checkpoint is not None,
            verbose=verbose,
            quiet=not verbose,
        )
        code = serve(config, options)
    except GadeiError as error:
        os.write(say, f"{type(error).__name__}: {error}".encode())
        code = error.exit_code
    except (OSError, MemoryError) as error:
        os.write(say, f"JobFailed: the daemon could not start: {error}".encode())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
