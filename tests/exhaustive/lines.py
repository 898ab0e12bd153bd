"""SIGKILL before a chosen line of Python, in whichever process of a job comes to it.

The processes are forks of the tests' process (support.quick). Each of them traces the lines of the
chosen files (sys.settrace) and counts them in memory that all share. There it also reads before
which line it is to die: a plan that can change while it runs.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from support import quick

from gadei_ps import errors
from gadei_ps.memory import build
from gadei_ps.server import loading, manager

ROOT = Path(__file__).parents[2]
# The role of a process by the program that it runs.
ROLES = {
    "gadei_ps.watchdog": "watchdog",
    "gadei_ps.server.manager": "server",
    "gadei_ps.server.fork_server": "fork-server",
    "gadei_ps.watchdog.checkpoint_writer": "checkpoint-writer",
    "gadei_ps": "command",
}
NAMES = tuple(ROLES.values())
LINES = 512  # of a file, at most
SLOTS = 8  # of the plan, 64 bits each
WHERE, LEFT, DIED, REFUSE, QUIET = range(5)
NOWHERE = -1

# What a statement may call without changing anything that another process sees.
HARMLESS = frozenset(
    re.findall(
        r"\w+",
        """
        int len bool float str range sorted min max sum any all isinstance issubclass list set
        dict tuple zip enumerate repr round next getattr hasattr iter reversed type super id
        format view word offset tolist tobytes items values keys get encode decode join split
        startswith endswith strip rstrip removeprefix removesuffix partition fromhex hex
        from_bytes to_bytes monotonic monotonic_ns time getpid geteuid getuid segment_name
        path_of flatnonzero astype copy reshape asdict fullmatch match with_name field cast
        debug info warning error exception frozenset deque append extend setdefault frombuffer
        setdiff1d uint32 uint64 zeros empty concatenate array Path partial where discard add
        load load32 exists lexists is_dir is_symlink is_socket stat fstat lstat samestat
        readlink iterdir alive start_ticks owner namespace
        """,
    )
)

# Modules of which a function of the same name as one of the traced files is still another one.
SYSTEM = frozenset({"_native", "fcntl", "mmap", "os", "posix_ipc", "resource", "shutil", "signal"})
# The traced files have functions of these names, and so have files, sockets, threads and children.
SHARED_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        close end kill mkdir open read register release rename remove rmdir run send start stop
        sync touch unlink wait write
        """,
    )
)
ERRORS = frozenset(name for name in vars(errors) if name[:1].isupper())


@dataclass(frozen=True, order=True)
class Line:
    """A line of a role's program. path: below the repository's root."""

    role: str
    path: str
    number: int

    def __str__(self) -> str:
        return f"{self.role} before {self.path}:{self.number}"


