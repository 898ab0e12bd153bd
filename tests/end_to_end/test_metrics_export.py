"""Metrics of jobs over HTTP: what they are, and what no client can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import psutil
import pytest
import yaml
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from shell import Cli
from support import PATIENCE_S, Rig, daemon, eventually, gone, status
from support.ports import free_port

from gadei_ps import metrics
from gadei_ps.learners.client import Client
from gadei_ps.memory.weights import Tensor
from gadei_ps.metrics import Kind, Lifetime
from gadei_ps.monitoring import exporter as module
from gadei_ps.monitoring import web
from gadei_ps.monitoring.exporter import GAUGES, Exporter, exported
from gadei_ps.monitoring.following import scalars

DOCS = Path(__file__).parents[2] / "docs" / "monitoring"
TENSORS = [{"name": "w", "shape": [96]}]
W = (Tensor("w", (96,)),)
FILE = """\
standby = false
[metrics]
listen = "127.0.0.1:{port}"
[[tensors]]
name = "w"
shape = [96]
"""
ONLY_ITS_WATCHDOG = {
    *("gadei_checkpoint_age_seconds", "gadei_server_private_bytes"),
    *("gadei_learner_holds_up_seconds", "gadei_learner_killed_in_seconds"),
}


def push(client: Client) -> None:
    client.push({"w": np.ones(96, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def values(text: str, job: str) -> dict[str, float]:
    """Return the values of a job's samples by name."""
    return {
        one.name: one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
        if one.labels["gadei_job"] == job
    }


def names() -> set[str]:
    """Return the names of all samples that an exporter may have."""
    tables = (metrics.JOB, ""), (metrics.LEARNER, "learner_")
    found = {
        exported(one, of) + "_total" * (one.kind is Kind.COUNTER)
        for table, of in tables
        for one in table
    }
    more = {"gadei_hyperparameter", "gadei_scalar", "gadei_job_info", "gadei_job_state"}
    return (found | GAUGES.keys() | more) - ONLY_ITS_WATCHDOG


def test_names_follow_the_conventions() -> None:
    for one in (*metrics.JOB, *metrics.LEARNER):
        name = exported(one)
        assert re.fullmatch("gadei_[a-z][a-z_]*", name) and not name.endswith("_total"), name
        assert (one.unit == "seconds") == name.endswith("_seconds"), name
        if one.lifetime is Lifetime.CHECKPOINT and one.values.name == "COUNT":
            assert one.kind is Kind.COUNTER, name


def test_all_metrics_of_a_job(job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS, history=True, checkpoint={}) as job:
        with Client(job_name) as client:
            push(client)
            report = status(job_name)
            for accept in ("", "application/openmetrics-text; version=1.0.0"):
                text, kind = Exporter(job_name).text(accept)
                assert ("openmetrics" in kind) == bool(accept)
                families = list(
                    openmetrics.text_string_to_metric_families(text.decode())
                    if accept
                    else parser.text_string_to_metric_families(text.decode())
                )
                found = {one.name: one for family in families for one in family.samples}
                absent = {"gadei_scalar", "gadei_checkpoint_timestamp_seconds", "gadei_standby_up"}
                absent |= {"gadei_work_epochs", "gadei_work_epochs_done"}
                assert names() - found.keys() == absent
                assert found.keys() <= names()
                assert found["gadei_gradients_applied_total"].value == 1
                assert found["gadei_loss_sum"].value == 2.0
                assert found["gadei_learner_staleness_mean"].value == 0
                assert found["gadei_failovers_total"].value == report["failovers"]
                assert found["gadei_server_deaths_total"].value == report["server_deaths"]
                assert found["gadei_shared_bytes"].value == report["shared_bytes"]
                assert found["gadei_checkpoint_interval_seconds"].value == 300
                learner = found["gadei_learner_samples_total"]
                assert learner.value == 3 and learner.labels["learner"] == "0"
                for one in found.values():
                    assert one.labels["gadei_job"] == job_name and one.labels["user"]
                    assert not {"job", "instance", "pid"} & one.labels.keys()
        job.check()


