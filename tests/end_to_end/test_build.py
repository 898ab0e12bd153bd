"""Processes of another build are refused: two installations, and an upgrade under a running job."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from shell import Cli
from support import PATIENCE_S, eventually, gone, kill_all, live_weights, segments, status

from gadei_ps import _native
from gadei_ps.learners.client import Client
from gadei_ps.memory import build, layout, presence, segment, shm

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
TOML = "standby = true\n[optimizer]\nkind = 'sgd'\nlr = 1.0\n[[tensors]]\nname = 'w'\nshape = [8]\n"

LEARNER = """
#include <stdio.h>
#include "gadei.h"
int main(int count, char **words)
{
    gadei_learner *learner;
    int result = count < 2 ? -1 : gadei_attach(words[1], "other", &learner);
    puts(gadei_error(NULL));
    return result < 0;
}
"""


def copied(directory: Path) -> Path:
    """A copy of the installed package, to be found by PYTHONPATH."""
    package = directory / "gadei_ps"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gadei_ps", package, ignore=ignored)
    for room in ("learners", "watchdog"):
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    return package


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed_native(directory: Path) -> Path:
    """A copy of native/ in which one source of the extension differs, with its own identity."""
    native = directory / "native"
    shutil.copytree(NATIVE, native)
    shutil.copy(ROOT / "setup.py", directory)
    with (native / "ps_ring.c").open("a") as source:
        source.write("/* of another build */\n")
    subprocess.run([sys.executable, native / "build_identity.py"], check=True)
    return native


def test_the_identity_is_that_of_the_sources(tmp_path: Path) -> None:
    identity = script(NATIVE / "build_identity.py")
    made = (NATIVE / "ps_build.h").read_text()
    assert made == identity.header(), "run native/build_identity.py"
    assert f"0x{_native.BUILD:016x}ull" in made, "the extension is not built from these sources"
    names = {path.name for path in identity.sources()}
    assert {"module.c", "ps_layout.h", "ps_codes.h", "ps_ring.c"} <= names
    assert not {"ps_build.h", "gadei_push.c", "gadei.h"} & names, "not part of the extension"
    assert (changed_native(tmp_path) / "ps_build.h").read_text() != made


def set_up(directory: Path, before: str = "pass") -> subprocess.CompletedProcess[str]:
    script = f"import pathlib, runpy, sys; {before}; sys.argv = ['setup.py', '--name']; "
    script += "runpy.run_path('setup.py', run_name='__main__')"
    command = [sys.executable, "-P", "-c", script]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_an_installation_renews_the_identity(tmp_path: Path) -> None:
    """Also one by pip alone; where the header cannot be written, it says so in one line."""
    native = changed_native(tmp_path)
    header = native / "ps_build.h"
    with (native / "ps_ring.c").open("a") as source:
        source.write("/* and changed again */\n")
    stale = header.read_text()
    protect = (
        "exec('def no(*given): raise PermissionError(given[0])'); pathlib.Path.write_text = no"
    )
    refused = set_up(tmp_path, before=protect)
    assert refused.returncode != 0 and len(refused.stderr.splitlines()) == 1, refused
    assert "native/ps_build.h is stale" in refused.stderr
    assert header.read_text() == stale
    assert set_up(tmp_path).returncode == 0
    assert header.read_text() == script(native / "build_identity.py").header() != stale
    assert set_up(tmp_path, before=protect).returncode == 0, "it is right already"
    (native / "build_identity.py").unlink()  # as in a source distribution
    assert set_up(tmp_path).returncode == 0


def test_learners_of_another_build_are_refused(cli: Cli, job_name: str, tmp_path: Path) -> None:
    """Refuse them in C and in Python; the job continues."""
    cli.serve(job_name, TOML.replace("true", "false"))
    native = changed_native(tmp_path)
    package = copied(tmp_path)
    program, extension = tmp_path / "other", next(package.glob("_native.*.so"))
    names = script(NATIVE / "build_identity.py").sources(native)
    include = [f"-I{native}", f"-I{sysconfig.get_path('include')}", "-std=gnu11"]
    sources = [path for path in names if path.suffix == ".c"]
    shared = ["cc", *include, "-shared", "-fPIC", "-o", extension, *sources, "-pthread"]
    subprocess.run(shared, check=True)
    source = tmp_path / "other.c"
    source.write_text(LEARNER)
    client = [*native.glob("gadei_*.c"), *native.glob("ps_*.c")]
    subprocess.run(["cc", *include, "-o", program, source, *client, "-lrt"], check=True)
    c = subprocess.run([program, job_name], capture_output=True, text=True, timeout=PATIENCE_S)
    attach = f"from gadei_ps.learners.client import Client; Client({job_name!r})"
    python = subprocess.run(
        [sys.executable, "-P", "-c", attach],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    ours = f"made by build {_native.BUILD:016x} of gadei-ps, this program is build "
    for message in (c.stdout, python.stderr.strip().splitlines()[-1]):
        assert ours in message and message.count("\n") <= 1, message
        assert f"{job_name}.control" in message and "use the same gadei-ps" in message
    learner = Client(job_name)
    learner.push({"w": np.ones(8, np.float32)})
    learner.detach()
    eventually(lambda: status(job_name)["version"] == 1)


def test_an_upgrade_under_a_running_job(
    cli: Cli, job_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server continues with the old build.

    Without it, the next standby is refused once, the active server and a later standby continue.
    """
    upgraded = tmp_path / "upgraded"
    upgraded.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(upgraded))
    daemon = cli.serve(job_name, TOML)
    standby = eventually(lambda: status(job_name)["standby_pid"])
    with (copied(upgraded) / "server" / "driver.py").open("a") as source:
        source.write("# of another build\n")
    fork_server = status(job_name)["fork_server_pid"]
    os.kill(standby, signal.SIGKILL)
    eventually(lambda: status(job_name)["standby_pid"] not in (0, standby))
    assert cli("set", job_name, "sync=elastic-bsp:10").code == 0  # whose search it has, too
    assert cli("set", job_name, "sync=asp").code == 0
    assert status(job_name)["fork_server_pid"] == fork_server
    for name in ("fork_server_pid", "standby_pid"):
        os.kill(status(job_name)[name], signal.SIGKILL)
    missing = eventually(lambda: status(job_name)["standby_missing"], what=lambda: daemon.err)
    assert "another build" in missing
    assert "another build" in cli("status", job_name, PYTHONPATH="").out
    control = segment.attach(
        shm.segment_name(job_name, "control"), layout.SegmentKind.CONTROL, writable=False
    ).view(layout.CONTROL)
    learner = Client(job_name)
    for _ in range(200):
        learner.wait_turn()
        learner.push({"w": np.ones(8, np.float32)})
    learner.wait_applied()
    learner.detach()
    assert live_weights(job_name)[0] == -200
    assert int(control["server_starts"]) == 4 and not status(job_name)["standby_pid"]
    refusals = [
        line for line in daemon.err.splitlines() if "those of this program are build" in line
    ]
    assert len(refusals) == 1, daemon.err
    assert f"made for servers of build {build.of_server():016x}" in refusals[0]

    # The next watchdog is also of the new build.
    os.kill(status(job_name)["watchdog_pid"], signal.SIGKILL)
    eventually(lambda: gone(int(control["watchdog_pid"])))
    result = cli("serve", f"{job_name}.toml")
    assert result.code == 2 and "is still in memory, made for servers of build" in result.err, (
        result
    )
    assert len(result.err.strip().splitlines()) == 1
    assert segments(job_name), "its memory stays"


