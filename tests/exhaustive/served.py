"""A job whose processes may die anywhere, and learners whose gradients are counted.

Its optimizer is SGD with a rate of 1 and all gradients are ones, so each one that is applied, and
each superstep, subtracts 1 from every weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from counted import NO_WATCHDOG, PATIENCE_S, VALUES, Learner
from support import config, gone, live_weights, segments

from gadei_ps.errors import (
    CheckpointError,
    ControlError,
    NotSaved,
)
from gadei_ps.job import control, paths
from gadei_ps.job.control import SetOptimizer, SetSync, Status, StopJob
from gadei_ps.job.faults import Processes, Target
from gadei_ps.learners import attach
from gadei_ps.machine import process
from gadei_ps.memory import layout, presence, segment, shm
from gadei_ps.server import manager
from gadei_ps.storage import checkpoint
from gadei_ps.watchdog import restart, servers, supervisor

TENSORS = [{"name": "w", "shape": [VALUES]}]


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Shorten the waits of processes in this block; what they do is the same."""
    delay = restart.delay

    def soon(exits: Any, now: float, policy: restart.Policy) -> float:
        return delay(exits, now, dataclasses.replace(policy, limit=10_000)) / 100

    with contextlib.ExitStack() as these:
        for module, name, value in (
            (manager, "ORPHAN_LOOK_S", 0.05),
            (manager, "UNNAMED_S", 1.0),
            (servers, "FILES_INTERVAL_S", 0.02),
            (servers, "REFUSED_RETRY_S", 0.2),
            (supervisor, "TICK_S", 0.02),
            (supervisor, "SLOW_TICK_S", 0.05),
            (supervisor, "LEAVE_TIMEOUT_S", 0.1),
            (presence, "HALF_MADE_S", 0.1),
            (attach, "DETACH_TIMEOUT_S", 0.05),
            (restart, "delay", soon),
        ):
            these.enter_context(mock.patch.object(module, name, value))
        yield


# -- the job --------------------------------------------------------------------------------------


