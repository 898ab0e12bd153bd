"""The pages of the dashboard, their data and their actions."""

from __future__ import annotations

import mimetypes
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

import anyio
import jinja2
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gadei_ps.commands import history
from gadei_ps.dashboard import actions
from gadei_ps.dashboard.access import MOST_BODY, Access, Guard
from gadei_ps.dashboard.data import Watcher
from gadei_ps.dashboard.live import AllJobs, Feed, Live, OneJob
from gadei_ps.errors import GadeiError, JobNotFound, UsageError
from gadei_ps.job import paths
from gadei_ps.job.config import state_directory
from gadei_ps.memory import shm
from gadei_ps.monitoring import series
from gadei_ps.monitoring.reading import State
from gadei_ps.show import status
from gadei_ps.show.tables import age, when

HERE: Final = Path(__file__).parent
COMPRESSION: Final = 5  # of gzip: a higher level takes longer than it saves
MOST_ACTIONS: Final = 4  # at a time; a checkpoint may take minutes
RUNS_S: Final = 5.0  # age of a list of runs that is shown again
MOST_RUNS: Final = 200


def template_environment(**more: Any) -> jinja2.Environment:
    """Make the environment of the templates, which escape all values."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"age": age, "when": when, "quote": quote}
    made.globals |= {"bins": _bins, "spark": _spark} | more
    return made


def _bins(counts: list[int]) -> list[list[str]]:
    """Return staleness, gradients, share and bar of each line of the histogram."""
    rows = status.histogram(counts).rows if any(counts) else []
    return [[cell.plain for cell in row] for row in rows]


def _spark(values: Any) -> str:
    """Return the points of a sparkline in a box of 100 by 20."""
    there = list(values)
    low, high = min(there, default=0.0), max(there, default=0.0)
    wide, tall = max(1, len(there) - 1), (high - low) or 1.0
    return " ".join(
        f"{100 * at / wide:.1f},{19 - 18 * (value - low) / tall:.1f}"
        for at, value in enumerate(there)
    )


class Dashboard:
    """The application. Blocking work is done in threads."""

    def __init__(self, access: Access) -> None:
        self.live = Live()
        self._access = access
        self._templates = template_environment(read_only=access.read_only)
        self._acting = anyio.CapacityLimiter(MOST_ACTIONS)
        self._runs: tuple[float, list[history.Run]] = (float("-inf"), [])

    def application(self) -> Starlette:
        """Build the ASGI application."""
        get = partial(Route, methods=["GET"])
        mimetypes.add_type("text/javascript", ".js")  # the system's table may have another type
        return Starlette(
            routes=[
                get("/", self._all),
                get("/stream", self._stream_all),
                get("/job/{job}", self._job),
                get("/job/{job}/stream", self._stream_job),
                Route("/job/{job}/{action}", self._act, methods=["POST"]),
                get("/runs", self._all_runs),
                get("/run/{run:path}", self._run),
                get("/compare", self._compare),
                get("/data", self._data),
                get("/csv", self._csv),
                get("/svg", self._svg),
                Mount("/static", StaticFiles(directory=HERE / "static")),
            ],
            middleware=[
                Middleware(Guard, access=self._access),
                Middleware(GZipMiddleware, compresslevel=COMPRESSION),
            ],
            exception_handlers={GadeiError: _failed, HTTPException: _refused},
        )

    def _render(self, name: str, /, **values: Any) -> str:
        return self._templates.get_template(name).render(**values)

    def _page(self, name: str, /, **values: Any) -> Response:
        return HTMLResponse(self._render(name, **values))

    # -- pages ----------------------------------------------------------------------------------

    async def _all(self, request: Request) -> Response:
        message = await run_in_threadpool(AllJobs(self._render).look)
        return self._page("jobs.html", table=message["html"]["jobs"])

    async def _job(self, request: Request) -> Response:
        job = shm.check_job_name(request.path_params["job"])
        view = await run_in_threadpool(Watcher(paths.owner()).look_at, job)
        if view is None or view.job.state is State.DEAD:
            raise JobNotFound(f"no job {job!r} is running; its history may be among the runs")
        parts = await run_in_threadpool(OneJob(job, self._render).parts, view)
        return self._page("job.html", job=job, view=view, parts=parts)

    async def _all_runs(self, request: Request) -> Response:
        found = await self._known_runs()
        return self._page("runs.html", runs=list(found.items())[:MOST_RUNS])

    async def _run(self, request: Request) -> Response:
        name = request.path_params["run"]
        return self._page("run.html", name=name, run=await self._known_run(name))

    async def _compare(self, request: Request) -> Response:
        chosen = [request.query_params.get(one, "") for one in ("a", "b")]
        for name in filter(None, chosen):
            await self._known_run(name)
        found = await self._known_runs()
        return self._page("compare.html", runs=list(found.items()), chosen=chosen)

    async def _known_runs(self) -> dict[str, history.Run]:
        """Return all runs by the names that pages use: the file below the state directory."""
        at, found = self._runs
        if time.monotonic() - at > RUNS_S:
            found = await run_in_threadpool(history.runs)
            self._runs = time.monotonic(), found
        state = f"{state_directory()}/"
        return {one.file.removeprefix(state): one for one in found}

    async def _known_run(self, name: str) -> history.Run:
        found = await self._known_runs()
        if name not in found:
            raise HTTPException(404, "there is no run of this name")
        return found[name]

    # -- data -----------------------------------------------------------------------------------

    async def _lines(self, request: Request) -> tuple[str, list[dict[str, Any]]]:
        """Return the name and the history of the job or run that a request names."""
        if "job" in request.query_params:
            job = shm.check_job_name(request.query_params["job"])
            return job, await run_in_threadpool(_lines_of, job)
        run = await self._known_run(request.query_params.get("run", ""))
        return run.job, await run_in_threadpool(history.lines, Path(run.file))

    async def _data(self, request: Request) -> Response:
        _, lines = await self._lines(request)
        made = await run_in_threadpool(lambda: series.compact(series.columns(lines)))
        return Response(made, media_type="application/json")

    async def _csv(self, request: Request) -> Response:
        name, lines = await self._lines(request)
        made = await run_in_threadpool(series.as_csv, lines)
        return _attachment(made, "text/csv; charset=utf-8", f"{name}-history.csv")

    async def _svg(self, request: Request) -> Response:
        name, lines = await self._lines(request)
        async with self._acting:
            made = await run_in_threadpool(series.plot, lines, name)
        return _attachment(made, "image/svg+xml", f"{name}-history.svg")

    async def _stream_all(self, request: Request) -> Response:
        return self._stream("", lambda: AllJobs(self._render).look)

    async def _stream_job(self, request: Request) -> Response:
        job = shm.check_job_name(request.path_params["job"])
        return self._stream(job, lambda: OneJob(job, self._render).look)

    def _stream(self, name: str, make: Callable[[], Feed]) -> Response:
        if self.live.is_full:
            raise HTTPException(503, "too many pages are open")
        return StreamingResponse(self.live.stream(name, make), media_type="text/event-stream")

    # -- actions --------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        job, action = request.path_params["job"], request.path_params["action"]
        if action not in actions.ACTIONS:
            raise HTTPException(404, "there is no such action")
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > MOST_BODY:
                raise HTTPException(413, "the request is too long", {"Connection": "close"})
        try:
            form = parse_qs(raw.decode(), max_num_fields=20)
        except ValueError:
            raise HTTPException(400, "the request is not a form") from None
        values = {name: given[-1] for name, given in form.items()}
        if self._acting.available_tokens < 1:
            raise HTTPException(429, "other actions are under way; try again")
        async with self._acting:
            done = await run_in_threadpool(actions.perform, job, action, values)
        return PlainTextResponse(done)


def _lines_of(job: str) -> list[dict[str, Any]]:
    """Return the history of a job; empty if it is in memory and keeps none, or has none yet.

    The page of a job that has ended is still open. Raises JobNotFound.
    """
    view = Watcher(paths.owner()).look_at(job)
    path = history.find(job) if view is None else view.job.history
    return history.lines(path) if path and path.exists() else []


def _attachment(text: str, kind: str, name: str) -> Response:
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
    return Response(text, headers=headers, media_type=kind)


async def _failed(request: Request, error: Exception) -> Response:
    """Report an error of gadei-ps in one line."""
    code = 404 if isinstance(error, JobNotFound) else 400 if isinstance(error, UsageError) else 409
    return PlainTextResponse(f"{error}\n", code)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
