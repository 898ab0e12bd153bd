"""The dashboard in a real Chromium, from an empty page to a job that has ended.

Skipped without playwright or Chromium (Debian's package; playwright's own is not fetched).
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import Cli, is_running
from support import PATIENCE_S, eventually, status

from gadei_ps.commands import history
from gadei_ps.job.config import state_directory

pytest.importorskip("playwright")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: install chromium")

LEARNER = """
    import time
    import numpy as np
    from gadei_ps.learners.client import Client

    with Client(tensors={"w": np.zeros(1000)}) as client:
        while not client.stopping:
            loss = 0.1 + 2 * 0.995 ** client.published
            client.push({"w": np.full(1000, 0.001)}, loss=loss, samples=4)
            client.report(pushed=client.published)
            time.sleep(0.02)
"""
WAIT_MS = 1000 * PATIENCE_S
PAGE_BYTES = 100_000
OTHER = "other.history.jsonl"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of a browser; errors of its scripts fail the test."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"], timeout=WAIT_MS
        )
        context = browser.new_context(viewport={"width": 1100, "height": 800})
        made = context.new_page()
        made.set_default_timeout(WAIT_MS)
        problems: list[str] = []
        made.on("pageerror", lambda error: problems.append(str(error)))
        made.on("console", lambda one: problems.append(one.text) if one.type == "error" else None)
        yield made
        browser.close()
    assert problems == []


def open_dashboard(cli: Cli) -> str:
    running = cli.start("dashboard", "--listen", "127.0.0.1:0", "--json")
    eventually(lambda: running.out or running.process.poll() is not None, what=lambda: running.err)
    return str(json.loads(running.out)["url"])


def test_from_an_empty_page(cli: Cli, job_name: str, page: Any) -> None:
    link = open_dashboard(cli)
    asked: list[str] = []
    posted: list[str] = []
    page.on("request", lambda one: (posted if one.method == "POST" else asked).append(one.url))
    answers = iter(["dismiss"])
    page.on("dialog", lambda dialog: getattr(dialog, next(answers, "accept"))())
    page.goto(link)
    page.get_by_role("heading", name="Jobs").wait_for()
    assert "token" not in page.url
    assert page.get_by_role("link", name=job_name).count() == 0
    file = cli.directory / "learner.py"
    file.write_text(textwrap.dedent(LEARNER))
    cli.made(job_name)
    run = cli.start("run", job_name, "--learners", 2, "--lr", "0.5", sys.executable, file)

    page.get_by_role("link", name=job_name).click()
    page.locator(".chart h3", has_text="loss").first.wait_for()
    event = page.locator("#events li", has_text="learner 1 attached").first.inner_text()
    assert re.match(r"\d\d-\d\d \d\d:\d\d:\d\d", event)
    assert "version" not in event, "it is not known"
    page.locator(".chart h3", has_text="samples/s").wait_for()
    assert page.evaluate("shown.runs[0].series.loss.findLast((one) => one !== null)") > 0

    page.locator("#settings").fill("lr=0.25")
    page.get_by_role("button", name="Set").click()
    assert not posted, "the question was answered by no"
    page.get_by_role("button", name="Set").click()
    page.locator("#result", has_text="lr 0.5 -> 0.25").wait_for()
    assert len(posted) == 1
    page.locator("#events li", has_text="set lr 0.5 -> 0.25").wait_for()
    assert status(job_name)["settings"]["lr"] == 0.25
    page.locator(".chart[aria-label^='learning rate'][aria-label$='last value 0.25']").wait_for()

    history = status(job_name)["history"]
    values = {"constructor": 0.5, "__proto__": 0.5}  # every object of JavaScript has these
    (Path(history).parent / OTHER).write_text(json.dumps({"time": 1, "measured": values}) + "\n")

    eventually(lambda: status(job_name)["standby_pid"])
    page.get_by_role("button", name="Kill learner 0").hover()
    page.mouse.down()
    before = page.evaluate("shown.runs[0].time.length")
    eventually(lambda: page.evaluate("shown.runs[0].time.length") > before + 1)
    page.mouse.up()  # a table that was replaced meanwhile would have lost the click
    page.locator("#events li", has_text="learner 0 died").wait_for()

    active = status(job_name)["server_pid"]
    kill = page.get_by_role("button", name=f"Kill server, pid {active}")
    kill.focus()
    kill.press("Enter")  # by the keyboard
    page.locator("#result", has_text=f"pid {active}").wait_for()
    page.locator("#events li", has_text=re.compile(r"failover in \d")).wait_for()
    marks = "shown.runs[0].events.filter((one) => one.kind === 'failover').length"
    assert page.evaluate(marks) == 1
    assert status(job_name)["server_pid"] != active
    before = page.evaluate("shown.runs[0].time.length")
    eventually(lambda: page.evaluate("shown.runs[0].time.length") > before)

    look(page)
    origin = page.evaluate("location.origin")
    assert {
        one for one in (*asked, *posted) if not one.startswith((origin, "data:", "blob:"))
    } == set()

    with page.expect_download() as download:
        page.get_by_role("button", name="PNG").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")
    page.get_by_role("button", name="Stop").click()
    page.locator("#banner", has_text="The job has ended").wait_for()
    run.wait()

    page.get_by_role("link", name="Runs").click()
    page.get_by_role("link", name=job_name).click()
    page.locator(".chart h3", has_text="loss").first.wait_for()
    page.locator("#events li", has_text="failover in").wait_for()
    page.goto(f"{origin}/compare?a={Path(history).name}&b={OTHER}")
    page.locator(".chart h3", has_text="constructor").wait_for()
    marks = eventually(lambda: page.evaluate("shown.plots.get('loss')?.plot?.axes[0]._values"))
    assert {one[-2:] for one in marks} == {" s"}


def test_lines_that_come_while_the_curves_are_loaded(cli: Cli, job_name: str, page: Any) -> None:
    """Each is on the page once, whether its data were read before, or its stream began later.

    A page that is hidden while the job ends also has its last lines.
    """
    link = open_dashboard(cli)
    (cli.directory / "learner.py").write_text(textwrap.dedent(LEARNER))
    cli.made(job_name)
    run = cli.start("run", job_name, "--lr", "0.5", sys.executable, "learner.py")

    page.goto(link)
    page.get_by_role("link", name=job_name).wait_for()
    eventually(lambda: is_running(job_name))  # the page also shows jobs that are starting
    file = Path(status(job_name)["history"])
    eventually(file.exists)

    def slowly(route: Any) -> None:
        before = len(history.lines(file))
        eventually(lambda: len(history.lines(file)) > before + 1)
        reply = route.fetch()
        cli("set", job_name, "lr=0.25")
        eventually(lambda: any("set" in one for one in history.lines(file)[:-2]))
        route.fulfill(response=reply)

    page.route(re.compile(r"/data\?"), slowly)
    page.get_by_role("link", name=job_name).click()
    page.locator("#events li", has_text="set lr 0.5 -> 0.25").wait_for()
    values = page.evaluate("shown.runs[0].series.pushed.filter((one) => one !== null)")
    assert len(values) == len(set(values)) > 2
    page.unroute(re.compile(r"/data\?"))
    page.evaluate(HIDE, True)
    cli("stop", job_name)
    run.wait()
    assert page.locator("#events li", has_text="stopped").count() == 0
    page.evaluate(HIDE, False)
    page.locator("#banner", has_text="The job has ended").wait_for()
    assert page.locator("#events li", has_text="stopped").count() == 1


def test_a_job_without_a_history(cli: Cli, job_name: str, page: Any) -> None:
    """The page alone has its curves: it follows the job while hidden, and shows no others."""
    link = open_dashboard(cli)
    (cli.directory / "learner.py").write_text(textwrap.dedent(LEARNER))
    (cli.directory / f"{job_name}.toml").write_text("history = false\n")
    cli.made(job_name)
    earlier = {"time": 1000.0, "version": 1, "samples": 1, "loss": 99.0}
    state_directory().mkdir(parents=True, exist_ok=True)
    (state_directory() / f"{job_name}.history.jsonl").write_text(f"{json.dumps(earlier)}\n")
    run = cli.start("run", f"{job_name}.toml", sys.executable, "learner.py")

    page.goto(link)
    page.get_by_role("link", name=job_name).click()
    page.locator(".chart h3", has_text="loss").wait_for()
    assert page.get_by_role("link", name="CSV").count() == 0
    page.evaluate(HIDE, True)
    before = page.evaluate("shown.runs[0].time.length")
    eventually(lambda: page.evaluate("shown.runs[0].time.length") > before + 1)
    cli("stop", job_name)
    run.wait()
    page.evaluate(HIDE, False)
    page.locator("#banner", has_text="The job has ended; it kept no history").wait_for()
    losses = page.evaluate("shown.runs[0].series.loss")
    assert len(losses) > before + 1 and 99.0 not in losses


# As a browser does for a tab in the background.
HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


# Of a curve: whether a column of its picture has its colour, in the middle between two times.
DRAWN = """([begin, end]) => {
    const { plot } = shown.plots.get("loss"), { ctx, bbox } = plot;
    const x = Math.round(plot.valToPos((begin + end) / 2, "x", true));
    const { data } = ctx.getImageData(x, bbox.top, 1, bbox.height);
    return data.some((_, at) => at % 4 === 0 && Math.abs(data[at] - data[at + 2]) > 60);
}"""


def test_gaps(cli: Cli, page: Any) -> None:
    """No line is drawn over times in which nothing was written, also in points that come later."""
    page.goto(open_dashboard(cli))
    times = [1000.0 + at for at in (*range(100), *range(200, 300))]
    lines = [
        {"time": one, "version": at, "samples": at + 1, "loss": 2.0} for at, one in enumerate(times)
    ]
    lines += [{"time": 1120.0, "version": 99, "event": "failover", "ms": 2.5}]
    state_directory().mkdir(parents=True, exist_ok=True)
    (state_directory() / OTHER).write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    page.get_by_role("heading", name="Jobs").wait_for()
    page.goto(page.evaluate("location.origin") + f"/run/{OTHER}")
    page.locator(".chart h3", has_text="loss").wait_for()
    eventually(lambda: page.evaluate("shown.plots.get('loss')?.plot?.axes[0]._values"))

    def drawn(*pairs: tuple[float, float]) -> list[bool]:
        page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)))")
        return [page.evaluate(DRAWN, pair) for pair in pairs]

    assert drawn((1040, 1060), (1100, 1199), (1240, 1260)) == [True, False, True]
    assert drawn((1120, 1120)) == [True], "the mark of the failover"
    for time in (1400, 1401, 1402):
        page.evaluate("(time) => shown.runs[0].add({time, version: time, values: {loss: 2}})", time)
    page.evaluate("shown.soon()")
    assert drawn((1240, 1260), (1300, 1400)) == [True, False]
    page.locator("#smooth").check()
    assert drawn((1040, 1060), (1100, 1199), (1300, 1400)) == [True, False, False]
    page.locator("#axis").select_option("version")
    assert drawn((99, 100), (199, 1400)) == [True, True]
    (state_directory() / OTHER).write_text(f"{json.dumps(lines[-1])}\n")
    other = page.context.new_page()  # whose console may have the status of the reply
    other.goto(page.url)
    other.get_by_role("link", name="SVG").click()
    other.get_by_text("there is nothing to draw yet").wait_for()


def look_at_axes(page: Any) -> None:
    """Check that ticks have 24 hours, differ from each other, and count queues in whole numbers."""
    page.locator(".chart h3", has_text="queue").wait_for()
    axes = "[...shown.plots].map(([name, one]) => "
    axes += "[name, ...one.plot.axes.map((axis) => axis._values)])"
    charts = eventually(lambda: all(map(all, found := page.evaluate(axes))) and found)
    time = re.compile(r"\d\d:\d\d(:\d\d(\.\d{3})?)?(\n\d\d-\d\d)?")
    for name, times, values in charts:
        assert all(map(time.fullmatch, times)), (name, times)
        assert len({*values}) == len(values), (name, values)
    queue = next(values for name, _, values in charts if name == "queue")
    assert all(map(str.isdigit, queue)), queue
    ticks = page.evaluate("[shortened(3.68812, 2e-5), shortened(12345.2, 0.2), shortened(0, 0.5)]")
    assert ticks == ["3.68812", "12,345.2", "0"]


def look(page: Any) -> None:
    """Size and speed of the page; a narrow screen, dark mode, and names for screen readers."""
    url = page.url
    page.goto(url)
    page.locator(".chart h3", has_text="loss").first.wait_for()
    sizes = page.evaluate(
        "performance.getEntries().filter((one) => one.transferSize)"
        ".map((one) => one.transferSize).reduce((a, b) => a + b)"
    )
    assert 0 < sizes < PAGE_BYTES
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.set_viewport_size({"width": 390, "height": 800})
    eventually(lambda: page.evaluate("document.scrollingElement.scrollWidth") <= 390)  # drawn again
    kill = "document.querySelector('#processes .danger').getBoundingClientRect().right"
    assert page.evaluate(kill) <= 390
    unnamed = "[...document.querySelectorAll('button, input:not([type=hidden]), select')].filter("
    unnamed += "(one) => !one.textContent.trim() && !one.labels?.length && !one.ariaLabel).length"
    assert page.evaluate(unnamed) == 0
    assert "last value" in page.locator(".chart").first.get_attribute("aria-label")
    page.set_viewport_size({"width": 1100, "height": 800})
    page.emulate_media(color_scheme="light")
    look_at_axes(page)


def test_the_pictures_of_the_documents(tmp_path: Path) -> None:
    """They can be taken again. Pixels depend on fonts, so only size and source are compared."""
    script = runpy.run_path(str(DOCS / "screenshots.py"))
    script["take"](tmp_path)
    for name in script["NAMES"]:
        taken, kept = tmp_path / name, DOCS / "pictures" / name
        assert script["shown"](taken) == script["shown"](kept) != ""
        assert taken.read_bytes()[16:24] == kept.read_bytes()[16:24], "width and height"
