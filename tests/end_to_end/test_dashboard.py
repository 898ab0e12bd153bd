"""The dashboard's server: pages, data, streams and actions, and requests that it must reject."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import numpy as np
import psutil
import pytest
from shell import Cli, Running
from support import PATIENCE_S, Rig, Stopped, daemon, eventually, kill_all, status

from gadei_ps.dashboard.data import Watcher
from gadei_ps.dashboard.live import OneJob
from gadei_ps.learners.client import Client
from gadei_ps.memory.weights import Tensor

TENSORS = [{"name": "w", "shape": [8]}]
MB = 1 << 20


@dataclass
class Site:
    """A dashboard that runs, and a browser's cookie for it."""

    running: Running
    port: int
    token: str
    cookie: str = ""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str | None
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and text of a reply. Headers that are None are left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        given: dict[str, str | None] = {"Host": self.host, "Cookie": self.cookie}
        if method == "POST":
            given |= {"Origin": f"http://{self.host}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body.encode() if body is not None else None)
            reply = connection.getresponse()
            return reply.status, dict(reply.headers), reply.read().decode()
        except ConnectionResetError:  # the rest of a bad request was not read
            return 400, {}, ""
        finally:
            connection.close()

    def act(self, job: str, action: str, **values: object) -> tuple[int, str]:
        """Return status and text of an action, as the page's forms send it."""
        code, _, text = self.ask(f"/job/{job}/{action}", "POST", urlencode(values))
        return code, text

    def sign_in(self) -> None:
        """Open the link as a browser does."""
        code, headers, _ = self.ask(f"/?token={self.token}")
        assert code == 200
        self.cookie = headers["set-cookie"].partition(";")[0]


def start(cli: Cli, *arguments: object, address: str = "127.0.0.1:0") -> Site:
    running = cli.start("dashboard", "--listen", address, "--json", *arguments)
    eventually(lambda: running.out or running.process.poll() is not None, what=lambda: running.err)
    assert running.process.poll() is None, running.err
    url = urlsplit(json.loads(running.out)["url"])
    assert url.port is not None
    return Site(running, url.port, parse_qs(url.query).get("token", [""])[0])


@pytest.fixture
def site(cli: Cli) -> Site:
    """A dashboard with a signed-in browser."""
    made = start(cli)
    made.sign_in()
    return made


@pytest.fixture
def job(job_name: str, site: Site) -> Iterator[Client]:
    """A job with a learner, and a history."""
    with daemon(job_name, tensors=TENSORS, history=True) as _, Client(job_name) as client:
        push(client)
        yield client


def push(client: Client, count: int = 3, loss: float = 2.0) -> None:
    for _ in range(count):
        client.push({"w": np.ones(8, np.float32)}, loss=loss, samples=3)
    client.wait_applied()


def messages(site: Site, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers={"Cookie": site.cookie})
        reply = connection.getresponse()
        assert reply.headers["content-type"].startswith("text/event-stream")
        kind = ""
        while line := reply.readline().decode().strip("\n"):
            kind = line.removeprefix("event: ") if line.startswith("event: ") else kind
            if line.startswith("data: "):
                yield kind, json.loads(line.removeprefix("data: "))
            if line.startswith(("retry", "data")):
                reply.readline()
    finally:
        connection.close()


# -- pages ----------------------------------------------------------------------------------------


def test_the_link_signs_in(cli: Cli) -> None:
    site = start(cli)
    code, _, text = site.ask("/")
    assert code == 403
    assert "open the link" in text
    code, headers, text = site.ask(f"/runs?token={site.token}")
    assert code == 200
    assert 'content="0;url=/runs"' in text
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    site.cookie = cookie.partition(";")[0]
    code, headers, text = site.ask("/")
    assert code == 200
    assert "<h1>Jobs</h1>" in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert site.running.signal(signal.SIGINT).code == 130
    assert not site.running.err.count("Traceback")


def test_pages_of_a_job(job: Client, job_name: str, site: Site) -> None:
    code, _, text = site.ask("/")
    assert code == 200
    assert f'href="/job/{job_name}"' in text
    code, _, text = site.ask(f"/job/{job_name}")
    assert code == 200
    for word in ("watchdog", "server", "learner 0", str(os.getpid()), "Checkpoint"):
        assert word in text
    file = status(job_name)["history"]
    eventually(lambda: push(job) or json.loads(site.ask(f"/data?job={job_name}")[2])["time"])
    data = json.loads(site.ask(f"/data?job={job_name}")[2])
    assert data["series"]["loss"][-1] == 2.0
    assert {len(values) for values in data["series"].values()} == {len(data["time"])}
    assert "attach" in [one["kind"] for one in data["events"]]
    name = Path(file).name
    eventually(lambda: name in site.ask("/runs")[2])
    eventually(lambda: site.ask(f"/run/{name}")[0] == 200)  # the list is some seconds old
    assert json.loads(site.ask(f"/data?run={name}")[2])["time"]
    code, headers, text = site.ask(f"/csv?run={name}")
    assert code == 200
    assert f"{job_name}-history.csv" in headers["content-disposition"]
    assert text.startswith("time,version,")
    code, headers, text = site.ask(f"/svg?run={name}")
    assert (code, headers["content-type"]) == (200, "image/svg+xml") and "</svg>" in text
    assert site.ask(f"/compare?a={name}&b={name}")[0] == 200
    assert site.ask("/static/app.js")[1]["content-type"].startswith("text/javascript")


@pytest.mark.usefixtures("job")
def test_processes_of_one_job_are_measured(job_name: str) -> None:
    """The table of all jobs shows none, and top those of the selected job."""
    watcher, uid = Watcher(os.getuid()), os.getuid()

    def measured(*given: Any) -> set[bool]:
        views = [one for one in watcher.look(*given) if one.name == job_name]
        return {one.memory_bytes is not None for view in views for one in view.processes}

    assert measured() == measured(None, (job_name, uid + 1)) == {False}
    assert measured(None, (job_name, uid)) == measured(job_name) == {True}


def test_pages_need_no_watchdog(job: Client, job_name: str, site: Site) -> None:
    """One that hangs would keep them waiting."""
    report = status(job_name)
    eventually(lambda: push(job) or Path(report["history"]).exists())
    with Stopped(report["watchdog_pid"]):
        assert site.ask(f"/job/{job_name}")[0] == 200
        assert "<td>running</td>" in site.ask("/runs")[2]


def test_a_stream_and_actions(job: Client, job_name: str, site: Site) -> None:
    """Check that points and events arrive; each action does what its command does."""
    code, text = site.act(job_name, "set", settings="lr=0.25")
    assert (code, text.partition(",")[0]) == (200, "lr 1 -> 0.25")
    assert status(job_name)["settings"]["lr"] == 0.25
    seen: dict[str, Any] = {"html": {}, "points": [], "events": []}
    for kind, message in messages(site, f"/job/{job_name}/stream"):
        push(job, loss=4.0)
        assert kind == "update"
        seen["html"] |= message.get("html", {})
        seen["points"] += message.get("points", [])
        if len(seen["points"]) == 1:
            site.act(job_name, "set", settings="lr=0.125")
        seen["events"] += message.get("events", [])
        if len(seen["points"]) > 1 and any("0.125" in one["text"] for one in seen["events"]):
            break
    assert seen["html"].keys() == {"facts", "processes", "histogram"}
    assert seen["points"][-1]["values"]["loss"] == 4.0
    assert seen["points"][-1]["values"]["samples_per_s"] > 0
    pid = status(job_name)["server_pid"]
    code, text = site.act(job_name, "kill", role="server", pid=pid + 1)
    assert (code, status(job_name)["server_pid"]) == (409, pid), text
    code, text = site.act(job_name, "kill", role="server", pid=pid)
    assert code == 200
    assert f"pid {pid}" in text
    eventually(lambda: status(job_name)["server_pid"] != pid)
    push(job)
    kills = ({"role": "x"}, {"role": "server", "pid": "9" * 5000}, {"role": "learner", "pid": 1})
    for values in ({"settings": "lr=x"}, {}):
        assert site.act(job_name, "set", **values)[0] == 400
    for values in kills:
        assert site.act(job_name, "kill", **values)[0] == 400
    assert site.act("another", "checkpoint")[0] == 404
    code, text = site.act(job_name, "checkpoint")
    assert (code, text.partition(" of ")[0]) == (200, "checkpoint")


def test_a_job_that_ends(job_name: str, site: Site) -> None:
    with daemon(job_name, tensors=TENSORS, history=True), Client(job_name) as client:
        push(client)
        stream = messages(site, f"/job/{job_name}/stream")
        assert next(stream)[0] == "update"
    assert "ended" in [kind for kind, _ in stream]
    code, _, text = site.ask(f"/job/{job_name}")
    assert (code, text.partition(job_name)[0]) == (404, "no job '")
    for what in ("data", "csv", "svg"):  # for pages that are still open
        assert site.ask(f"/{what}?job={job_name}")[0] == 200, what
        code, _, text = site.ask(f"/{what}?job=x{job_name}")
        assert (code, text.partition(job_name)[0]) == (404, "job 'x"), what


def test_a_job_that_only_lost_its_processes(job_name: str) -> None:
    """Keep its page open: `run` starts others."""
    feed = OneJob(job_name, lambda *_, **__: "")
    with Rig(job_name, (Tensor("w", (8,)),)):
        assert feed.look()
    assert feed.look() is None


def test_a_job_whose_processes_are_dead(cli: Cli, job_name: str) -> None:
    cli.serve(job_name, 'standby = false\n[[tensors]]\nname = "w"\nshape = [8]\n')
    with Client(job_name) as client:
        push(client)
    kill_all(job_name)
    view = Watcher(os.getuid()).look_at(job_name)
    assert view and view.facts()["state"].startswith("dead: run or serve continues it")


def test_another_job_of_that_name(job_name: str) -> None:
    """No point of it continues the curves of the job before."""
    feed = OneJob(job_name, lambda *_, **__: "")
    for is_first in (True, False):
        with Rig(job_name, (Tensor("w", (8,)),)):
            assert (feed.look() is not None) == is_first


def test_the_end_while_a_page_is_open(site: Site) -> None:
    stream = messages(site, "/stream")
    next(stream)
    assert site.running.signal(signal.SIGINT).code == 130
    assert "Traceback" not in site.running.err
    assert {kind for kind, _ in stream} <= {"update"}


def test_read_only(cli: Cli, job_name: str) -> None:
    with daemon(job_name, tensors=TENSORS):
        site = start(cli, "--read-only")
        site.sign_in()
        code, _, text = site.ask(f"/job/{job_name}")
        assert code == 200
        assert "<button" not in text.replace('<button id="png"', "")
        assert site.act(job_name, "set", settings="lr=0.5")[0] == 403
        open_ = start(cli, "--no-token")
        assert open_.ask(f"/job/{job_name}")[0] == 200
        assert open_.ask("/?token=of-an-older-link")[0] == 200
        assert open_.act(job_name, "stop")[0] == 403
        assert status(job_name)["settings"]["lr"] == 1.0


def test_addresses(cli: Cli) -> None:
    """Check that it listens at the loopback address only without a token."""
    result = cli("dashboard", "--listen", "0.0.0.0:0", "--no-token")
    assert result.code == 2
    assert "--no-token" in result.error
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = cli("dashboard", "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert result.code == 2
    assert "cannot listen" in result.error
    result = cli("dashboard", "--listen", "a..b:0")
    assert (result.code, "cannot listen at a..b" in result.error) == (2, True)
    site = start(cli, "--allow-host", "proxy.example", address="0.0.0.0:0")
    site.sign_in()
    assert site.ask("/", Host="proxy.example")[0] == 200
    assert site.ask("/", Host="other.example")[0] == 421


# -- hostile requests -----------------------------------------------------------------------------

REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "another origin": (403, {"Origin": "http://evil.example"}),
    "no origin": (403, {"Origin": None}),
    "an opaque origin": (403, {"Origin": "null"}),
    "an origin on another port": (403, {"Origin": "http://127.0.0.1:1"}),
    "no cookie": (403, {"Cookie": None}),
    "a wrong cookie": (403, {"Cookie": "gadei_ps_1=x; gadei_ps=y"}),
    "a cookie that is not valid": (403, {"Cookie": 'a="\x01;;;=,'}),
    "rebinding": (421, {"Host": "evil.example", "Origin": "http://evil.example"}),
    "rebinding, port": (421, {"Host": "evil.example:8470", "Origin": "http://evil.example:8470"}),
    "a host like ours": (421, {"Host": "127.0.0.1.evil.example"}),
    "a host with a user": (421, {"Host": "127.0.0.1@evil.example"}),
    "no host": (421, {"Host": None}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_actions(what: str, job: Client, job_name: str, site: Site) -> None:
    wanted, headers = REFUSED[what]
    code, _, text = site.ask(f"/job/{job_name}/set", "POST", "settings=lr%3D0.5", **headers)
    # Without a Host header, the request is not one of HTTP/1.1.
    assert code == (400 if what == "no host" else wanted), text
    assert status(job_name)["settings"]["lr"] == 1.0
    if wanted == 421:
        assert site.ask("/", Host=headers["Host"])[0] in (400, 421)


def test_a_wrong_token(site: Site) -> None:
    for token in ("x", site.token[:-1], site.token + "x", "", "%00", "é"):
        code, headers, _ = site.ask(f"/?token={quote(token)}", Cookie=None)
        assert code == 403
        assert "set-cookie" not in headers
    code, _, _ = site.ask(f"/?token={site.token}", "POST", "", Cookie=None)
    assert code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/static/../pages.py",
        "/static/%2e%2e/pages.py",
        "/static/..%2fpages.py",
        "/static/%2fetc%2fpasswd",
        "/run/../../etc/passwd",
        "/run/%2e%2e/%2e%2e/etc/passwd",
        "/run//etc/passwd",
        "/data?run=../../../etc/passwd",
        "/data?run=/etc/passwd",
        "/csv?run=%00",
        "/svg?run=/dev/zero",
        "/data?job=../x",
        "/job/..%2f..%2fetc",
        "/job/%2Ftmp%2Fx.sock",
        "/job/a%0ab",
        "//evil.example/",
        "/compare?a=/etc/passwd&b=/etc/passwd",
    ],
)
def test_paths(path: str, site: Site) -> None:
    code, headers, text = site.ask(path)
    assert 400 <= code < 500, text
    assert "root:" not in text
    assert "location" not in headers


def test_bodies_and_slow_requests(job: Client, job_name: str, site: Site) -> None:
    """Memory stays bounded, connections are closed, and nothing is done."""
    server = psutil.Process(site.running.pid)
    before = server.memory_info().rss
    long = "settings=lr%3D0.5&x=" + "y" * 20_000
    assert site.ask(f"/job/{job_name}/set", "POST", long)[0] in (400, 413)
    head = (
        f"POST /job/{job_name}/set HTTP/1.1\r\nHost: {site.host}\r\nCookie: {site.cookie}\r\n"
        f"Origin: http://{site.host}\r\n"
    ).encode()
    for kind in (b"Content-Length: 1073741824\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        assert flooded(site.port, head + kind, kind) < 64 * MB
    slow = [socket.create_connection(("127.0.0.1", site.port)) for _ in range(20)]
    for one in slow[:10]:
        one.sendall(head)  # the headers never end
    for one in slow[10:]:
        one.sendall(head + b"Content-Length: 20\r\n\r\nsettings=")
    began = time.monotonic()
    try:
        while any(alive(one) for one in slow):
            assert time.monotonic() - began < PATIENCE_S
            assert site.ask("/runs")[0] == 200
            time.sleep(0.5)
    finally:
        for one in slow:
            one.close()
    header = b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20)
    assert exchanged(site.port, header) in (b"HTTP/1.1 400", b"")
    for raw in (
        b"\x16\x03\x01\x00\xa5\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
    ):
        assert exchanged(site.port, raw) != b"HTTP/1.1 200"
    assert server.memory_info().rss - before < 64 * MB
    assert status(job_name)["settings"]["lr"] == 1.0
    assert site.ask("/")[0] == 200
    assert "Traceback" not in site.running.err


def flooded(port: int, head: bytes, kind: bytes) -> int:
    """Send a body of a gigabyte; return the bytes that were taken before the connection ended."""
    piece = b"y" * (1 << 16)
    if b"chunked" in kind:
        piece = b"10000\r\n" + piece + b"\r\n"
    sent = 0
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.settimeout(PATIENCE_S)
        try:
            one.sendall(head)
            while sent < 1 << 30:
                one.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
    return sent


def alive(one: socket.socket) -> bool:
    """Return whether the other end has not closed a connection."""
    one.setblocking(False)
    try:
        return bool(one.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


def exchanged(port: int, raw: bytes) -> bytes:
    """The version and the code of the reply to raw bytes; empty if the connection just ends."""
    with socket.create_connection(("127.0.0.1", port)) as one:
        one.settimeout(PATIENCE_S)
        try:
            one.sendall(raw)
            return one.recv(len(b"HTTP/1.1 200"), socket.MSG_WAITALL)
        except OSError:
            return b""


def test_streams_are_bounded(job: Client, job_name: str, site: Site) -> None:
    """Check that streams over the limit are refused; the others, and actions, continue."""
    head = (
        f"GET /job/{job_name}/stream HTTP/1.1\r\nHost: {site.host}\r\nCookie: {site.cookie}\r\n\r\n"
    )
    there = []
    replies = []
    try:
        for _ in range(70):
            one = socket.create_connection(("127.0.0.1", site.port))
            there.append(one)
            one.settimeout(PATIENCE_S)
            one.sendall(head.encode())
            replies.append(one.recv(12, socket.MSG_WAITALL))
        assert replies[0].endswith(b"200")
        assert replies[-1].endswith(b"503")
        assert site.act(job_name, "set", settings="lr=0.5")[0] == 200
    finally:
        for one in there:
            one.close()
    eventually(lambda: next(messages(site, f"/job/{job_name}/stream"), None))
