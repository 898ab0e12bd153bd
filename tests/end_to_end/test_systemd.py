"""`gadei-ps serve` as a service of systemd: a real notify socket in the manager's place."""

from __future__ import annotations

import json
import os
import pwd
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shell import Cli, Running
from support import Manager, blocked_disk, eventually, gone, segments, status
from support.blocked_disk import BlockedDisk

from gadei_ps import homes
from gadei_ps.errors import NotSaved
from gadei_ps.job import paths
from gadei_ps.job import service as advice
from gadei_ps.learners.client import Client
from gadei_ps.machine import cgroups
from gadei_ps.memory import presence, shm
from gadei_ps.storage import files
from gadei_ps.storage.checkpoint import newest
from gadei_ps.watchdog import notify, stopping, supervisor, worker

MODEL = "standby = false\n[[tensors]]\nname = 'w'\nshape = [100]\n"
WATCHDOG_S = 2.0
WHY_NOT = blocked_disk.why_not()


class Systemd(Manager):
    """Every assignment that it has received, in order, and when.

    A thread takes them: the kernel keeps ten messages, and what is true at one moment only is not
    sent again.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._assigned: list[tuple[str, str, float]] = []
        self._taking = threading.Lock()
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing:
            if select.select([self.socket], [], [], 0.02)[0]:
                self.assigned()

    def close(self) -> None:
        self._closing = True
        self._reader.join()
        super().close()

    def assigned(self) -> list[tuple[str, str, float]]:
        with self._taking:
            for message in self.heard():
                for line in message.splitlines():
                    name, _, value = line.partition("=")
                    self._assigned.append((name, value, time.monotonic()))
            return self._assigned.copy()

    def said(self, name: str) -> list[str]:
        return [value for one, value, _ in self.assigned() if one == name]

    def names(self) -> list[str]:
        return [name for name, _, _ in self.assigned()]

    def extensions(self) -> list[int]:
        """Return the extensions of the stop (µs)."""
        begun = self.names().index("STOPPING")
        more = "EXTEND_TIMEOUT_USEC"
        return [int(value) for name, value, _ in self.assigned()[begun:] if name == more]

    def wait(self, name: str, count: int = 1) -> list[str]:
        """Wait until it has sent this so often."""
        eventually(lambda: len(self.said(name)) >= count, what=self.assigned)
        return self.said(name)


@pytest.fixture
def manager(runtime_dir: Path) -> Iterator[Systemd]:
    made = Systemd(runtime_dir / "notify")
    yield made
    made.close()


def start(
    cli: Cli, manager: Systemd, job: str, text: str, *options: str, unit: str = "gadei-ps"
) -> Running:
    """Start as the unit does; WATCHDOG_PID would be the child's, which is not known yet."""
    file = cli.directory / f"{job}.toml"
    file.write_text(text)
    cli.made(job)
    return cli.start(
        "serve",
        file,
        *options,
        GADEI_PS_UNIT=f"{unit}@{job}.service",
        NOTIFY_SOCKET=manager.address,
        WATCHDOG_USEC=str(int(WATCHDOG_S * 1e6)),
    )


def test_ready_means_that_a_learner_can_attach(cli: Cli, manager: Systemd, job_name: str) -> None:
    service = start(cli, manager, job_name, MODEL)
    assert manager.wait("READY") == ["1"]
    with Client(job_name) as client:  # at the first attempt
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        eventually(
            lambda: "1 learner, version 1, 0/s" in manager.said("STATUS"),
            what=lambda: manager.said("STATUS"),
        )
    eventually(lambda: manager.said("STATUS")[-1].startswith("0 learners"))
    assert not manager.said("STOPPING")
    service.process.terminate()
    assert service.wait().code == 0
    assert manager.said("READY") == manager.said("STOPPING") == ["1"]
    assert manager.extensions()[0] > 10e6
    names = manager.names()
    assert names.index("EXTEND_TIMEOUT_USEC") < names.index("READY") < names.index("STOPPING")


