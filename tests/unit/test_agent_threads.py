"""A thread of an agent that ends by a mistake ends the agent; troubles that last are told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gadei_ps.agents.troubles import Troubles

MISTAKEN = """
import threading, time
from gadei_ps.agents import agent, threads

def run(settings, told):
    threads.start("agent-rule", lambda: 1 / 0)
    time.sleep(100)

agent.read, agent.run = str, run
agent.main()
"""


def test_a_thread_that_ends_by_a_mistake_ends_the_agent() -> None:
    """Its group would wait for it for ever."""
    done = subprocess.run(
        [sys.executable, "-c", MISTAKEN], input="", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_trouble_is_told_once_if_it_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    for lasts_s, lines in ((1000.0, 0), (0.0, 2)):
        troubles = Troubles(lasts_s)
        for _ in range(2):
            for _ in range(3):
                troubles.note(1, "agent 1: is not there")
            assert troubles == {1: "agent 1: is not there"}
            troubles.over(1)
            assert not troubles
        assert capsys.readouterr().err == "gadei-ps: agent 1: is not there\n" * lines