def test_documents_name_what_is_exported() -> None:
    """The dashboard, the alert rules, and the page."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    assert dashboard["id"] is None and dashboard["uid"] and "__inputs" not in dashboard
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())
    texts = [one["expr"] for group in rules["groups"] for one in group["rules"]]
    alerts = {one["alert"] for group in rules["groups"] for one in group["rules"]}
    panels = dashboard["panels"]
    texts += [target["expr"] for panel in panels for target in panel["targets"]]
    texts += [str(one.get("definition", "")) for one in dashboard["templating"]["list"]]
    texts += [one["expr"] for one in dashboard["annotations"]["list"]]
    page = (DOCS.parent / "monitoring.md").read_text()
    used = {name for text in texts for name in re.findall(r"\bgadei_[a-z_]+", text)}
    used -= {"gadei_job"}  # a label
    shown = set(re.findall(r"`(gadei_[a-z_]+)`", page)) - {"gadei_job"}
    assert used and used - names() == set()
    assert shown and shown - names() == set()
    assert all(f"`{name}`" in page for name in alerts)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places) and len({one["id"] for one in panels}) == len(panels)
    assert all("rate_interval" in text for text in texts if "[$__" in text)


def test_the_command_serves_all_jobs(cli: Cli, job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS), Client(job_name) as client:
        push(client)
        out = cli("metrics", "--once").out
        assert values(out, job_name)["gadei_samples_total"] == 3
        served = cli.start("metrics", "--listen", "127.0.0.1:0")
        at = re.compile(r"http://127.0.0.1:(\d+)/metrics")
        eventually(lambda: at.search(served.err), what=lambda: served.err)
        found = at.search(served.err)
        assert found
        with urlopen(found[0], timeout=PATIENCE_S) as reply:
            text = reply.read().decode()
            assert reply.headers["Content-Type"].startswith("text/plain; version=")
        assert values(text, job_name)["gadei_gradients_applied_total"] == 1
        again = cli("metrics", "--listen", f"127.0.0.1:{found[1]}")
        assert again.code == 2 and "cannot listen" in again.error and "--listen" in again.error
        assert served.signal(signal.SIGTERM).code == 0
    nowhere = cli("metrics", "--listen", "a..b:1")
    assert nowhere.code == 2 and "cannot listen at a..b:1" in nowhere.error
    wrong = cli("metrics", "--listen", "nine")
    assert wrong.code == 2 and "not a valid HOST:PORT" in wrong.error


def test_a_job_serves_its_own(cli: Cli, job_name: str) -> None:
    """Count from its start to its end, though the process is killed."""
    port = free_port()
    service = cli.serve(job_name, FILE.format(port=port))

    def text() -> str:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            return str(reply.read().decode())
        return ""

    def exporter() -> int:
        for child in psutil.Process(status(job_name)["watchdog_pid"]).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "gadei_ps.monitoring.web" in child.cmdline():
                    return child.pid
        return 0

    with Client(job_name) as client:
        push(client)
        eventually(lambda: values(text(), job_name).get("gadei_gradients_applied_total") == 1)
        assert set(re.findall('gadei_job="([^"]*)"', text())) == {job_name}
        first = exporter()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: exporter() not in (0, first))
        push(client)
        eventually(lambda: values(text(), job_name).get("gadei_gradients_applied_total") == 2)
        last = exporter()
    cli("stop", job_name)
    assert service.wait().code == 0
    assert gone(last) and not text()


# -- hostile clients ------------------------------------------------------------------------------


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve a short text in a thread."""
    monkeypatch.setattr(web, "REQUEST_S", PATIENCE_S)
    server = web.Server(lambda accept: (b"x" * 100, accept or "text/plain"), "127.0.0.1:0")
    begun: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        begun.set_result(lambda: loop.call_soon_threadsafe(over.set))
        await server.serve(over)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    end = begun.result()
    yield server.port
    end()
    thread.join()