def of_another_build(job: str) -> None:
    """Make this job's memory that of another build."""
    name = shm.segment_name(job, "control")
    control = segment.attach(name, layout.SegmentKind.CONTROL, writable=True)
    _native.store(control.word(layout.CONTROL, "build"), 0xABC)


def test_memory_of_another_build_stays(cli: Cli, job_name: str) -> None:
    """Check that nothing removes it unasked or passes it over: its own build can use it."""
    cli.serve(job_name, f"checkpoint = {{directory = '{cli.directory}'}}\n" + TOML)
    with Client(job_name) as learner:
        assert cli("checkpoint", job_name).code == 0
        learner.push({"w": np.ones(8, np.float32)})
        learner.wait_applied()
    kill_all(job_name)
    of_another_build(job_name)
    before = segments(job_name)
    # Not without --dry-run: other tests leave things behind for a moment, which are theirs.
    wanted = cli("gc", "--dry-run", "--json").json["removed"]
    assert not [one for one in wanted if one["job"] == job_name]
    assert segments(job_name) == before
    difference = f"made by build {0xABC:016x} of gadei-ps, this program is build"
    assert difference in cli("export", job_name, "out.npz").error
    assert not (cli.directory / "out.npz").exists()
    advice = cli("status", job_name).error
    assert "continue it with its own gadei-ps (it was " + difference in advice
    assert f"drop it (gadei-ps gc {job_name})" in advice
    assert cli("gc", job_name).code == 0
    assert not segments(job_name)


def test_an_orphan_of_another_build_is_stopped(cli: Cli, job_name: str) -> None:
    daemon = cli.serve(job_name, TOML.replace("true", "false"))
    with Client(job_name) as learner:  # its servers do not end while it is there
        learner.push({"w": np.ones(8, np.float32)})
        learner.wait_applied()
        servers = presence.server_pids(job_name)
        daemon.signal(signal.SIGKILL)
        of_another_build(job_name)
        difference = f"made by build {0xABC:016x} of gadei-ps, this program is build"
        discard = f"gadei-ps stop {job_name} --discard"
        for command in ("status", "stop"):
            message = cli(command, job_name).error
            assert (
                difference in message and "with its own gadei-ps" in message and discard in message
            )
        message = cli("serve", f"{job_name}.toml").err
        assert difference in message and "start it with its own gadei-ps, or drop it" in message
        assert servers and not any(gone(pid) for pid in servers)
        stopped = cli("stop", job_name, "--discard", "--json").json
        assert stopped["gradients_applied"] == 1
        assert all(gone(pid) for pid in servers) and not segments(job_name)


def test_a_start_whose_servers_are_refused_ends(job_name: str) -> None:
    """The files were replaced after the watchdog had begun."""
    code = (
        "from gadei_ps.job.config import JobConfig\n"
        "from gadei_ps.memory import build\n"
        "from gadei_ps.watchdog import supervisor\n"
        "build.of_server = lambda: 1\n"
        f"supervisor.serve(JobConfig(name={job_name!r}))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "JobFailed: no server can start: gadei-ps has been replaced" in done.stderr, done
    assert not segments(job_name)
