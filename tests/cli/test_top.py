"""`gadei-ps top` in a terminal: what it shows, its keys, and that the terminal is restored."""

from __future__ import annotations

import fcntl
import io
import os
import re
import shlex
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text
from shell import Cli
from support import daemon, eventually, status
from support.terminal import Terminal

from gadei_ps.dashboard.data import Process, View
from gadei_ps.dashboard.screen import ENTER, LEAVE, Screen
from gadei_ps.dashboard.top import Top
from gadei_ps.job import paths
from gadei_ps.job.faults import Role
from gadei_ps.learners.client import Client
from gadei_ps.monitoring.reading import Job, State

TENSORS = [{"name": "w", "shape": [8]}]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Shown(Terminal):
    """top of one job in a terminal of 80 columns and 24 lines, and the lines that it shows.

    Only of this job: the keys must not reach those of other tests.
    """

    def __init__(self, cli: Cli, job: str, more: str = "") -> None:
        line = shlex.join([sys.executable, "-m", "gadei_ps", "top", job])
        super().__init__(cli.directory, f"stty rows 24 cols 80; {more} exec {line}")

    @property
    def lines(self) -> list[str]:
        """The screen as it is now."""
        found = [""] * 24
        whole = re.sub(r"\x1b[0-9;?[]*$", "", self.err)  # the rest of a sequence may come later
        for at, text in re.findall(r"\x1b\[(\d+);1H((?:(?!\x1b\[\d+;1H).)*)", whole, re.S):
            found[int(at) - 1] = CONTROL.sub("", text)
        return found

    def await_text(self, text: str) -> None:
        eventually(lambda: any(text in line for line in self.lines), what=lambda: self.err[-3000:])

    def settings(self) -> Any:
        """Return the modes of the terminal."""
        return termios.tcgetattr(self._master)


@pytest.fixture
def client(job_name: str) -> Iterator[Client]:
    with daemon(job_name, tensors=TENSORS), Client(job_name) as made:
        push(made)
        yield made


