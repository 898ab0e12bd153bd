"""The words by which a watchdog and its servers know each other, in a job's real memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator

import pytest
import support
from support import PATIENCE_S
from support.quick import without_fork_server
from support.words import at_each_line, words

from gadei_ps import _native, sync
from gadei_ps.machine import log, process
from gadei_ps.memory import layout
from gadei_ps.memory.layout import CONTROL, SHARD, ServerState
from gadei_ps.watchdog import servers
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.server_starter import ServerStarter
from gadei_ps.watchdog.servers import Servers


@pytest.fixture
def watched(job_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    """The servers of a new job: processes that do nothing."""
    memory = JobMemory(support.config(job_name))
    memory.create_control(sync.parse("asp"))
    idle = ["sh", "-c", "exec sleep 1000", "a server"]
    monkeypatch.setattr(process, "module_command", lambda *what: [*idle, *what])
    selector = selectors.DefaultSelector()
    made = Servers(memory, selector, log.get(), pytest.fail)
    with without_fork_server():
        yield made
    for one in made.running.values():
        one.kill("the test is over")
    with contextlib.suppress(KeyError):
        hear(made, 2)
    selector.close()
    memory.remove()


def hear(made: Servers, deaths: int) -> None:
    """Wait until so many processes have died, or none is left."""
    while deaths and made.running:
        for key, mask in made.selector.select(PATIENCE_S):
            key.data(mask)
            deaths -= 1


def test_a_server_starts_and_dies(watched: Servers) -> None:
    """Check that its pid never stands beside words of another server."""
    control = watched.memory.control.view(CONTROL)
    line = control["server"][0]
    line["start"], line["confirmed"] = 7, 1  # of the one before
    seen = []
    with at_each_line(lambda: seen.append(words(line)), servers):
        watched.tick(1.0)
    one = watched.running[0]
    whole = {
        "pid": one.pid,
        "start": process.start_ticks(one.pid),
        "state": ServerState.STARTING,
    }
    assert seen[-1] == whole
    assert all(one == whole for one in seen if "pid" in one)
    assert control["server_starts"] == 1
    os.kill(one.pid, signal.SIGKILL)
    hear(watched, 1)
    assert words(line) == {"start": whole["start"]}
    assert (control["server_starts"], control["server_deaths"]) == (1, 1)


def test_the_words_of_the_fork_server(watched: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that its pid never stands beside the start of another one."""
    control = watched.memory.control.view(CONTROL)
    control["fork_server_pid"], control["fork_server_start"] = former = (os.getpid() + 1, 7)
    monkeypatch.setattr(ServerStarter, "pid", os.getpid())
    seen = []

    def look() -> None:
        seen.append((int(control["fork_server_pid"]), int(control["fork_server_start"])))

    with at_each_line(look, servers):
        watched.tick(1.0)
    whole = (os.getpid(), process.start_ticks(os.getpid()))
    assert seen[-1] == whole
    assert {one for one in seen if one[0]} == {former, whole}
    monkeypatch.setattr(ServerStarter, "pid", 0)
    watched.tick(2.0)
    assert control["fork_server_pid"] == 0
    watched._starter.died()
    assert control["fork_server_deaths"] == 1


def test_servers_are_adopted(watched: Servers) -> None:
    """The one that lives, and not the one whose pid is another process's by now."""
    watched.tick(1.0)
    control = watched.memory.control.view(CONTROL)
    lines, one = control["server"], watched.running[0]
    for field in ("pid", "state", "start", "confirmed"):
        lines[1][field] = lines[0][field]
    lines["state"] = ServerState.READY
    lines[1]["start"] -= 1
    before = words(lines)
    other = Servers(watched.memory, selectors.DefaultSelector(), log.get(), print)
    other.adopt()
    assert [each.pid for each in other.running.values()] == [one.pid]
    assert words(lines) == before | {"pid": {0: one.pid}, "state": {0: ServerState.READY}}
    assert control["server_deaths"] == 0
    os.close(other.running[0].pidfd)
    other.selector.close()


def test_a_server_that_compiles_for_a_new_model(
    watched: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing is progress then, also for the standby, which waits."""
    control = watched.memory.control.view(CONTROL)
    lines = control["server"]
    used = {0: 5000.0}  # by the active server, s
    monkeypatch.setattr(process, "tree_cpu_s", lambda pid: used.get(pid, used[0]))
    watched.tick(1.0)
    control["lease_pid"] = watched.running[0].pid
    lines[0]["beat"] = 1
    watched._kill_hung(1.0)
    lines[0]["confirmed"], lines[0]["state"] = 1, ServerState.READY
    watched.tick(2.0)
    standby = watched.running[1]
    used[standby.pid] = 1.0
    lines[1]["beat"] = 1
    watched._kill_hung(2.5)
    lines[1]["state"] = ServerState.READY
    watched._kill_hung(3.0)
    lines["state"] = ServerState.STARTING
    for now in range(4, 2 * int(servers.SERVER_SILENT_S)):
        used[0] += 1.0
        lines[1]["beat"] += 1
        watched._kill_hung(float(now))
    assert not any(one.killed for one in watched.running.values())
    for later in range(int(servers.SERVER_SILENT_S) + 2):
        watched._kill_hung(float(now + later))
    assert all(one.killed.startswith("no progress") for one in watched.running.values())


def test_new_leases(watched: Servers) -> None:
    """Whatever has been left in their place, a server can take each of them."""
    segment = watched.memory.control
    control = segment.view(CONTROL)
    before = words(control)
    leases = [segment.word(CONTROL, name) for name in ("lease", "standby_lease")]
    first = segment.word(CONTROL, "shard") + layout.offset(SHARD, "lease")
    leases += [first + number * SHARD.itemsize for number in range(layout.MAX_SHARDS)]
    size = CONTROL["lease"].itemsize
    for at in leases:
        at -= segment.address
        segment.memory[at : at + size] = b"\xff" * size
    control["sleepers"] = control["lease_shards"] = control["lease_state"] = 1
    watched.tick(1.0)
    for at in leases:
        assert _native.lease_take(at, 0) == 0
        _native.lease_release(at)
    fields = words(control)
    for field in ("sleepers", "lease_shards", "lease_state"):
        assert field not in fields
    changed = {
        name.split(".")[0].split("[")[0] for name in fields if fields[name] != before.get(name)
    }
    assert changed == {"server", "server_starts", "lease", "standby_lease", "shard", "manager_bell"}
