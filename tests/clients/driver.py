"""A learner in Python on strings: the commands and answers of driver.c."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import Evicted, GadeiError, JobFailed, JobStopped, PushTimeout, UsageError
from gadei_ps.learners import client as client_module
from gadei_ps.learners.client import NONE, Client, rows_at, whole_at
from gadei_ps.memory import layout

CODES = {PushTimeout: -1, JobStopped: -2, Evicted: -3, JobFailed: -5}
FINISHED, ERROR, NONFINITE = -4, -6, 1
NAMES = {1: "float32", 2: "bfloat16", 3: "float16"}


def pattern(seed: int, values: int) -> np.ndarray:
    """Return values from -0.5 to 0.5 that all formats round, float32, as driver.c does."""
    bits = (np.arange(values, dtype=np.uint64) * 2654435761 + seed * 40503) % 2**32
    return ((bits >> np.uint64(8)).astype(np.float32) / np.float32(2**24)) - np.float32(0.5)


class Driver:
    def __init__(self) -> None:
        self.client: Client | None = None
        self.format = NAMES[1]
        self.slot = 0
        self.rows = False
        self.written: dict[str, Any] = {}
        self.second: threading.Thread | None = None
        self.for_second: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self.of_second: queue.SimpleQueue[object] = queue.SimpleQueue()

    @property
    def mine(self) -> Client:
        assert self.client
        return self.client

    # -- the model --------------------------------------------------------------------------------

    def wire(self, number: str) -> object:
        """Set the wire format before attach."""
        self.format = NAMES[int(number)]
        return 0

    def attach(self, job: str, *name: str) -> object:
        self.client = Client(None if job == "-" else job, name=" ".join(name), wire=self.format)
        return 0

    def detach(self) -> object:
        self.mine.detach()
        return 0

    def tensors(self) -> object:
        all_ = self.mine.model.tensors
        parts = [str(len(all_))]
        for one in all_:
            shape = "x".join(map(str, one.shape))
            parts.append(f"{one.name}:{int(one.role)}:{shape}:{one.start}:{one.count}")
        return " ".join(parts)

    def range(self, weights: np.ndarray) -> object:
        values = np.concatenate([one.ravel() for one in self.mine.model.views(weights).values()])
        return f"{values.min():.9g} {values.max():.9g}"

    def live(self) -> object:
        return self.range(self.mine.flat)

    def pull(self) -> object:
        return self.range(self.mine.pull())

    def pull_consistent(self, timeout: str) -> object:
        return self.range(self.mine.pull(consistent=True, timeout_s=seconds(timeout)))

    # -- push -------------------------------------------------------------------------------------

    def turn(self, timeout: str) -> object:
        self.mine.wait_turn(seconds(timeout))
        return 0

    def mini_batch(self, number: str, timeout: str) -> object:
        self.mine.wait_mini_batch(int(number), seconds(timeout))
        return 0

    def claim(self, timeout: str) -> object:
        self.slot = self.mine.claim(seconds(timeout)) + layout.PAYLOAD_AT
        self.rows = False
        self.written = {}
        return 0

    def claim_rows(self, timeout: str) -> object:
        self.claim(timeout)
        self.rows = True
        return 0

    def put(self, index: str, values: Callable[[int], np.ndarray]) -> object:
        tensor = self.mine.model.tensors[int(index)]
        gradient = np.ascontiguousarray(values(tensor.count), np.float32).reshape(tensor.shape)
        if self.rows:
            self.mine.append(self.slot, int(index), whole_at(_native.address(gradient)))
        else:
            self.written[tensor.name] = gradient
        return int(not np.isfinite(gradient).all())

    def write(self, index: str, value: str) -> object:
        return self.put(index, lambda count: np.full(count, float(value)))

    def write_bad(self, index: str) -> object:
        def values(count: int) -> np.ndarray:
            made = np.ones(count)
            made[-1] = np.nan
            return made

        return self.put(index, values)

    def write_pattern(self, index: str, seed: str) -> object:
        return self.put(index, lambda count: pattern(int(seed), count))

    def write_none(self, index: str) -> object:
        """A tensor without values."""
        tensor = self.mine.model.tensors[int(index)]
        if self.rows:
            self.mine.append(self.slot, int(index), NONE)
        else:
            self.written[tensor.name] = None
        return 0

    def write_rows(self, index: str, seed: str, *rows: str) -> object:
        tensor = self.mine.model.tensors[int(index)]
        width = tensor.count // tensor.rows
        indices = np.array([int(row) for row in rows], np.int64)
        values = pattern(int(seed), len(rows) * width)
        where = rows_at(_native.address(indices), _native.address(values), len(rows))
        self.mine.append(self.slot, int(index), where)
        return 0

    def publish(self, loss: str, samples: str, scale: str) -> object:
        if not self.rows:
            self.mine.write_named(self.slot, self.written)
        self.mine.publish(loss=float(loss), samples=int(samples), rate_scale=float(scale))
        return 0

    def whole(self, values: Callable[[int], np.ndarray]) -> np.ndarray:
        """A whole gradient; what lies between the tensors is not a number: nobody reads it."""
        gradient = np.full(self.mine.model.elements, np.nan, np.float32)
        for tensor in self.mine.model.tensors:
            gradient[tensor.start : tensor.start + tensor.count] = values(tensor.count)
        return gradient

    def push_flat(self, gradient: np.ndarray, timeout: str) -> object:
        self.mine.push(gradient, loss=0.5, samples=1, timeout_s=seconds(timeout))
        return int(int(self.mine.last_frame[0]["flags"]) & layout.NONFINITE and NONFINITE)

    def push(self, value: str, timeout: str) -> object:
        return self.push_flat(self.whole(lambda count: np.full(count, float(value))), timeout)

    def push_pattern(self, seed: str, timeout: str) -> object:
        return self.push_flat(self.whole(lambda count: pattern(int(seed), count)), timeout)

    def push_sparse(self, seed: str, every: str, timeout: str) -> object:
        """Only each so manieth row of a tensor differs from zero."""
        gradient = self.whole(lambda count: pattern(int(seed), count))
        for tensor in self.mine.model.tensors:
            part = gradient[tensor.start : tensor.start + tensor.count].reshape(tensor.rows, -1)
            part[np.arange(tensor.rows) % int(every) != 0] = 0
        return self.push_flat(gradient, timeout)

    def flood(self) -> object:
        gradient = self.whole(lambda count: np.ones(count))
        answer(0)
        while True:
            self.mine.push(gradient, loss=0.5, samples=1)

    def wanted(self) -> object:
        return int(self.mine.wanted)

    def wave(self) -> object:
        return self.mine.wave

    def give_up(self, timeout: str) -> object:
        self.mine.abandon(timeout_s=seconds(timeout))
        return 0

    def pause(self) -> object:
        self.paused = self.mine.pause()
        self.paused.__enter__()
        return 0

    def resume(self) -> object:
        self.paused.__exit__(None, None, None)
        return 0

    def applied(self, timeout: str) -> object:
        self.mine.wait_applied(timeout_s=seconds(timeout))
        return 0

    def published(self) -> object:
        return self.mine.published

    def version(self) -> object:
        return self.mine.current_version

    def stopping(self) -> object:
        return int(self.mine.stopping)

    # -- work -------------------------------------------------------------------------------------

    def work(self, batches: str, epochs: str, seed: str) -> object:
        self.mine.set_work(int(batches), 1, int(epochs), int(seed))
        return 0

    def take(self, timeout: str) -> object:
        taken = self.mine.take_batch(seconds(timeout))
        if taken is None:
            return f"{FINISHED} no more"
        return f"0 {taken >> 32} {taken & 0xFFFFFFFF}"

    def forked(self, *command: str) -> object:
        """Return the answer that a child process of this one gets."""
        sys.stdout.flush()
        child = os.fork()
        if not child:
            answer(do(self, command))
            os._exit(0)
        os.waitpid(child, 0)
        return None

    # -- a second thread --------------------------------------------------------------------------

    def beside(self, *command: str) -> object:
        """Let a second thread run a command; `joined` reports its answer."""
        if self.second is None:
            self.second = threading.Thread(target=self.obey, daemon=True)
            self.second.start()
        self.for_second.put(command)
        return 0

    def obey(self) -> None:
        while command := self.for_second.get():
            self.of_second.put(do(self, command))

    def joined(self) -> object:
        return self.of_second.get()

    def over(self) -> object:
        """End the second thread."""
        assert self.second
        self.for_second.put(())
        self.second.join()
        self.second = None
        return 0

    def many(self, count: str) -> object:
        """Push so many times and return how many were published; refused ones are not repeated."""
        gradient = self.whole(lambda count: np.ones(count))
        done = 0
        for _ in range(int(count)):
            with contextlib.suppress(UsageError):
                self.mine.push(gradient)
                done += 1
        return done

    def until_refused(self) -> object:
        """Push until a push is refused; return how many were published, and why not more."""
        gradient = self.whole(lambda count: np.ones(count))
        done = 0
        while True:
            try:
                self.mine.push(gradient)
            except GadeiError as error:
                return f"{done} {type(error).__name__}"
            done += 1

    def poke(self) -> object:
        ctypes.memset(self.mine.flat.ctypes.data, 0xFF, 1)
        return 0


def seconds(timeout: str) -> float | None:
    return None if int(timeout) < 0 else int(timeout) / 1000


def answer(what: object) -> None:
    if what is not None:
        print(what, flush=True)


def do(driver: Driver, words: Sequence[str]) -> object:
    try:
        return getattr(driver, words[0])(*words[1:])
    except GadeiError as error:
        return f"{CODES.get(type(error), ERROR)} {error}"


def main() -> None:
    driver = Driver()
    if "hurried" in sys.argv:  # as hurried.h
        client_module.JOB_GONE_S = 0.5
    for line in sys.stdin:
        answer(do(driver, line.split()))
    if driver.client:
        driver.client.detach()


if __name__ == "__main__":
    main()