def push(client: Client) -> None:
    client.push({"w": np.ones(8, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def test_jobs_of_two_users_with_one_name() -> None:
    """Each can be selected, and no action meant for one of them reaches the other."""
    ours = os.getuid()
    top = Top(alone=False)
    top.take([View(Job("train", uid, State.RUNNING), "samples/s") for uid in (ours, ours + 1)])
    assert top.job is not None
    assert top.job.job.uid == ours
    top.press("c")
    assert top.asked is not None
    top.press("n")
    top.press("down")
    assert top.job.job.uid == ours + 1
    for key in "kcl":
        top.press(key)
        assert top.asked is None
        assert f"user {paths.user(ours + 1)}: act as that user" in top.message
    shown = [row[1].plain for row in top._job_lines(9).rows]
    assert shown == [paths.user(ours), paths.user(ours + 1)]


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> tuple[Top, list[tuple[Any, ...]]]:
    """The display of a job with the longest name and a server, and the actions that it performs."""
    done: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Top, "_perform", lambda _, *what: done.append(what))
    top, job = Top(), Job("j" * 48, os.getuid(), State.RUNNING)
    top.take([View(job, "samples/s", processes=[Process(Role.SERVER, 4711)])])
    top.press("tab")
    return top, done


def last_line(top: Top) -> str:
    shown = Console(file=io.StringIO(), width=80)
    with shown.capture() as made:
        shown.print(top.render(80, 24), end="")
    return made.get().splitlines()[-1].rstrip()


def test_only_y_is_a_yes(asking: tuple[Top, list[tuple[Any, ...]]]) -> None:
    top, done = asking
    for key in ("", "up", "tab", "enter", "escape", "back", "n", " ", "yY"):  # "": an unknown key
        top.press("k")
        assert last_line(top).endswith("(y/n)")
        top.press(key)
        assert (top.asked, done) == (None, []), key
    top.press("k")
    top.press("y")
    assert done == [("j" * 48, "kill", {"role": "server", "pid": "4711"})]


def test_the_reason_why_a_job_cannot_be_read_is_shown() -> None:
    top = Top()
    top.take([View(Job("train", os.getuid(), State.UNREADABLE, "its file is truncated"), "")])
    assert last_line(top) == "its file is truncated"
    top.message = "checkpoint of train ..."
    assert last_line(top) == top.message


def test_a_text_is_seen_while_it_is_typed(asking: tuple[Top, list[tuple[Any, ...]]]) -> None:
    top, done = asking
    top.press("l")
    for key in ("0", "up", ".", "", "page down", "2", "5", "7", "back"):
        top.press(key)
    assert last_line(top).endswith(": 0.25")
    top.press("enter")
    assert done == [("j" * 48, "set", {"settings": "lr=0.25"})]


@pytest.mark.usefixtures("compiled")
def test_keys(cli: Cli, client: Client, job_name: str) -> None:
    with Shown(cli, job_name) as top:
        top.await_text(job_name)
        eventually(lambda: push(client) or any("samples/s" in line for line in top.lines))
        mine = str(os.getpid())
        eventually(lambda: any("learner 0" in line and mine in line for line in top.lines))
        assert all(len(line) <= 80 for line in top.lines)
        top.type("l")
        top.await_text("learning rate of")
        top.type("0.5\r")
        top.await_text("lr 1 -> 0.5")
        assert status(job_name)["settings"]["lr"] == 0.5
        top.type("k")
        top.await_text("select a process first")
        top.type("\t\x1b[A\x1b[A\x1b[A\x1b[A")
        pid = status(job_name)["server_pid"]
        eventually(lambda: any(line.startswith("> watchdog") for line in top.lines))
        top.type("\x1b[B")
        eventually(lambda: any(line.startswith("> server") for line in top.lines))
        top.type("k")
        top.await_text(f"pid {pid}? (y/n)")
        top.type("n")
        top.type("k")
        top.await_text(f"pid {pid}? (y/n)")
        assert status(job_name)["server_pid"] == pid
        top.type("y")
        top.await_text(f"sent SIGKILL to the server of job {job_name}")
        eventually(lambda: status(job_name)["server_pid"] != pid)
        top.type("s")
        top.await_text("by speed")
        top.type("q")
        assert top.wait() == 0


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("how", ["ctrl-c", "SIGTERM", "closed"])
def test_the_end(how: str, cli: Cli, client: Client, job_name: str) -> None:
    """The terminal is as it was, however the display ends; without colours, too."""
    with Shown(cli, job_name, "echo ready; read line; export NO_COLOR=1;") as top:
        eventually(lambda: "ready" in top.err)
        before = top.settings()
        top.type("\n")
        top.await_text(job_name)
        assert ENTER in top.err
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", top.err), "a colour"
        if how == "closed":
            top.close()
            assert top.wait() == 128 + signal.SIGHUP
            return
        if how == "ctrl-c":
            top.interrupt()
        else:
            os.kill(top.process.pid, signal.SIGTERM)
        assert top.wait() == 128 + (signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        eventually(lambda: LEAVE in top.err)
        assert top.settings() == before


def test_only_lines_that_have_changed_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the display usable over a slow connection."""
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    stream = SimpleNamespace(isatty=lambda: True, fileno=lambda: slave)
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(sys, "stdout", stream)
    written = []
    with Screen() as screen:
        for text in ("one\ntwo", "one\ntwo", "one\nthree"):
            screen.draw(lambda *_, text=text: Text(text))
            os.write(slave, b"|")
            written.append(until_mark(master))
    os.close(master)
    os.close(slave)
    assert "one" in written[0] and "two" in written[0]
    assert written[1] == ""
    assert "one" not in written[2] and "three" in written[2]


def until_mark(fd: int) -> str:
    found = b""
    while not found.endswith(b"|"):
        found += os.read(fd, 1)
    return found[:-1].decode()


def test_without_a_job(cli: Cli, job_name: str) -> None:
    with Shown(cli, job_name, "export COLUMNS=80 LINES=24;") as top:  # as some shells do
        top.await_text(f"job {job_name} is not running")
        top.await_text("q quit")  # the help is not cut off
        top.type("kcl\t\x1b[A\x1b[5~x\x1b[Z")
        time.sleep(0.1)  # the keys are taken, and nothing has happened
        top.await_text("is not running")
        size = struct.pack("HHHH", 5, 40, 0, 0)
        cleared = top.err.count("\x1b[2J")
        fcntl.ioctl(top._master, termios.TIOCSWINSZ, size)
        eventually(lambda: top.err.count("\x1b[2J") > cleared)
        top.type("q")
        assert top.wait() == 0


def test_it_needs_a_terminal(cli: Cli) -> None:
    result = cli("top")
    assert result.code == 2
    assert "status --watch" in result.error