def ask(port: int, raw: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(raw)
        found = b""
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                found += part
        return found


def get(path: str = "/metrics", host: str = "localhost:1", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (get(), 200),
        (get("/metrics?a=b"), 200),
        (get("/"), 200),
        (get(host="[::1]:9469"), 200),
        (get(host="127.0.0.1"), 200),
        (get("/../../etc/passwd"), 404),
        (get("//metrics"), 404),
        (get(host="attacker.example"), 403),
        (get(host="127.0.0.1.attacker.example:9469"), 403),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 403),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 403),
        (get(method="POST"), 405),
        (get(method="HEAD"), 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nno header\r\n\r\n", 400),
        (b"\xff\xfe GET\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_requests(request_: bytes, code: int, port: int) -> None:
    assert ask(port, request_).startswith(f"HTTP/1.1 {code} ".encode())


def test_a_body_is_not_read(port: int) -> None:
    head = b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    begin = time.monotonic()
    ask(port, head + b"x" * (8 << 20))
    assert time.monotonic() - begin < PATIENCE_S
    assert ask(port, get()).startswith(b"HTTP/1.1 200 ")


def test_slow_clients_do_not_block_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as slow:

        def begin() -> socket.socket:
            made = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            slow.enter_context(made).sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            return made

        others = [begin() for _ in range(web.MOST_CONNECTIONS - 2)]
        assert ask(port, get()).startswith(b"HTTP/1.1 200 ")
        assert not select.select(others, [], [], 0)[0], "none was closed for it"
        monkeypatch.setattr(web, "REQUEST_S", 0.5)
        assert begin().recv(100) == b"", "it was closed after its time"
        slow.close()
        for _ in range(3 * web.MOST_CONNECTIONS):
            slow.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        eventually(lambda: ask(port, get()).startswith(b"HTTP/1.1 200 "))


def test_what_cannot_be_collected_is_said() -> None:
    def text(accept: str) -> tuple[bytes, str]:
        raise ValueError("a job of no size")

    server = web.Server(text, "127.0.0.1:0")
    try:
        answer = server._respond(get())
        assert answer.startswith(b"HTTP/1.1 500 ") and answer.endswith(b"a job of no size\n")
    finally:
        server.close()


@pytest.mark.parametrize("name", ["\ud800", "x" * 300, "a\nb"])
def test_names_that_cannot_be_shown_are_left_out(name: str) -> None:
    """The history of another user may have any."""
    assert scalars({"measured": {name: 1.0, "accuracy": 0.5}}) == {"accuracy": 0.5}


def test_a_server_on_all_addresses_accepts_any_name() -> None:
    server = web.Server(lambda accept: (b"x", "text/plain"), "0.0.0.0:0")
    try:
        head = b"GET /metrics HTTP/1.1\r\nHost: ps.example:9469\r\n\r\n"
        assert server.response(head).startswith(b"HTTP/1.1 200 ")
    finally:
        server.close()


def test_scrapes_of_many_jobs(job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is that of a new exporter, although unchanged families are not encoded again."""
    with contextlib.ExitStack() as rigs:
        for number in range(5):
            rig = rigs.enter_context(Rig(f"{job_name}-{number}", W, learners=4))
        exporter = Exporter()
        monkeypatch.setattr(module, "FRESH_S", PATIENCE_S)
        text, _ = exporter.text()
        assert text.count(b"gadei_learner_samples_total{") >= 20
        assert exporter.text()[0] is text
        monkeypatch.setattr(module, "FRESH_S", -1.0)
        jobs = [f"{job_name}-{number}" for number in range(5)]
        for accept in ("", module.OPENMETRICS, "", module.OPENMETRICS):
            rig.roster[0]["samples"] += 7000
            text, _ = exporter.text(accept)
            assert of(jobs, text) == of(jobs, Exporter().text(accept)[0])
            assert f"{rig.roster[0]['samples']}.0".encode() in text
            assert text.endswith(module.END) == bool(accept) and text.count(module.END) <= 1


def of(jobs: list[str], text: bytes) -> list[bytes]:
    """Return the lines on these jobs: those of other tests change."""
    return [line for line in text.splitlines() if any(job.encode() in line for job in jobs)]


def test_clients_cannot_make_it_keep_more(job_name: str) -> None:
    """An Accept header may have any version."""
    with Rig(job_name, W):
        exporter = Exporter(job_name)
        kinds = {
            exporter.text(f"application/openmetrics-text; version=1.0.{number}")[1]
            for number in range(20)
        }
        assert len(kinds) == len(exporter._made) == 1
