"""Streams of server-sent events: one look a second for all pages that show the same job."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool

from gadei_ps.dashboard import series
from gadei_ps.dashboard.data import View, Watcher
from gadei_ps.job import paths
from gadei_ps.monitoring.following import Follower
from gadei_ps.monitoring.reading import State

INTERVAL_S = 1.0
MOST_STREAMS = 64
WAITING = 8  # messages that a slow page may be behind; then it has to connect again
SPARK_POINTS = 60
SPEEDS = ("samples_per_s", "gradients_per_s")  # a history has one of them
Render = Callable[..., str]


class Feed(Protocol):
    """A source of messages, which is asked once a second while a page shows it."""

    def look(self) -> dict[str, Any] | None:
        """Return what has changed since the last call; None at the end. Runs in a thread."""

    def whole(self) -> dict[str, str]:
        """Return all parts of a page, by their ids, for one that has just been opened."""


class Fragments:
    """Parts of a page, by their ids, and which of them have changed."""

    def __init__(self) -> None:
        self.all: dict[str, str] = {}

    def changed(self, new: dict[str, str]) -> dict[str, str]:
        """Return those that differ from the last ones."""
        found = {name: html for name, html in new.items() if self.all.get(name) != html}
        self.all = self.all | new
        return found


class _Known:
    """Recent values of a job for the table of all jobs, and its last failover."""

    def __init__(self, view: View) -> None:
        self.speed: deque[float] = deque(maxlen=SPARK_POINTS)
        self.loss: deque[float] = deque(maxlen=SPARK_POINTS)
        self.failover: tuple[float, float] | None = None
        """Time and duration (s, ms)."""
        self._history: Follower | None = None
        if view.job.history:
            self._history = Follower(view.job.history)
            self._take(self._history.read())

    def look(self, view: View) -> None:
        """Add what is new."""
        if self._history is not None:
            self._take(one for one in self._history.read() if "event" in one)
        for values, value in ((self.speed, view.speed), (self.loss, view.loss)):
            if value is not None:
                values.append(value)

    def _take(self, lines: Iterable[series.Line]) -> None:
        there = list(lines)
        found = series.columns(there)["series"]
        for values, names in ((self.speed, SPEEDS), (self.loss, ("loss",))):
            for name in names:
                values.extend(one for one in found.get(name, ()) if one is not None)
        for one in there:
            ms = one.get("ms")
            if one.get("event") == "failover" and isinstance(ms, int | float):
                self.failover = float(one["time"]), float(ms)


class AllJobs:
    """The table of all jobs, with sparklines."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._watcher = Watcher(paths.owner())
        self._known: dict[str, _Known] = {}
        self._fragments = Fragments()

    def look(self) -> dict[str, Any] | None:
        """Look at all jobs that have a process."""
        views = [view for view in self._watcher.look() if view.job.state is not State.DEAD]
        self._known = {view.name: self._known.get(view.name) or _Known(view) for view in views}
        for view in views:
            self._known[view.name].look(view)
        html = self._render("_jobs.html", views=views, known=self._known)
        return {"html": self._fragments.changed({"jobs": html})}

    def whole(self) -> dict[str, str]:
        """Return the table."""
        return self._fragments.all


class OneJob:
    """The page of one job: numbers, processes, points for the charts, and events."""

    def __init__(self, job: str, render: Render) -> None:
        self._job = job
        self._render = render
        self._watcher = Watcher(paths.owner())
        self._fragments = Fragments()
        self._history: Follower | None = None
        self._version = -1

    def look(self) -> dict[str, Any] | None:
        """Look at the job; None if it has ended."""
        view = self._watcher.look_at(self._job)
        if view is None or view.job.state is State.DEAD:
            return None
        if self._history is None and view.job.history:
            self._history = Follower(view.job.history)
            self._history.read()  # the page has these lines
        lines = self._history.read() if self._history else []
        points = [
            {"time": one["time"], "version": one.get("version"), "values": found}
            for one in lines
            if (found := series.scalars(one))
        ]
        events = [made for one in lines if (made := series.event(one)) is not None]
        message: dict[str, Any] = {
            "html": self._fragments.changed(self.fragments(view)),
            "points": points + self._point(view),
            "events": events,
        }
        return {name: value for name, value in message.items() if value}

    def _point(self, view: View) -> list[dict[str, Any]]:
        version = int(view.job.metrics["version"] or 0)
        if version == self._version or view.speed is None:
            return []
        self._version = version
        found = {
            "loss": view.loss,
            view.unit.replace("/s", "_per_s"): view.speed,
            "staleness": view.staleness,
            "queue": view.queue,
            "learners": len(view.job.learners),
        }
        values = {name: value for name, value in found.items() if value is not None}
        return [{"time": round(time.time(), 2), "version": version, "values": values}]

    def fragments(self, view: View) -> dict[str, str]:
        """Render the parts of the page that change."""
        names = ("facts", "processes", "histogram")
        return {name: self._render(f"_{name}.html", view=view) for name in names}

    def whole(self) -> dict[str, str]:
        """Return all parts."""
        return self._fragments.all


class Channel:
    """A feed and the pages that listen to it."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.listeners: set[asyncio.Queue[bytes | None]] = set()
        self.ended = False
        """Whether the feed has come to its end."""

    async def run(self) -> None:
        """Ask the feed once a second, until it has ended or no page listens any more."""
        while self.listeners:
            began = time.monotonic()
            message = await run_in_threadpool(self.feed.look)
            if message is None:
                self.ended = True
                return
            data = _event("update", message)
            for queue in list(self.listeners):
                if queue.full():
                    self.close(queue)  # the page does not read; it connects again
                else:
                    queue.put_nowait(data)
            await asyncio.sleep(max(0.1, INTERVAL_S - (time.monotonic() - began)))

    def close(self, queue: asyncio.Queue[bytes | None]) -> None:
        """End the stream of a page."""
        self.listeners.discard(queue)
        if queue.full():
            queue.get_nowait()
        queue.put_nowait(None)


def _event(kind: str, message: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), series.compact(message))


class Live:
    """All streams of the dashboard, bounded in number."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0

    @property
    def is_full(self) -> bool:
        return self._count >= MOST_STREAMS

    async def stream(self, name: str, make: Callable[[], Feed]) -> AsyncIterator[bytes]:
        """Yield the messages of a feed. name: the same for pages that share it."""
        self._count += 1
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(make())
            task = asyncio.create_task(self._run(name, channel))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        channel.listeners.add(queue)
        try:
            yield b"retry: 2000\n\n"
            if whole := channel.feed.whole():
                yield _event("update", {"html": whole})
            while (data := await queue.get()) is not None:
                yield data
            if channel.ended:
                yield _event("ended", {})
        finally:
            self._count -= 1
            channel.listeners.discard(queue)

    async def _run(self, name: str, channel: Channel) -> None:
        try:
            await channel.run()
        finally:
            del self._channels[name]
            for queue in list(channel.listeners):
                channel.close(queue)
