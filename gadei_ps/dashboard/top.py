"""`gadei-ps top`: all jobs and their processes, full screen, with keys to act."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from gadei_ps.dashboard import actions
from gadei_ps.dashboard.data import Process, View, Watcher
from gadei_ps.dashboard.screen import Screen
from gadei_ps.errors import GadeiError
from gadei_ps.job import paths
from gadei_ps.monitoring.reading import State
from gadei_ps.show.counts import counted
from gadei_ps.show.tables import FittedTable

R = TypeVar("R")
INTERVAL_S: Final = 0.5
LEAST_JOBS: Final = 3  # lines for jobs, however many processes one has
MOST_TYPED: Final = 40  # characters
HELP: Final = "tab processes  ↑↓ select  s sort  k kill  c checkpoint  l learning rate  q quit"
SORTS: Final[dict[str, Callable[[View], Any]]] = {
    "name": lambda view: view.name,
    "speed": lambda view: -(view.speed or 0.0),
    "loss": lambda view: (view.loss is None, view.loss or 0.0),
    "learners": lambda view: -len(view.job.learners),
    "age": lambda view: view.job.metrics.get("started") or 0,
}
STATE_STYLE: Final = {
    State.RUNNING.value: "green",
    State.UNREADABLE.value: "red",
    State.ORPHANED.value: "red",
    State.DEAD.value: "dim",
}


@dataclass
class Asked:
    """A question in the last line: y or n, or a text."""

    text: str
    done: Callable[[str], None]
    takes_text: bool = False
    typed: str = ""


def _key(view: View) -> tuple[str, int]:
    return view.name, view.job.uid


@dataclass
class Top:
    """State of the display.

    alone: whether only jobs of one user are shown. only: name of the only job; None: all.
    """

    alone: bool = True
    only: str | None = None
    views: Sequence[View] = ()
    sort: str = "name"
    chosen: tuple[str, int] = ("", -1)
    """Name and user of the job that is selected: root sees jobs of several users."""
    pid: int = 0
    """The process that is selected; 0 if jobs are."""
    message: str = ""
    asked: Asked | None = None
    ended: bool = False

    # -- state ----------------------------------------------------------------------------------

    def take(self, views: Sequence[View]) -> None:
        """Show these jobs; the selection stays if it is still there."""
        self.views = sorted(views, key=lambda view: (SORTS[self.sort](view), view.name))
        if self.views and self.job is None:
            self.chosen = _key(self.views[0])
        if self.pid and self.pid not in [one.pid for one in self.processes]:
            self.pid = self.processes[0].pid if self.processes else 0

    @property
    def job(self) -> View | None:
        """The job that is selected."""
        return next((view for view in self.views if _key(view) == self.chosen), None)

    @property
    def processes(self) -> Sequence[Process]:
        """Those of the job that is selected."""
        return self.job.processes if self.job else ()

    # -- keys -----------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """React to a key."""
        if self.asked is not None:
            self._answer(self.asked, key)
        elif key in ("q", "escape"):
            self.ended = True
        elif key in ("up", "down", "page up", "page down"):
            self._move((-1 if "up" in key else 1) * (10 if "page" in key else 1))
        elif key in ("tab", "enter"):
            self.pid = 0 if self.pid or not self.processes else self.processes[-1].pid
        elif key == "s":
            names = list(SORTS)
            self.sort = names[(names.index(self.sort) + 1) % len(names)]
            self.take(self.views)
        elif self.job is not None and key in ("k", "c", "l"):
            if self.job.job.uid != paths.owner():
                # Actions name a job of this user: one of the same name would be changed.
                user = paths.user(self.job.job.uid)
                self.message = f"{self.job.name} is of user {user}: act as that user"
                return
            {"k": self._kill, "c": self._checkpoint, "l": self._set}[key](self.job)

    def _move(self, by: int) -> None:
        if self.pid:
            pids = [one.pid for one in self.processes]
            self.pid = pids[min(max(pids.index(self.pid) + by, 0), len(pids) - 1)]
        elif self.views:
            keys = [_key(view) for view in self.views]
            at = keys.index(self.chosen) if self.chosen in keys else 0
            self.chosen = keys[min(max(at + by, 0), len(keys) - 1)]

    def _answer(self, asked: Asked, key: str) -> None:
        if asked.takes_text and key not in ("enter", "escape"):
            if key == "back":
                asked.typed = asked.typed[:-1]
            elif len(key) == 1 and key.isprintable():  # others have names, or are unknown
                asked.typed = f"{asked.typed}{key}"[:MOST_TYPED]
            return
        self.asked = None
        if key == "escape" or (asked.takes_text and not asked.typed):
            self.message = ""
        elif asked.takes_text or key in ("y", "Y"):  # an unknown key is the empty text
            asked.done(asked.typed)

    def _kill(self, view: View) -> None:
        one = next((one for one in view.processes if one.pid == self.pid), None)
        if one is None:
            self.message = "select a process first: tab, then ↑ and ↓"
            return
        row = {} if one.row is None else {"row": str(one.row)}
        values = {"role": one.role.value, "pid": str(one.pid)} | row
        question = f"kill the {one.name} of {view.name}, pid {one.pid}? (y/n) "
        self.asked = Asked(question, lambda _: self._perform(view.name, "kill", values))

    def _checkpoint(self, view: View) -> None:
        question = f"write a checkpoint of {view.name}? (y/n) "
        self.asked = Asked(question, lambda _: self._perform(view.name, "checkpoint", {}))

    def _set(self, view: View) -> None:
        def done(typed: str) -> None:
            self._perform(view.name, "set", {"settings": f"lr={typed}"})

        lr = view.job.hyperparameters.get("lr")
        now = f" (now {lr:g})" if lr is not None else ""
        self.asked = Asked(f"learning rate of {view.name}{now}: ", done, takes_text=True)

    def _perform(self, job: str, action: str, values: dict[str, str]) -> None:
        """Act in a thread, while the display continues."""

        def act() -> None:
            try:
                self.message = actions.perform(job, action, values)
            except GadeiError as error:
                self.message = str(error)
            except Exception as error:
                self.message = f"{action}: {type(error).__name__}: {error}"

        self.message = f"{action} of {job} ..."
        threading.Thread(target=act, daemon=True).start()

    # -- display --------------------------------------------------------------------------------

    def render(self, columns: int, lines: int) -> RenderableType:
        """Lay out the display for a terminal of this size."""
        processes = self._process_lines(max(0, lines - LEAST_JOBS - 5))
        left = max(1, lines - len(processes.rows) - 5)
        asked = self.asked
        problem = self.job.job.problem if self.job else ""
        last = f"{asked.text}{asked.typed}" if asked else self.message or problem
        if asked and len(last) > columns:  # its end is where one answers
            last = f"…{last[1 - columns :]}"
        nothing = "no job is running" if self.only is None else f"job {self.only} is not running"
        parts: list[RenderableType] = [
            Text(f"gadei-ps top: {counted(len(self.views), 'job')}, by {self.sort}", style="bold"),
            self._job_lines(left) if self.views else Text(nothing),
            "",
        ]
        parts += [processes] if processes.rows else []
        style = "bold" if last else "dim"
        return Group(*parts, Text(last or HELP, style, no_wrap=True, overflow="ellipsis"))

    def _job_lines(self, most: int) -> FittedTable:
        numbers = ("model", "learners", "speed", "loss", "queue", "failovers", "age")
        names = ("job", "state", *numbers) if self.alone else ("job", "user", "state", *numbers)
        made = FittedTable(
            names,
            right=numbers,
            whole=("job", "state", "speed", "age"),
            dispensable=("model", "queue", "failovers", "age"),
        )
        chosen = [_key(view) == self.chosen for view in self.views]
        for view, is_chosen in _window(self.views, chosen, most):
            style = "" if not is_chosen else "bold" if self.pid else "reverse"
            cells: dict[str, str | Text] = {
                **view.cells(),
                "job": _chosen(view.name, is_chosen, style),
                "state": Text(view.state, style=STATE_STYLE.get(view.state, "yellow")),
            }
            made.add_row(*(cells[name] for name in names))
        return made

    def _process_lines(self, most: int) -> FittedTable:
        numbers = ("pid", "CPU", "memory", "speed", "applied", "queue", "staleness", "loss")
        made = FittedTable(
            ("process", *numbers),
            right=numbers,
            whole=("process",),
            dispensable=("applied", "memory", "queue"),
        )
        if self.job is None:
            return made
        chosen = [one.pid == self.pid for one in self.processes]
        for one, is_chosen in _window(self.processes, chosen, most):
            cells = self.job.process_cells(one)
            name = _chosen(one.name, is_chosen, "reverse" if is_chosen else "")
            made.add_row(name, *(cells.get(number, "") for number in numbers))
        return made


def _window(rows: Sequence[R], chosen: Sequence[bool], most: int) -> list[tuple[R, bool]]:
    """Return at most `most` rows around the chosen one, each with whether it is chosen."""
    at = chosen.index(True) if True in chosen else 0
    first = max(0, min(at - most // 2, len(rows) - most))
    return list(zip(rows, chosen, strict=True))[first : first + most]


def _chosen(name: str, is_chosen: bool, style: str) -> Text:
    return Text(f"{'>' if is_chosen else ' '} {name}", style=style)


def run(uid: int | None, job: str | None) -> None:
    """Show the display until the user ends it, or the terminal is closed. Raises UsageError.

    uid: as for Watcher. job: the only one to show; None: all.
    """
    watcher, top = Watcher(uid), Top(alone=uid is not None, only=job)
    with Screen() as screen, contextlib.suppress(EOFError, OSError):
        while not top.ended:
            views = watcher.look(job, top.chosen)
            top.take([view for view in views if view.job.state is not State.DEAD])
            screen.draw(top.render)
            for key in screen.keys(INTERVAL_S):
                top.press(key)
                screen.draw(top.render)
                if top.ended:
                    break