class Job:
    """A job, served again whenever its watchdog has died."""

    def __init__(self, name: str, directory: Path, **how: Any) -> None:
        """directory: for its log and its checkpoints."""
        self.name = name
        self.checkpoints = directory / f"{name}.saved"
        saved = {"every_s": 0, "directory": str(self.checkpoints), "keep": 2}
        given = {"tensors": TENSORS, "shards": 2, "checkpoint": saved, "hang_s": 20.0}
        self.config = config(name, **(given | how))
        self.learners: list[Learner] = []
        self.buried = 0  # gradients of learners that are gone
        self.base = 0  # version of the checkpoint from which the job has continued
        self.assigned = 0  # assignments among the gradients, without a sample
        self.damaged = 0  # rings, each with an invalid gradient
        self.saves = True  # a checkpoint when it stops
        self.ended: int | None = None  # exit code of a watchdog that was not killed
        self.flags: tuple[str, ...] = ()  # of the watchdogs to come
        self.restores: Path | None = None  # they are of `gadei-ps restore` with this checkpoint
        self._log = directory / f"{name}.log"
        self._process: Any = None
        self._said = -1
        self.refusal = ""  # the error for which a start may be refused
        self._alone = False

    def __repr__(self) -> str:
        return f"{self.name}: {self._log.read_text()[-3000:] if self._log.exists() else ''}"

    # -- the watchdog -----------------------------------------------------------------------------

    def start(self, *flags: str) -> None:
        """Start a watchdog; do not wait for it."""
        ours, theirs = socket.socketpair()
        read, write = ours.detach(), theirs.detach()
        command = process.module_command("gadei_ps.watchdog", str(write))
        if self.restores is not None:
            command = process.module_command("gadei_ps", "restore", str(self.restores))
        else:
            order = {"config": json.loads(self.config.model_dump_json()), "verbose": True}
            order |= {"fresh": "--fresh" in flags, "keep": "--keep" in flags, "learners": 1}
            order["survives"] = False
            os.write(read, json.dumps(order).encode() + b"\n")
        with open(self._log, "ab") as log:
            self._process = process.spawn(
                command,
                stdout=log,
                stderr=log,
                pass_fds=[write],
                how=signal.SIGTERM,
            )
        os.close(write)
        if self._said >= 0:
            os.close(self._said)
        self._said = read
        self.ended = None

    def watch(self) -> None:
        """Start another watchdog if the last one was killed, or was refused the name."""
        if self.ended is not None or self._alone:
            return
        code = None if self._process is None else self._process.poll()
        if self._process is None or (code is not None and code < 0):
            self.start(*self.flags)
        elif code is not None:
            output = os.read(self._said, 4096).decode().strip()
            in_use = "JobInUse" in output or (self.restores and code == 1)
            if in_use:  # what a dead one was making is distinguished from the living by its age
                self.start(*self.flags)
            else:
                self.ended = code
                assert not output or (self.refusal and self.refusal in output), (
                    f"{output}\n{self!r}"
                )

    def serves(self) -> bool:
        """Return whether a watchdog answers; start one first if there is none."""
        self.watch()
        if self.ended is not None:
            return False
        try:
            answer = control.ask(self.name, Status(), 5.0)
        except NO_WATCHDOG:
            return False
        return bool(answer["watchdog_pid"] == self._process.pid)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for a condition while the job is served."""
        end = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            self.watch()
            if time.monotonic() > end:
                raise AssertionError(f"not within {PATIENCE_S} s: {what}\n{self!r}")
            time.sleep(0.002)
        return value

    def up(self) -> None:
        """Served by a watchdog that answers and two servers that are ready."""
        self.until(self.serves, "a watchdog answers")
        if not hasattr(self, "processes"):
            self.look()
        self.until(lambda: self.processes.server(ready=True), "a server serves")
        if self.config.standby:
            self.until(self.processes.standby, "a server stands by")

    def look(self) -> None:
        """Map the job's memory."""
        self.processes = Processes(self.name)
        self.control = self.processes.control
        self.roster = self.control["roster"]

    def ask(self, message: Any) -> dict[str, Any]:
        """Ask until a watchdog answers."""
        end = time.monotonic() + PATIENCE_S
        while True:
            self.until(self.serves, "a watchdog answers")
            try:
                return control.ask(self.name, message, PATIENCE_S)
            except NO_WATCHDOG:
                if time.monotonic() > end:
                    raise

    @property
    def status(self) -> dict[str, Any]:
        return self.ask(Status())

    # -- deaths -----------------------------------------------------------------------------------

    def kill_watchdog(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def without_watchdog(self) -> Iterator[None]:
        """Kill the watchdog; none is started in this block."""
        self._alone = True
        try:
            self.kill_watchdog()
            yield
        finally:
            self._alone = False

    def kill(self, target: Target | None) -> None:
        """SIGKILL for one of its processes, if it lives."""
        if target is not None and target.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGKILL)
            self.until(lambda: gone(target.pid), f"{target} is dead")

    def kill_all(self) -> None:
        self.kill_watchdog()
        for pid in presence.server_pids(self.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + PATIENCE_S
            while not gone(pid) and time.monotonic() < end:
                time.sleep(0.001)

    # -- learners ---------------------------------------------------------------------------------

    def hire(self, **how: Any) -> Learner:
        one = Learner(self, **how)
        self.learners.append(one)
        return one

    def remove(self, one: Learner, how: Callable[[], None]) -> None:
        """It detaches or dies; what it has published counts."""
        self.learners.remove(one)
        how()
        self.buried += one.published

    def retired(self, one: Learner) -> bool:
        """Return whether its row is free."""
        return int(self.roster[one.row]["retired"]) >= one.generation

    def fire(self) -> None:
        for one in list(self.learners):
            self.remove(one, one.kill)

    # -- rest -------------------------------------------------------------------------------------

    @property
    def published(self) -> int:
        return self.base + self.buried + sum(one.published for one in self.learners)

    def settle(self) -> None:
        """Check, once everything is at rest, that each gradient counts once and that nothing is
        left that nobody uses."""
        self.up()
        for one in self.learners:
            one.once()  # learners continue
        self.until(self._rows_are_free, "the rows of those that left are free")
        self.until(self._counted, "counts")
        self.until(lambda: not self._litter(), "segments that nobody uses are removed")
        self._check()

    def _rows_are_free(self) -> bool:
        held = np.flatnonzero(self.roster["retired"] != self.roster["generation"]).tolist()
        return set(held) <= {one.row for one in self.learners}

    def _litter(self) -> set[str]:
        rings = [f"ring.{one.row}" for one in self.learners]
        used = {
            shm.segment_name(self.name, part) for part in ("control", "weights", "state", *rings)
        }
        return set(segments(self.name)) - used

    def _counted(self) -> bool:
        now = self.status
        done = now["gradients_applied"] + now["gradients_dropped"]
        return bool(done + self.assigned == self.published)

    def _check(self) -> None:
        now = self.status
        steps = self._state()["record"]["steps"][: int(self.control["shards"])]
        weights = live_weights(self.name)[:VALUES]
        applied = now["gradients_applied"] + self.assigned
        wrong = {
            "refused": now["gradients_refused"] > self.damaged or now["parts_torn"],
            "counts": len({now["version"], applied, now["samples"] + self.assigned}) > 1,
            "steps": (steps != steps[0]).any(),
            "weights": (weights != -float(steps[0])).any(),
            "all": not now["supersteps"] and not int(steps[0]) == applied == self.published,
        }
        if any(wrong.values()):
            for long in ("learners", "work", "model", "last_checkpoint"):
                del now[long]
            raise AssertionError(
                f"{wrong}: published {self.published}, steps {steps}, weights "
                f"{weights.min()} to {weights.max()}, {now}\n{self!r}"
            )

    def _state(self) -> np.void:
        name = shm.segment_name(self.name, "state")
        kind = layout.SegmentKind.STATE
        return segment.attach(name, kind, writable=False).view(layout.STATE)

    def change(self, model: str) -> None:
        """Change the synchronization model and wait until it is in force."""
        before = self.status["sync"]

        def changed() -> bool:
            now = self.status
            assert now["sync"] in (before, model), f"{now['sync']} {self!r}"
            if now["sync"] == model and now["sync_wanted"] is None:
                return True
            if now["sync_wanted"] is None:
                with contextlib.suppress(ControlError):  # it is just changing
                    self.ask(SetSync(sync=model))
            return False

        self.until(changed, f"the model is {model}")

    def limit(self, norm: float) -> None:
        """Change the norm of gradients, which none of them reaches; wait until it is in force."""
        before = self.status["settings"]["clip_norm"]

        def changed() -> bool:
            now = self.status
            has = now["settings"]["clip_norm"]
            assert has in (before, norm), f"{has} {self!r}"
            if has != norm:
                self.ask(SetOptimizer(values={"clip_norm": norm}))
            return bool(has == norm and not now["settings_pending"])

        self.until(changed, f"the norm is {norm:g}")

    # -- the end ----------------------------------------------------------------------------------

    def lose_memory(self) -> None:
        """All its processes die and its segments are removed: only checkpoints are left."""
        self.kill_all()
        for name in segments(self.name):
            segment.unlink(name)
        self.base, self.buried = self.published, 0
        self.forget()

    def forget(self) -> None:
        """Drop its memory and expect another one."""
        del self.processes

    def command(self, *words: str) -> None:
        """Run a command of gadei-ps, again if it is killed, until it has done its work."""
        while True:
            with open(self._log, "ab") as log:
                child = process.spawn(
                    process.module_command("gadei_ps", *words), stdout=log, stderr=log
                )
            code = child.wait()
            if code >= 0:
                return

    def gone(self) -> None:
        """It has ended without a last checkpoint."""
        self.ended = 0
        self.saves = False

    def ends(self) -> bool:
        """Return whether its watchdog has ended by itself; ask for a stop until then."""
        with contextlib.suppress(*NO_WATCHDOG, CheckpointError, ControlError, NotSaved):
            if self.serves():
                control.ask(self.name, StopJob(drain=True, timeout_s=0.1), PATIENCE_S)
        return self.ended is not None

    def end(self) -> None:
        """Stop it, if it runs, and check that its last checkpoint has all gradients."""
        if self.ended is None:
            self.settle()
            self.stop()
        if self.saves:
            snapshot, _, problems = checkpoint.newest(self.checkpoints)
            assert not problems, problems
            assert snapshot is not None, f"no checkpoint {self!r}"
            assert snapshot.version == self.published, f"{snapshot.version} {self!r}"
            np.testing.assert_array_equal(snapshot.weights[:VALUES], -float(snapshot.version))
        self.nothing_left()

    def stop(self) -> None:
        """Ask the job to stop until it is gone; again if its last checkpoint fails."""
        end = time.monotonic() + PATIENCE_S
        while self.ended != 0:
            if self.ended:
                self.start()
            self.ends()
            assert time.monotonic() < end, f"it does not stop: {self!r}"
            time.sleep(0.002)

    def nothing_left(self) -> None:
        """Neither segments nor files in the runtime directory."""
        left = [*segments(self.name), *paths.directory().glob(f"*{self.name}*")]
        assert not left, f"{left} {self!r}"

    def drop(self) -> None:
        """End everything, in whatever state it is."""
        for one in self.learners:
            one.kill()
        self.learners.clear()
        self.kill_all()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1
        for name in segments(self.name):
            segment.unlink(name)
        for path in paths.directory().glob(f"*{self.name}*"):
            path.unlink(missing_ok=True)
