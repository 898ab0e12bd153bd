"""Parts of the dashboard without a server: columns of a history, its new lines, and hosts."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from gadei_ps.commands import history
from gadei_ps.dashboard import pages
from gadei_ps.dashboard.access import Access
from gadei_ps.dashboard.data import View
from gadei_ps.dashboard.live import AllJobs
from gadei_ps.errors import UsageError
from gadei_ps.monitoring import series
from gadei_ps.monitoring.following import Follower
from gadei_ps.monitoring.reading import Job, State
from gadei_ps.storage.history_file import HistoryFile, line


def point(time: float, **more: Any) -> dict[str, Any]:
    return {"time": time, "version": int(time), "samples": int(time), "gradients_applied": 1} | more


def test_columns() -> None:
    lines = [
        point(1.0, loss=2.0, samples_per_s=8.0, learning_rate=0.5),
        {"time": 1.5, "version": 1, "set": {"lr": [1.0, 0.5]}},
        {"time": 2.0, "version": 2, "measured": {"accuracy": 0.5, "epoch": 1.0}},
        {"time": 2.5, "version": 2, "event": "failover", "ms": 3.25, "pid": 1, "dead_pid": 2},
        point(3.0, loss=None, samples_per_s=4.0),
        {"time": 4.0, "version": 3, "ended": "finished"},
        point(5.0, loss=1.0, samples_per_s=2.0, reported={"penalty": 0.25, "name": "x"}),
        point(6.0, learning_rate=0.5, reported={"learning_rate": 0.25}),
    ]
    made = series.columns(lines)
    assert made["time"] == [1.0, 2.0, 3.0, 5.0, 6.0]
    assert made["series"] == {
        "accuracy": [None, 0.5, None, None, None],
        "learning_rate": [0.5, None, None, None, 0.25],
        "loss": [2.0, None, None, 1.0, None],
        "penalty": [None, None, None, 0.25, None],
        "samples_per_s": [8.0, None, 4.0, 2.0, None],
    }
    assert [(one["kind"], one["text"]) for one in made["events"]] == [
        ("set", "set lr 1 -> 0.5"),
        ("failover", "failover in 3.2 ms"),
        ("ended", "finished"),
    ]
    assert [one["is_exact"] for one in made["events"]] == [True, False, True]
    barrier = series.event({"time": 1.0, "version": 1, "set": {"sync": ["asp", "bsp"]}})
    assert barrier is not None
    assert not barrier["is_exact"]
    table = series.as_csv([*lines, {"time": 5.0, "command": "=cmd()"}]).split("\r\n")
    assert table[0].startswith("time,version,")
    assert table[0].endswith(",event")
    assert table[9].endswith(",'=cmd()"), "a spreadsheet would run it"
    assert series.columns([])["series"] == {}


def test_reported_values_with_names_of_the_jobs_own() -> None:
    """They mix with none of its curves and columns: scripts may report any name."""
    given = dict.fromkeys(("loss", "queue", "time", "version", "gradients_per_s", "epoch"), 9.0)
    lines = [point(1.0, loss=2.0, reported=given), point(2.0, loss=1.0)]
    found = series.columns(lines)["series"]
    assert found["loss"] == [2.0, 1.0]
    assert found["gradients_per_s"] == [None, 0.0]
    taken = [f"reported/{name}" for name in given if name != "epoch"]
    assert all(found[name] == [9.0, None] for name in ("epoch", *taken))
    assert "queue" not in found
    (row, _) = csv.DictReader(io.StringIO(series.as_csv(lines)))
    assert (row["time"], row["version"], row["loss"]) == ("1.0", "1", "2.0")
    assert row["reported/time"] == "9.0"
    picture = series.plot(lines, "demo")
    assert all(f"<!-- {name} -->" in picture for name in taken)


def test_curves_are_interrupted_where_nothing_was_written() -> None:
    times = [*range(10), *range(40, 50), *range(51, 300, 3)]
    data = series.columns([point(float(at), loss=2.0) for at in times])
    xs, ys = series.curve(data, "loss", "time")
    assert [x for x, y in zip(xs, ys, strict=True) if y != 2.0] == [40.0]
    assert ys.count(2.0) == len(times)
    assert series.curve(data, "loss", "version") == (times, [2.0] * len(times))
    assert series.curve(series.columns([point(1.0, loss=2.0)]), "loss", "time") == ([1.0], [2.0])


def test_new_lines(tmp_path: Path) -> None:
    """Each line once, even if the file is thinned or another one meanwhile."""
    path = tmp_path / "history.jsonl"
    file = HistoryFile(path, most=10)
    file.append(line(point(1.0)))
    tail = Follower(path)
    assert [one["time"] for one in tail.read()] == [1.0]
    assert tail.read() == []
    seen = []
    for at in range(2, 40):
        file.append(line(point(float(at))))
        seen += [one["time"] for one in tail.read()]
    file._thin()
    file.append(line(point(40.0)))
    seen += [one["time"] for one in tail.read()]
    assert seen == [float(at) for at in range(2, 41)]
    with path.open("ab") as torn:
        torn.write(line(point(41.0))[:-5])
        torn.flush()
        assert tail.read() == []
        torn.write(line(point(41.0))[-5:])
    assert [one["time"] for one in tail.read()] == [41.0]
    path.unlink()
    assert tail.read() == []
    assert Follower(Path("a\0b")).read() == [], "a path in another user's memory"
    with pytest.raises(UsageError, match="there is no history yet"):
        history.lines(path)


@pytest.mark.parametrize(
    ("host", "asked", "refused"),
    [
        ("127.0.0.1", "localhost:1", False),
        ("127.0.0.1", "[::1]:8470", False),
        ("127.0.0.1", "LOCALHOST", False),
        ("127.0.0.1", "10.0.0.1:8470", True),
        ("127.0.0.1", "", True),
        ("127.0.0.1", "localhost:x", True),
        ("127.0.0.1", "localhost/path", True),
        ("10.0.0.1", "10.0.0.1:8470", False),
        ("10.0.0.1", "192.168.1.1", False),
        ("10.0.0.1", "gadei.example", True),
    ],
)
def test_hosts(host: str, asked: str, refused: bool) -> None:
    access = Access(host, 8470, read_only=False, token=True)
    headers = Headers({"host": asked, "cookie": f"gadei_ps_8470={access.session}"})
    refusal = access.refusal("GET", headers)
    assert (refusal is not None and refusal[0] == 421) == refused


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("Proxy.example", "proxy.example"),
        ("proxy.example:8443", "proxy.example:8443"),
        ("fe80::1", "[fe80::1]:8470"),
        ("http://proxy.example", None),
        ("proxy.example/path", None),
        ("", None),
    ],
)
def test_allowed_hosts(given: str, asked: str | None) -> None:
    """Accept names as copied from an address bar, and none that no request has."""
    how: dict[str, Any] = {"read_only": False, "token": True, "allow_hosts": [given]}
    if asked is None:
        with pytest.raises(UsageError, match=r"--allow-host: '.*' is not a host name"):
            Access("127.0.0.1", 8470, **how)
        return
    access = Access("127.0.0.1", 8470, **how)
    headers = Headers({"host": asked, "cookie": f"gadei_ps_8470={access.session}"})
    assert access.refusal("GET", headers) is None


def test_links() -> None:
    for host, wanted in (("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("box", "box")):
        access = Access(host, 8470, read_only=False, token=True)
        assert access.link == f"http://{wanted}:8470/?token={access.token}"


def test_static_files_have_licences() -> None:
    names = {path.name for path in (pages.HERE / "static").iterdir()}
    assert {"app.js", "style.css", "htmx.min.js", "uPlot.min.js", "uPlot.min.css"} <= names
    for licence in ("htmx.LICENSE", "uPlot.LICENSE"):
        assert (pages.HERE / "static" / licence).read_text()


def test_a_name_that_another_job_gets() -> None:
    """The table of all jobs shows nothing of the job before."""
    shown: list[Any] = []
    feed = AllJobs(lambda _, jobs: shown.extend(known for _, known in jobs) or "")
    for job_id in ("a", "a", "b"):
        view = View(Job("train", 0, State.RUNNING, job_id=job_id), "samples/s", speed=8.0)
        feed._watcher = SimpleNamespace(look=lambda view=view: [view])  # type: ignore[assignment]
        feed.look()
    assert shown[0] is shown[1]
    assert [list(one.speed) for one in shown] == [[8.0, 8.0], [8.0, 8.0], [8.0]]
