"""Streams of server-sent events: one look a second for all pages that show the same job."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from starlette.concurrency import run_in_threadpool

from gadei_ps.dashboard.data import View, Watcher
from gadei_ps.job import paths
from gadei_ps.monitoring import series
from gadei_ps.monitoring.following import Follower
from gadei_ps.monitoring.reading import State
from gadei_ps.show.strict_json import is_number

INTERVAL_S = 1.0
MOST_STREAMS = 64
WAITING = 8  # messages that a slow page may be behind; then it has to connect again
SPARK_POINTS = 60
Render = Callable[..., str]
Feed = Callable[[], dict[str, Any] | None]
"""Returns all parts of a page that change, by their ids (`html`), and what is new since its last
call; None at the end. It is called once a second, in a thread."""


class _Known:
    """Recent values of a job for the table of all jobs, and its last failover."""

    def __init__(self, view: View) -> None:
        self.speed: deque[float] = deque(maxlen=SPARK_POINTS)
        self.loss: deque[float] = deque(maxlen=SPARK_POINTS)
        self.failover: tuple[float, float] | None = None
        """Time and duration (s, ms)."""
        self._history = Follower(view.job.history)
        lines = self._history.read()
        found = series.columns(lines)["series"]
        for values, names in ((self.speed, series.SPEEDS), (self.loss, ("loss",))):
            for name in names:
                values.extend(one for one in found.get(name, ()) if one is not None)
        self._take_failover(lines)

    def look(self, view: View) -> None:
        """Add what is new."""
        self._take_failover(self._history.read())
        for values, value in ((self.speed, view.speed), (self.loss, view.loss)):
            if value is not None:
                values.append(value)

    def _take_failover(self, lines: Iterable[series.Line]) -> None:
        for one in lines:
            if one.get("event") == "failover" and is_number(ms := one.get("ms")):
                self.failover = one["time"], ms


class AllJobs:
    """The table of all jobs, with sparklines."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._watcher = Watcher(paths.owner())
        self._known: dict[tuple[str, str], _Known] = {}

    def look(self) -> dict[str, Any]:
        """Look at all jobs that have a process."""
        views = [view for view in self._watcher.look() if view.job.state is not State.DEAD]
        keys = [(view.name, view.job.job_id) for view in views]
        self._known = {
            key: self._known.get(key) or _Known(view) for key, view in zip(keys, views, strict=True)
        }
        jobs = list(zip(views, self._known.values(), strict=True))
        for view, known in jobs:
            known.look(view)
        html = self._render("_jobs.html", jobs=jobs)
        return {"html": {"jobs": html}}


class OneJob:
    """The page of one job: numbers, processes, points for the charts, and events."""

    def __init__(self, job: str, render: Render) -> None:
        self._job = job
        self._render = render
        self._watcher = Watcher(paths.owner())
        self._job_id = ""
        self._history: Follower | None = None
        self._learning_rate: float | None = None
        self._version = -1

    def look(self) -> dict[str, Any] | None:
        """Look at the job; None if it has ended, even if another one has its name already.

        One that has only lost its processes may continue: `run` starts others.
        """
        view = self._watcher.look_at(self._job)
        if view is None or (self._job_id and view.job.job_id not in ("", self._job_id)):
            return None
        self._job_id = view.job.job_id or self._job_id
        is_new = self._history is None
        if self._history is None:
            self._history = Follower(view.job.history)
        lines = self._history.read()
        for one in lines:
            found = series.numbers(one)
            self._learning_rate = found.get("learning_rate", self._learning_rate)
        if is_new:
            lines = []  # the page has them
        points = [
            {"time": round(one["time"], 2), "version": one.get("version"), "values": found}
            for one in lines
            if (found := series.scalars(one))
        ]
        events = [made for one in lines if (made := series.event(one)) is not None]
        return {"html": self.parts(view), "points": points + self._point(view), "events": events}

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
            "learning_rate": self._learning_rate,
        }
        values = {name: value for name, value in found.items() if value is not None}
        return [{"time": round(time.time(), 2), "version": version, "values": values}]

    def parts(self, view: View) -> dict[str, str]:
        """Render the parts of the page that change."""
        names = ("facts", "processes", "histogram")
        return {name: self._render(f"_{name}.html", view=view) for name in names}


class Channel:
    """A feed and the pages that listen to it."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.listeners: set[asyncio.Queue[bytes | None]] = set()
        self.html: dict[str, str] = {}
        """The newest parts of the page."""
        self.ended = False
        """Whether the feed has come to its end."""
        self.task: asyncio.Task[None] | None = None  # of run(); nothing else keeps it

    async def run(self) -> None:
        """Ask the feed once a second, until it has ended or no page listens any more."""
        while self.listeners:
            began = time.monotonic()
            message = await run_in_threadpool(self._feed)
            if message is None:
                self.ended = True
                return
            before, self.html = self.html, message["html"]
            message["html"] = {k: v for k, v in self.html.items() if before.get(k) != v}
            data = _event("update", {name: value for name, value in message.items() if value})
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

    @property
    def is_full(self) -> bool:
        return sum(len(one.listeners) for one in self._channels.values()) >= MOST_STREAMS

    def end(self) -> None:
        """End all streams: pages keep them open."""
        for channel in self._channels.values():
            for queue in list(channel.listeners):
                channel.close(queue)

    async def stream(self, name: str, make: Callable[[], Feed]) -> AsyncIterator[bytes]:
        """Yield the messages of a feed. name: the same for pages that share it."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = Channel(make())
            channel.task = asyncio.create_task(self._run(name, channel))
        channel.listeners.add(queue)
        try:
            yield b"retry: 2000\n\n"
            if channel.html:
                yield _event("update", {"html": channel.html})
            while (data := await queue.get()) is not None:
                yield data
            if channel.ended:
                yield _event("ended", {})
        finally:
            channel.listeners.discard(queue)

    async def _run(self, name: str, channel: Channel) -> None:
        try:
            await channel.run()
        finally:
            del self._channels[name]
            for queue in list(channel.listeners):
                channel.close(queue)