def test_a_stop_by_command_is_announced(
    cli: Cli, manager: Systemd, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        notify, "EXTENSION_INTERVAL_S", 0.0
    )  # also in the commands, which are forks
    monkeypatch.setattr(files, "_PIECE", 1)
    service = start(cli, manager, job_name, MODEL + "[checkpoint]\nevery_s = 0\n")
    manager.wait("READY")
    cli("stop", job_name)
    assert service.wait().code == 0
    assert manager.said("STOPPING") == ["1"]
    limits = manager.extensions()
    assert limits[0] < 60e6, "more only if the last checkpoint makes progress"
    assert max(limits) > 55e6
    found, _, _ = newest(Path(os.environ["GADEI_PS_STATE_DIR"]) / job_name)
    assert found is not None


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_stop_on_a_disk_that_blocks(
    cli: Cli, manager: Systemd, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in its time, and says what was not saved. The memory stays."""
    directory = Path(os.environ["GADEI_PS_STATE_DIR"]) / job_name
    text = MODEL + "[checkpoint]\nevery_s = 0\n"
    with monkeypatch.context() as short:  # not of the second one, which is to save
        short.setattr(stopping, "STOP_SILENT_S", 0.5)
        service = start(cli, manager, job_name, text)
    manager.wait("READY")
    with Client(job_name) as client:
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
    with BlockedDisk(directory) as disk:
        service.process.terminate()
        disk.waits()
        assert service.wait().code == NotSaved.exit_code
    assert "the disk has made no progress" in service.err
    assert "stopped at version 1" in service.err
    assert max(manager.extensions()) < 90e6
    service = start(cli, manager, job_name, text)
    manager.wait("READY", 2)
    service.process.terminate()
    assert service.wait().code == 0
    found, _, _ = newest(directory)
    assert found is not None
    assert found.version == 1


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_start_on_a_disk_that_blocks(
    cli: Cli, manager: Systemd, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop ends it: nothing of the job is left, though the kernel may still hold the process."""
    monkeypatch.setattr(worker, "WORKER_END_S", 0.1)
    directory = Path(os.environ["GADEI_PS_STATE_DIR"]) / job_name
    directory.mkdir(parents=True)
    with BlockedDisk(directory) as disk:
        service = start(cli, manager, job_name, MODEL + "[checkpoint]\n")
        disk.waits()
        service.process.terminate()
        eventually(lambda: not segments(job_name))
        eventually(lambda: not paths.lock_path(job_name).exists())
    assert service.wait().code == 0


def test_names_and_processes_that_are_lost_are_told(
    cli: Cli, manager: Systemd, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups.Kills, "describe", lambda _: "the memory limit was reached")
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    control = shm.path_of(shm.segment_name(job_name, "control"))
    control.unlink()
    control.write_bytes(b"another file")  # even if something else has the name
    eventually(lambda: "lost their names" in "".join(manager.said("STATUS")[-1:]))
    control.unlink()
    eventually(lambda: "memory limit" in service.err)
    assert "lost their names" in cli("status", job_name).out
    service.process.terminate()
    assert service.wait().code == 0


def test_a_lost_marker_for_learners(
    cli: Cli, manager: Systemd, job_name: str, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again, before the unit is ready and later; if it cannot be, that is reported."""
    monkeypatch.setattr(supervisor, "SLOW_TICK_S", 0.05)
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    marker = runtime_dir / f"{job_name}.wanted"
    assert marker.exists()
    marker.unlink()
    eventually(marker.exists)
    eventually(lambda: "was lost" in service.err)
    marker.unlink()
    marker.symlink_to(runtime_dir / "no" / "where")
    message = f"units of learners do not start: {marker} cannot be made"
    eventually(lambda: message in "".join(manager.said("STATUS")[-1:]))
    marker.unlink()
    eventually(lambda: message not in manager.said("STATUS")[-1])
    runtime_dir.chmod(0o770)  # as setfacl does
    eventually(lambda: "mode 0770" in manager.said("STATUS")[-1])
    assert advice.command(job_name, "stop") == "gadei-ps stop", "which the watchdog's status has"
    runtime_dir.chmod(0o700)
    eventually(lambda: "mode 0770" not in manager.said("STATUS")[-1])
    moved = runtime_dir.rename(runtime_dir.with_name("moved"))
    eventually(marker.exists)
    shutil.rmtree(moved)
    service.process.terminate()
    assert service.wait().code == 0
    marker.unlink()
    by_hand = cli.serve(job_name, MODEL)
    assert not marker.exists()
    assert by_hand.signal(signal.SIGTERM).code == 0


def test_advice_fits_the_unit(cli: Cli, manager: Systemd, job_name: str) -> None:
    """A stop without its last checkpoint, and what the unit of the end then makes of it."""
    text = "history = false\n" + MODEL + "[checkpoint]\nevery_s = 0\n"
    service = start(cli, manager, job_name, text)
    manager.wait("READY")
    with Client(job_name) as client:
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
    directory = Path(os.environ["GADEI_PS_STATE_DIR"]) / job_name
    directory.rmdir()
    directory.write_text("")
    service.process.terminate()
    assert service.wait().code == NotSaved.exit_code
    end = f"gadei-ps-end@{job_name}"
    status = manager.said("STATUS")[-1]
    assert f"systemctl --user status {end}" in status
    assert "gadei-ps serve" not in status
    assert "no checkpoint; the job is stopping" in service.err
    assert "training continues" not in service.err
    service = start(cli, manager, job_name, text, "--finish", unit="gadei-ps-end")
    assert service.wait().code == NotSaved.exit_code
    status = manager.said("STATUS")[-1]
    assert f"systemctl --user start gadei-ps@{job_name}" in status
    assert f"gadei-ps gc {job_name}" in status
    directory.unlink()
    service = start(cli, manager, job_name, text, "--finish", unit="gadei-ps-end")
    assert service.wait().code == 0
    saved = "stopped at version 1; the newest checkpoint has version 1"
    assert manager.said("STATUS")[-1] == saved
    service = start(cli, manager, job_name, text, "--finish", unit="gadei-ps-end")
    assert service.wait().code == 0
    assert manager.said("STATUS")[-1] == "nothing of the job was left to be ended"


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_of_the_unit(
    cli: Cli,
    manager: Systemd,
    job_name: str,
    runtime_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    """MemoryMax= of a unit of the system, in a tree of files as systemd makes it."""
    unit = f"system.slice/system-gadei\\x2dps.slice/gadei-ps@{job_name}.service"
    kind, top, limit, used, option = (
        ("cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "rw,memory")
        if version == 1
        else ("cgroup2", "", "memory.max", "memory.current", "rw")
    )
    group = tmp_path / "sys/fs/cgroup" / top / unit
    self = tmp_path / "proc/self"
    for path in (group, self):
        path.mkdir(parents=True)
    mount = f"31 23 0:28 / /sys/fs/cgroup/{top} rw - {kind} {kind} {option}\n"
    (self / "mountinfo").write_text(mount)
    (self / "cgroup").write_text(f"{4 if version == 1 else 0}:{top}:/{unit}\n")
    (group / limit).write_text("1000000\n")
    (group / used).write_text("999000\n")
    found = cgroups.tightest(tmp_path)
    assert found is not None
    monkeypatch.setattr(cgroups, "tightest", lambda: found)
    monkeypatch.setattr(homes, "RUNTIME", runtime_dir)
    service = start(cli, manager, job_name, MODEL)
    assert service.wait().code == 1
    status = manager.said("STATUS")[-1]
    assert status.startswith(f"failed: the memory limit {group / limit} has 0.0 MiB free")
    assert "MemoryMax= of systemd" in status
    user = pwd.getpwuid(os.getuid()).pw_name
    assert f"sudo -u {user} env GADEI_PS_RUNTIME_DIR={runtime_dir} gadei-ps gc" in status
    assert not segments(job_name)


def test_memory_of_another_file_is_left_to_the_end(
    cli: Cli, manager: Systemd, job_name: str
) -> None:
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    service.process.kill()
    service.process.wait()
    service = start(cli, manager, job_name, MODEL.replace("100", "101"))
    assert service.wait().code == 2
    status = manager.said("STATUS")[-1]
    assert f"gadei-ps-end@{job_name} ends it" in status
    assert "--fresh" not in status
    service = start(cli, manager, job_name, MODEL, "--finish", unit="gadei-ps-end")
    assert service.wait().code == 0


def test_what_cannot_start_is_never_ready(cli: Cli, manager: Systemd, job_name: str) -> None:
    service = start(cli, manager, job_name, MODEL + "weights = 'nowhere'\n[optimizer]\nlr = -1\n")
    assert service.wait().code != 0
    assert not manager.said("READY")
    (status,) = manager.said("STATUS")
    assert status.startswith(f"failed: {cli.directory / job_name}.toml: tensors.0.weights: ")


def test_what_fails_later_says_why(cli: Cli, manager: Systemd, job_name: str) -> None:
    service = start(cli, manager, job_name, "weights = 'nowhere.npz'\n")
    assert service.wait().code != 0
    (status,) = manager.said("STATUS")
    assert status.startswith("failed: ")
    assert "nowhere.npz" in status


def test_pings(cli: Cli, manager: Systemd, job_name: str) -> None:
    """More often than systemd wants them, but not on every turn of its loop."""
    start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    manager.wait("WATCHDOG", len(manager.said("WATCHDOG")) + 3)
    gaps = np.diff([at for name, _, at in manager.assigned() if name == "WATCHDOG"][-4:])
    # On a busy machine single ones are late, and so near to the next.
    assert gaps.min() < WATCHDOG_S, gaps
    assert gaps.mean() > WATCHDOG_S / 4, gaps


def test_nobody_else_speaks_in_its_name(
    cli: Cli, manager: Systemd, job_name: str, interpreters: None
) -> None:
    """Check that servers and learners do not inherit the socket, which would act as the service."""
    script = """
        from gadei_ps.learners.client import Client
        with Client() as client:
            client.push({})
            client.take_batch()  # there will be none
    """
    (cli.directory / "learner.py").write_text(textwrap.dedent(script))
    command = json.dumps([sys.executable, str(cli.directory / "learner.py")])
    text = MODEL.replace("standby = false\n", "") + f"[learners]\ncommand = {command}\n"
    start(cli, manager, job_name, text)
    manager.wait("READY")
    eventually(lambda: status(job_name)["standby_pid"])
    eventually(lambda: status(job_name)["version"] > 0)
    pids = presence.server_pids(job_name)
    pids += [row["pid"] for row in status(job_name)["learners"]]
    assert len(pids) == 3
    for pid in pids:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        names = {line.partition(b"=")[0] for line in environ}
        assert b"PATH" in names
        assert not names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"}


def test_a_restart_adopts(cli: Cli, manager: Systemd, job_name: str) -> None:
    """Restart as systemd does after it has killed the watchdog: KillMode=process."""
    service = start(cli, manager, job_name, MODEL)
    manager.wait("READY")
    with Client(job_name) as client:
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        server = status(job_name)["server_pid"]
        service.signal(signal.SIGKILL)
        service = start(cli, manager, job_name, MODEL)
        manager.wait("READY", 2)
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        now = status(job_name)
        assert (now["server_pid"], now["watchdog_pid"]) == (server, service.pid)
        assert [row["pid"] for row in now["learners"]] == [os.getpid()]
    service.process.terminate()
    assert service.wait().code == 0
    assert gone(server)
    assert not segments(job_name)


def test_a_start_over_an_interrupted_stop(cli: Cli, manager: Systemd, job_name: str) -> None:
    """It is ready once the stop is complete and the job has started again, and continues then."""
    text = MODEL + "[checkpoint]\nevery_s = 0\n"
    service = start(cli, manager, job_name, text)
    manager.wait("READY")
    with Client(job_name) as client:
        client.push({"w": np.ones(100, np.float32)})
        client.wait_applied()
        stop = cli.start("stop", job_name, "--drain")
        manager.wait("STOPPING")
        service.signal(signal.SIGKILL)
        stop.wait()
    before = len(manager.names())
    service = start(cli, manager, job_name, text)
    manager.wait("READY", 2)
    notices = [(name, value) for name, value, _ in manager.assigned()[before:]]
    meanwhile = notices[: notices.index(("READY", "1"))]
    assert any(name == "EXTEND_TIMEOUT_USEC" for name, _ in meanwhile)
    assert any(value.startswith("completing an interrupted stop: ") for _, value in meanwhile)
    assert status(job_name)["checkpoint_version"] == status(job_name)["version"] == 1
    manager.wait("WATCHDOG", len(manager.said("WATCHDOG")) + 2)
    assert manager.said("STOPPING") == ["1"], "of the first watchdog"
    service.process.terminate()
    assert service.wait().code == 0
