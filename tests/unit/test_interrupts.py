"""A signal that ends a command is an exception, but not just anywhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gadei_ps.machine import interrupts
from gadei_ps.machine.interrupts import Interrupted


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, interrupts._on_signal)
    yield
    signal.signal(signal.SIGUSR1, before)


def come() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_at_once() -> None:
    with pytest.raises(Interrupted) as info:
        come()
    assert info.value.number == signal.SIGUSR1
    interrupts.check()


def test_held_until_the_end() -> None:
    done = []
    with pytest.raises(Interrupted), interrupts.held():
        with interrupts.held():
            come()
        done.append("the inner one does not let it through")
    assert done
    interrupts.check()


def test_held_until_it_is_asked_for() -> None:
    done = []
    with interrupts.held():
        come()
        with pytest.raises(Interrupted):
            interrupts.check()
        done.append("reported once")
    assert done


def test_the_first_is_told_and_the_second_raises() -> None:
    with pytest.raises(Interrupted), interrupts.first_told() as came:
        assert came() is None
        with interrupts.held():
            come()
        assert came() == signal.SIGUSR1, "reported, though it came while signals were held"
        come()
    with pytest.raises(Interrupted):
        come()
