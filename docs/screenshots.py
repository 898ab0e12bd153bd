"""Take the pictures of the dashboard: python docs/screenshots.py [DIRECTORY]

They show the jobs in `docs/pictures/dashboard`, so that they are the same each time. A test
compares what the dashboard serves of these jobs with what it served when the pictures were taken.
It needs playwright and Debian's chromium.

`python docs/screenshots.py --record` runs two jobs for a minute, kills a server, changes a learning
rate, and writes the jobs again.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urlsplit

import uvicorn
from pydantic import TypeAdapter

from gadei_ps import metrics
from gadei_ps.dashboard import live
from gadei_ps.dashboard.access import Access
from gadei_ps.dashboard.data import View, Watcher
from gadei_ps.dashboard.pages import Dashboard
from gadei_ps.machine import listening
from gadei_ps.monitoring.reading import Job
from gadei_ps.show import tables

PICTURES = Path(__file__).parent / "pictures"
JOBS = PICTURES / "dashboard"
VIEWS = TypeAdapter(list[View])
JOB, OTHER = "intents", "baseline"
UNKNOWN = dict.fromkeys(one.name for one in (*metrics.JOB, *metrics.LEARNER))
NAMES = ("dashboard-job.png", "dashboard-dark.png", "dashboard-jobs.png")
PAGES = ("/", f"/job/{JOB}", f"/data?job={JOB}")
SERVED = re.compile(rb"tEXtserved\0([0-9a-f]{64})")

# -- the dashboard of the recorded jobs -----------------------------------------------------------


def recorded() -> list[View]:
    """Return the jobs as they were when they were recorded."""
    views = VIEWS.validate_json((JOBS / "views.json").read_bytes())
    return [replace(one, job=_complete(one.job)) for one in views]


def _complete(job: Job) -> Job:
    """Add the place of the history, and metrics that are newer than the record."""
    learners = [replace(one, metrics=UNKNOWN | {**one.metrics}) for one in job.learners]
    return replace(
        job, history=_history(job.name), metrics=UNKNOWN | {**job.metrics}, learners=learners
    )


def _named(views: dict[str, View], job: str | None) -> list[View]:
    """Return the view of one job, or all."""
    return [one for name, one in views.items() if job in (None, name)]


def _history(job: str) -> Path:
    return JOBS / f"{job}.jsonl"


@contextlib.contextmanager
def dashboard() -> Iterator[str]:
    """Serve these jobs a second after their record; yield the address."""
    views = {one.name: one for one in recorded()}
    now = json.loads(_history(JOB).read_text().splitlines()[-1])["time"] + 1
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
    access = Access("127.0.0.1", 0, read_only=False, token=False)
    access.read_only = False
    with (
        mock.patch.object(Watcher, "look", lambda _, job=None: _named(views, job)),
        mock.patch.object(live, "time", clock),
        mock.patch.object(tables, "time", clock),
        _time_zone("UTC"),
        listening.listen("127.0.0.1:0")[1] as there,
    ):
        application = Dashboard(access).application()
        config = uvicorn.Config(application, lifespan="off", log_config=None, log_level="critical")
        config.timeout_graceful_shutdown = 1  # a page keeps its stream open
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([there],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{there.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def _time_zone(name: str) -> Iterator[None]:
    try:
        with mock.patch.dict(os.environ, TZ=name):
            time.tzset()
            yield
    finally:
        time.tzset()


def served(url: str) -> str:
    """Return the digest of all that a browser receives for the pictures."""
    bodies = [_get(url + path) for path in PAGES]
    static = sorted(set(re.findall(rb'"(/static/[\w./]+)"', b"".join(bodies))))
    bodies += [_get(url + path.decode()) for path in static]
    return hashlib.sha256(b"\0".join(bodies)).hexdigest()


def _get(url: str) -> bytes:
    there = urlsplit(url)
    connection = http.client.HTTPConnection(there.netloc)  # never by a proxy
    with contextlib.closing(connection):
        connection.request("GET", url.removeprefix(f"http://{there.netloc}"))
        reply = connection.getresponse()
        assert reply.status == 200, url
        return reply.read()


# -- pictures -------------------------------------------------------------------------------------


def take(out: Path) -> None:
    """Write the pictures to this directory, each with the digest of what it shows."""
    from playwright.sync_api import sync_playwright

    with dashboard() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(
            viewport={"width": 1100, "height": 572}, timezone_id="UTC", bypass_csp=True
        )
        page.goto(url + PAGES[1])
        page.wait_for_function("window.shown")
        points = len(json.loads(_get(url + PAGES[2]))["time"])
        page.wait_for_function(f"shown.runs[0].time.length > {points}")  # the live one has come
        page.locator("#smooth").check()
        digest = served(url)
        for scheme, name in (("light", NAMES[0]), ("dark", NAMES[1])):
            page.emulate_media(color_scheme=scheme)
            page.evaluate("new Promise((done) => setTimeout(done, 300))")
            _write(out / name, page.screenshot(), digest)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1100, "height": 300})
        page.goto(url + PAGES[0])
        _write(out / NAMES[2], page.screenshot(), digest)
        browser.close()


def _write(path: Path, png: bytes, digest: str) -> None:
    """Write a picture with a chunk of text before its end."""
    body = b"tEXtserved\0" + digest.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = png.rindex(b"IEND") - 4
    path.write_bytes(png[:end] + chunk + png[end:])


def shown(picture: Path) -> str:
    """Return the digest of what a picture shows; empty if it has none."""
    found = SERVED.search(picture.read_bytes())
    return found[1].decode() if found else ""


# -- recording ------------------------------------------------------------------------------------

LEARNER = """
    import os, time
    import numpy as np
    from gadei_ps.learners.client import Client

    number = int(os.environ.get("GADEI_PS_LEARNER", 0))
    chance = np.random.default_rng(number)
    with Client(tensors={"embedding": np.zeros((2000, 64)), "out": np.zeros((64, 20))}) as client:
        while not client.stopping:
            loss = 0.25 + 2.2 * 0.9985 ** client.published + 0.12 * chance.standard_normal()
            time.sleep(0.012 + 0.006 * number + 0.004 * chance.random())
            gradients = {"embedding": np.full((2000, 64), 1e-4), "out": np.full((64, 20), 1e-4)}
            client.push(gradients, loss=abs(loss), samples=32)
