"""Worker thread of the watchdog: makes and frees segments while the watchdog's own thread answers.

Zeroing gigabytes takes seconds, and so does giving them back. What is made is handed to the
watchdog's thread, which alone changes what others see. The thread lives only while there is work.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gadei_ps.memory import ring
from gadei_ps.memory.reserve import Cancelled, Progress
from gadei_ps.memory.segment import Segment
from gadei_ps.show.progress import making
from gadei_ps.watchdog.durations import WORKER_END_S


@dataclass(eq=False)
class Task:
    """Work for the thread. what: its result, in messages. make, done: see Worker.ask()."""

    what: str
    make: Callable[[Progress], Any]
    done: Callable[[Any, BaseException | None], None]
    progress: Progress = field(default_factory=Progress)
    result: Any = None
    error: BaseException | None = field(default_factory=Cancelled)

    def run(self) -> None:
        if self.progress.cancelled:
            return
        try:
            self.result = self.make(self.progress)
            self.error = None
        except BaseException as error:  # the watchdog's thread reports it to the client
            self.error = error.with_traceback(None)

    @property
    def facts(self) -> dict[str, Any]:
        """Progress in bytes, for the status and for waiting clients."""
        return {"what": self.what, "done": self.progress.done, "total": self.progress.total}

    @property
    def text(self) -> str:
        """Progress in words."""
        return making(self.facts)


class Worker:
    """A thread and its tasks, one after the other. All methods are for the watchdog's thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._tasks: deque[Task] = deque()  # the thread is at work on the first one
        self._thread: threading.Thread | None = None
        self._before = 0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector.register(self._bell, selectors.EVENT_READ, self._received)

    @property
    def moved(self) -> int:
        """Count that grows with every piece that is made."""
        return self._before + (self._tasks[0].progress.done if self._tasks else 0)

    @property
    def facts(self) -> dict[str, Any] | None:
        """The segment that is being made, and its progress; None if there is none."""
        return self._tasks[0].facts if self._tasks and self._tasks[0].what else None

    def ask(
        self,
        what: str,
        make: Callable[[Progress], Any],
        done: Callable[[Any, BaseException | None], None],
    ) -> Task:
        """Call make(progress) in the thread, then done(result, error) in this one.

        The error is reserve.Cancelled if the task was cancelled before its end.
        """
        task = Task(what, make, done)
        self._tasks.append(task)
        self._start_next()
        return task

    def drop(self, held: Segment) -> None:
        """Unmap a ring that nobody looks at any more, and free it if it has no name."""
        self.ask("", lambda _: ring.close(held), lambda *_: None)

    def _start_next(self) -> None:
        if self._thread is None and self._tasks:
            task = self._tasks[0]
            self._thread = threading.Thread(target=self._work, args=(task,), daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: the watchdog answers when it is done
                self._thread = threading.current_thread()
                self._work(task)

    def _work(self, task: Task) -> None:
        task.run()
        os.eventfd_write(self._bell, 1)

    def _received(self, _: int) -> None:
        os.eventfd_read(self._bell)
        if self._thread is not None:
            self._join()
            self._thread = None
            self._finish_first()
        self._start_next()

    def _join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        assert self._thread is not None
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _finish_first(self) -> None:
        task = self._tasks.popleft()
        self._before += task.progress.done
        task.done(task.result, task.error)

    def close(self) -> None:
        """Cancel everything and notify the clients. Waits for the current piece."""
        for task in self._tasks:
            task.progress.cancel()
        blocked = self._thread is not None and not self._join(WORKER_END_S)
        while self._tasks:
            self._finish_first()
        self._selector.unregister(self._bell)
        if not blocked:
            os.close(self._bell)