class Tracer:
    """Lines of the chosen files, in all processes of a job."""

    def __init__(self, files: Sequence[Path]) -> None:
        """files: at most LINES lines each."""
        self._files = sorted(files)
        self._size = len(self._files) * LINES
        self._at = {str(path): number * LINES for number, path in enumerate(self._files)}
        counts = len(NAMES) * self._size
        memory = mmap.mmap(-1, SLOTS * 8 + counts * 4)
        self._plan = memoryview(memory)[: SLOTS * 8].cast("q")
        self._counts = memoryview(memory)[SLOTS * 8 : SLOTS * 8 + counts * 4].cast("I")
        self._plan[WHERE] = NOWHERE
        trees = {path: ast.parse(path.read_text()) for path in self._files}
        traced = {
            node.name
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        harmless = (HARMLESS | traced) - SHARED_NAMES
        self._changing = {path: _changing(tree, harmless) for path, tree in trees.items()}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the processes that start in this block."""
        quick.STARTING.append(self._start)
        try:
            yield
        finally:
            quick.STARTING.remove(self._start)

    def _start(self, program: str) -> None:
        """Begin to trace in a process that is about to run its program."""
        role = ROLES.get(program)
        if role is None:
            sys.settrace(None)  # of the process that has forked this one
            return
        if role in ("server", "fork-server"):
            loading.load = lambda *_, **__: None  # a fork has all of it loaded
            if self._plan[REFUSE]:
                build.of_server = lambda: 1  # as if another build had been installed
        if role == "fork-server":  # its forks are servers as soon as they run the program of one
            serve = manager.main

            def serve_traced() -> None:
                self._trace("server")
                serve()

            manager.main = serve_traced
        self._trace(role)

    def _trace(self, role: str) -> None:
        """Give this process the role from the next call on."""
        begin = NAMES.index(role) * self._size
        local = {name: self._watch(begin + at) for name, at in self._at.items()}

        def enter(frame: FrameType, event: str, arg: Any) -> Any:
            return local.get(frame.f_code.co_filename)

        threading.settrace(enter)
        sys.settrace(enter)

    def _watch(self, begin: int) -> Any:
        """The trace function of one file."""
        counts, plan = self._counts, self._plan

        def look(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                at = begin + frame.f_lineno
                counts[at] += not plan[QUIET]
                if plan[WHERE] == at:
                    plan[LEFT] -= 1
                    if not plan[LEFT]:
                        plan[WHERE] = NOWHERE
                        plan[DIED] = os.getpid()
                        os.kill(os.getpid(), signal.SIGKILL)
            return look

        return look

    # -- the plan -------------------------------------------------------------------------------

    def arm(self, line: Line, time: int = 1) -> None:
        """The next process of the role that comes to the line for the n-th time dies before it."""
        self._plan[DIED] = 0
        self._plan[LEFT] = time
        at = self._at[str(ROOT / line.path)] + line.number
        self._plan[WHERE] = NAMES.index(line.role) * self._size + at

    def disarm(self) -> int:
        """Nobody dies any more. Returns the pid of the process that has; 0 if none."""
        self._plan[WHERE] = NOWHERE
        return int(self._plan[DIED])

    @contextlib.contextmanager
    def other_build(self) -> Iterator[None]:
        """Start servers of another build than the job in this block."""
        self._plan[REFUSE] = 1
        try:
            yield
        finally:
            self._plan[REFUSE] = 0

    # -- the counts -----------------------------------------------------------------------------

    def clear(self) -> None:
        """Begin to count."""
        self._plan[QUIET] = 0
        self._counts[:] = memoryview(bytes(len(self._counts) * 4)).cast("I")

    def stop(self) -> None:
        """Stop counting."""
        self._plan[QUIET] = 1

    def ran(self) -> dict[Line, int]:
        """Return how often each line has run that may change what other processes see."""
        found = {}
        for number, role in enumerate(NAMES):
            for path in self._files:
                at = number * self._size + self._at[str(path)]
                here = str(path.relative_to(ROOT))
                for line in self._changing[path]:
                    if times := self._counts[at + line]:
                        found[Line(role, here, line)] = times
        return found


def _changing(tree: ast.Module, harmless: Set[str]) -> list[int]:
    """Return lines that may change what another process sees, or a file: a part calls something
    that is not known to be harmless, or stores into an element.

    harmless: names of what may be called. A function of the traced files is harmless by itself: its
    own lines count.
    """
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for part in _own(node):
            if (isinstance(part, ast.Call) and not _is_harmless(part.func, harmless)) or (
                isinstance(part, ast.Subscript) and not isinstance(part.ctx, ast.Load)
            ):
                found.add(part.lineno)
    return sorted(found)


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """Return what belongs to a statement itself, not to the statements in it."""
    todo: list[ast.AST] = [statement]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if not isinstance(child, ast.stmt):
                yield child
                todo.append(child)


def _is_harmless(called: ast.expr, harmless: Set[str]) -> bool:
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name in HARMLESS or name in ERRORS:
        return True
    of = getattr(called, "value", None)
    return name in harmless and not (isinstance(of, ast.Name) and of.id in SYSTEM)