"""


def record() -> None:
    """Run two jobs, and write what the dashboard knows of them after a minute."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        for variable in ("RUNTIME", "STATE"):
            os.environ[f"GADEI_PS_{variable}_DIR"] = f"{name}/{variable.lower()}"
        (Path(name) / "train.py").write_text(textwrap.dedent(LEARNER))
        program = ("--", sys.executable, "train.py")
        runs = [
            subprocess.Popen(_command("run", job, "--learners", learners, *program), cwd=name)
            for job, learners in ((JOB, 3), (OTHER, 1))
        ]
        try:
            time.sleep(30)
            subprocess.run(_command("kill", JOB, "--server"), check=True)
            time.sleep(15)
            subprocess.run(_command("set", JOB, "lr=0.005"), check=True)
            watcher = Watcher()
            for _ in range(15):
                views = [one for one in watcher.look() if one.name in (JOB, OTHER)]
                time.sleep(1)
            JOBS.mkdir(exist_ok=True)
            for one in views:
                assert one.job.history
                shutil.copyfile(one.job.history, _history(one.name))
        finally:
            for job in (JOB, OTHER):
                subprocess.run(_command("stop", job), check=False)
            for run in runs:
                run.wait()
    views = [replace(one, job=replace(one.job, history=None, config={})) for one in views]
    (JOBS / "views.json").write_bytes(VIEWS.dump_json(views, indent=1) + b"\n")


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "gadei_ps", *map(str, words)]


if __name__ == "__main__":
    if "--record" in sys.argv:
        record()
    else:
        take(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
