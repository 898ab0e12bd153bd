"""Ctrl-C at any instant of a call: the learner continues, or leaves no place taken behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import daemon, eventually, status
from support.torch_models import one_thread as one_thread
from torch import nn

from gadei_ps.job.control import LastingConnection, Measured, Status
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import Optimizer

ROUNDS = 12
TURNS = 2000
HOW: dict[str, Any] = {"kind": "adam", "lr": 1e-3}


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    """Call a function, with Ctrl-C after a random time below `most_s`; return whether it came."""
    chance = random.Random(7)
    heard = armed = False

    def interrupt(*_: object) -> None:
        nonlocal heard
        heard = True
        if armed:
            raise KeyboardInterrupt

    def again(what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            lost(what)
        elif armed:  # later: what is raised in here is lost, too
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGUSR1)).start()

    before = signal.signal(signal.SIGUSR1, interrupt)
    # What is raised in a finalizer, or in a callback of the garbage collector, is lost.
    # Hypothesis has one of these, torch some of those: the user would press the keys again.
    lost, sys.unraisablehook = sys.unraisablehook, again

    def call(function: Callable[[], object], most_s: float) -> bool:
        nonlocal heard, armed
        heard, came = False, False
        wait_s = chance.random() * most_s
        timer = threading.Timer(wait_s, os.kill, (os.getpid(), signal.SIGUSR1))
        try:
            try:
                armed = True  # before it may come: batches() continues until then
                timer.start()
                function()
            finally:
                armed = False
        except KeyboardInterrupt:
            came = True
        eventually(lambda: heard)
        timer.join()
        return came

    yield call
    signal.signal(signal.SIGUSR1, before)
    sys.unraisablehook = lost


def _step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(8, 200)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("sync", ["asp", "bsp"])
@pytest.mark.parametrize("view", [True, False], ids=["view", "copy"])
def test_each_call(sync: str, view: bool, job_name: str, interrupted: Any) -> None:
    how = HOW | {"view": view}
    with daemon(job_name, sync=sync, optimizer={}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loaded state is another than the job's by then
        model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
        optimizer = Optimizer(model, job_name, **how)
        _step(model, optimizer)
        saved = optimizer.state_dict()
        came = 0
        calls: dict[str, tuple[Callable[[], object], float]] = {
            "step": (lambda: _step(model, optimizer), 0.004),
            "assign": (lambda: optimizer.assign(model.state_dict()), 0.004),
            "state_dict": (lambda: optimizer.state_dict(), 0.02),
            "load_state_dict": (lambda: optimizer.load_state_dict(saved), 0.006),
            "batches": (
                lambda: [_step(model, optimizer) for _ in optimizer.batches(64, 8, 10**6)],
                0.01,
            ),
        }
        for call, most_s in calls.values():
            for _ in range(ROUNDS):
                came += interrupted(call, most_s)
                for _ in range(2):
                    _step(model, optimizer)
                assert torch.is_grad_enabled()
            optimizer.assign(model.state_dict())
            optimizer.load_state_dict(saved)
        optimizer.client.wait_applied()
        assert len(status(job_name)["learners"]) == 1
        for _ in range(ROUNDS):
            came += interrupted(optimizer.close, 0.003)
            optimizer.close()
            model[0].weight.data += 0  # the memory is the model's own
            eventually(lambda: not status(job_name)["learners"])
            optimizer = Optimizer(model, job_name, **how)
            _step(model, optimizer)
        optimizer.close()
        eventually(lambda: not status(job_name)["learners"])
        assert came > ROUNDS


# One that comes when a socket was made and nothing holds it yet leaves the socket to the collector.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_attach(job_name: str, interrupted: Any) -> None:
    """Interrupt attach before and after the caller has the client: only then is it a learner."""
    came = 0
    with daemon(job_name):
        first = Client(job_name, tensors={"w": np.zeros(1000, np.float32)})
        for _ in range(4 * ROUNDS):
            made: list[Client] = []
            came += interrupted(lambda made=made: made.append(Client(job_name)), 0.006)
            eventually(lambda made=made: len(status(job_name)["learners"]) == 1 + len(made))
            for one in made:
                one.detach()
        first.detach()
    assert came


def test_a_reply_that_was_not_awaited(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request gets its own reply, and not the one before."""
    with daemon(job_name):
        asked = LastingConnection(job_name)
        with monkeypatch.context() as patch:
            patch.setattr(asked._connection, "_read", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                asked.request(Status())
        assert set(asked.request(Measured(values={"accuracy": 0.5}))) == {"v", "ok"}
        assert "phase" in asked.request(Status())
        asked.close()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_call_that_is_interrupted_gives_back_its_turn(job_name: str) -> None:
    """Interrupt at every instruction: the interrupts are a few microseconds apart."""
    chance = random.Random(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # one that comes in a callback of the collector would be lost, and no other comes
    try:
        with daemon(job_name), Client(job_name, tensors={"w": np.zeros(9, np.float32)}) as client:
            for _ in range(TURNS):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 5e-5 + chance.random() * 1e-4)
                    while True:
                        with client._pushing:
                            pass
                with client._pushing:
                    pass
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
