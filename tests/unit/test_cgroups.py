"""Memory limits of control groups, on a tree of files and on this machine's own hierarchy."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support import ring_of, segments

from gadei_ps.machine import cgroups
from gadei_ps.machine.cgroups import Limit

MB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A made-up system below a directory."""

    def __init__(self, root: Path, membership: str, *mounts: str) -> None:
        self.root = root
        self._write("proc/self/cgroup", membership)
        self._write("proc/self/mountinfo", "".join(f"{mount}\n" for mount in mounts))

    def _write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, files: Mapping[str, object]) -> None:
        for name, value in files.items():
            self._write(f"sys/fs/cgroup/{path}/{name}", f"{value}\n")

    def limit(self) -> tuple[str, int, int] | None:
        """File, limit and what is free."""
        found = cgroups.tightest(self.root)
        if found is None:
            return None
        return str(found.file.relative_to(self.root / "sys/fs/cgroup")), found.limit, found.free


V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = (
    "30 23 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755",
    "35 30 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory",
    "36 30 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices",
    "41 30 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw",
)


def v2(limit: object, used: int, cached: tuple[int, int] = (0, 0), high: object = "max") -> dict:
    stat = f"anon 5\nfile {sum(cached) + MB}\nshmem {MB}\n"
    stat += f"inactive_file {cached[0]}\nactive_file {cached[1]}"
    return {
        "memory.max": limit,
        "memory.high": high,
        "memory.current": used,
        "memory.stat": stat,
    }


def v1(limit: int, used: int, cached: tuple[int, int] = (0, 0)) -> dict:
    stat = "inactive_file 1\nactive_file 1\n"
    stat += f"total_inactive_file {cached[0]}\ntotal_active_file {cached[1]}"
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": stat,
    }


def test_v2_with_all_groups_above(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/system.slice/job.service/inner\n", V2_MOUNT)
    assert machine.limit() is None
    machine.group("system.slice/job.service/inner", v2("max", 10 * MB))
    assert machine.limit() is None
    machine.group("system.slice/job.service", v2(100 * MB, 30 * MB))
    assert machine.limit() == ("system.slice/job.service/memory.max", 100 * MB, 70 * MB)
    machine.group("system.slice", v2(200 * MB, 150 * MB))
    assert machine.limit() == ("system.slice/memory.max", 200 * MB, 50 * MB)
    machine.group("system.slice", v2(200 * MB, 150 * MB, cached=(40 * MB, 5 * MB)))
    assert machine.limit() == ("system.slice/job.service/memory.max", 100 * MB, 70 * MB)
    machine.group("system.slice/job.service/inner", v2("max", 10 * MB, high=12 * MB))
    assert machine.limit() == ("system.slice/job.service/inner/memory.high", 12 * MB, 2 * MB)
    machine.group("system.slice/job.service/inner", v2(9 * MB, 10 * MB))
    assert machine.limit() == ("system.slice/job.service/inner/memory.max", 9 * MB, 0)


def test_v1_beside_an_empty_v2(tmp_path: Path) -> None:
    membership = "9:name=systemd:/\n5:devices:/box\n4:cpu,memory:/box/inner\n0::/\n"
    machine = Machine(tmp_path, membership, *V1_MOUNTS)
    machine.group("memory/box/inner", v1(NO_LIMIT_V1, 10 * MB))
    machine.group("memory", v1(NO_LIMIT_V1, 999 * MB))
    assert machine.limit() is None
    machine.group("memory/box", v1(100 * MB, 60 * MB, cached=(2 * MB, 3 * MB)))
    assert machine.limit() == ("memory/box/memory.limit_in_bytes", 100 * MB, 45 * MB)


@pytest.mark.parametrize(
    ("membership", "mount"),
    [
        ("0::/\n", V2_MOUNT),
        ("0::/docker/abc\n", V2_MOUNT.replace("0:28 / ", "0:28 /docker/abc ")),
        ("0::/docker/abc\n", V2_MOUNT.replace("0:28 / ", "0:28 /../.. ")),
        ("0::/../other\n", V2_MOUNT),
    ],
    ids=["namespace", "bound", "mounted outside", "moved"],
)
def test_a_container_sees_its_own_group_as_the_root(
    tmp_path: Path, membership: str, mount: str
) -> None:
    machine = Machine(tmp_path, membership, mount)
    machine.group(".", v2(64 * MB, MB))
    assert machine.limit() == ("memory.max", 64 * MB, 63 * MB)


def test_odd_names_and_files(tmp_path: Path) -> None:
    mount = V2_MOUNT.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/a\040b")
    machine = Machine(tmp_path, "0::/c:d\nrubbish\n", mount, "rubbish", "")
    machine.group("a b/c:d", v2(64 * MB, MB))
    assert machine.limit() == ("a b/c:d/memory.max", 64 * MB, 63 * MB)
    machine.group("a b/c:d", {"memory.stat": "what is this"})
    assert machine.limit() == ("a b/c:d/memory.max", 64 * MB, 63 * MB)
    machine.group("a b/c:d", {"memory.current": "what is this"})
    assert machine.limit() is None
    assert cgroups.tightest(tmp_path / "nothing") is None


def test_a_mount_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """Every user may make one, and watchdogs look at the mounts every second."""
    machine = Machine(tmp_path, "0::/a\n", V2_MOUNT)
    machine.group("a", v2(10 * MB, MB))
    with (tmp_path / "proc/self/mountinfo").open("ab") as file:
        file.write(b"99 23 0:99 / /home/x/\xff\x1c\xc2\x85y rw - fuse.any any rw\n")
    assert machine.limit() == ("a/memory.max", 10 * MB, 9 * MB)
    assert cgroups.Kills(tmp_path).describe() == ""


def test_who_was_killed_and_why(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/system.slice/job.service\n", V2_MOUNT)
    kills = cgroups.Kills(tmp_path)
    assert not kills.describe()
    machine.group("system.slice", v2(200 * MB, MB) | {"memory.events": "oom 0\noom_kill 0"})
    machine.group("system.slice/job.service", v2("max", MB))
    assert not kills.describe()
    machine.group("system.slice", {"memory.events": "oom 0\noom_kill 1"})
    assert kills.describe() == "the kernel killed it because no memory was left"
    assert not kills.describe(), "it is reported once"
    machine.group("system.slice", {"memory.events": "oom 1\noom_kill 2"})
    assert re.search(r"memory limit .*system.slice/memory.max of 200.0 MiB", kills.describe())


# -- the kernel's own -----------------------------------------------------------------------------


def own_group() -> tuple[Path, str, str] | None:
    """A new group for memory with its files for limit and members; None where none can be made."""
    for top, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        made = top / f"gadei-ps-test-{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            made.mkdir()
            if (made / limit).exists():
                return made, limit, "cgroup.procs"
            made.rmdir()
    return None


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    made = own_group()
    if made is None:
        pytest.skip("no control group for memory can be made here")
    yield made[:2]
    made[0].rmdir()


def test_the_limit_of_a_real_group(group: tuple[Path, str]) -> None:
    """A process sees the limit of the group that it is in, and what is charged to it."""
    directory, name = group
    (directory / name).write_text(str(64 * MB))
    script = (
        "import os, sys\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from gadei_ps.machine import cgroups\n"
        "before = cgroups.tightest()\n"
        "kept = bytearray(16 << 20)\n"
        "after = cgroups.tightest()\n"
        "print(before.file, before.limit, before.free, after.free)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(directory / "cgroup.procs")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    file, limit, before, after = done.stdout.split()
    assert (Path(file), int(limit)) == (directory / name, 64 * MB)
    assert 16 * MB < int(before) < 64 * MB
    assert 12 * MB < int(before) - int(after) < 20 * MB
    assert cgroups.tightest() != Limit(directory / name, 64 * MB, int(after))


LARGE = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from gadei_ps.errors import NoSharedMemory
from gadei_ps.job.config import from_mapping
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.sync import parse
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.job_memory import JobMemory
memory = JobMemory(from_mapping({"name": sys.argv[2]}, "test"))
memory.create_control(parse("asp"))
try:
    memory.make_model(InitialModel(place([Tensor("w", (int(sys.argv[3]),))]), None))
except NoSharedMemory as error:
    print(error)
finally:
    memory.remove()
"""


def test_a_job_beyond_the_limit_is_refused(group: tuple[Path, str], job_name: str) -> None:
    """Refuse it: weights and two slots of the ring take three times the model."""
    directory, name = group
    (directory / name).write_text(str(160 * MB))
    done = subprocess.run(
        [sys.executable, "-P", "-c", LARGE, str(directory / "cgroup.procs"), job_name, "20000000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    assert done.stdout.startswith(f"the memory limit {directory / name} has "), done
    assert re.search(rf"job '{job_name}' needs \d+.\d MiB \(weights 76.3, optimizer", done.stdout)
    assert done.stdout.count("\n") == 1
    assert not segments(job_name)


COPIES = """
import os, selectors, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from gadei_ps.errors import CheckpointError
from gadei_ps.job.config import from_mapping
from gadei_ps.job.control import memory_file
from gadei_ps.machine import log, process
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.sync import parse
from gadei_ps.watchdog.checkpoints import NOWHERE, Checkpoints
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.job_memory import JobMemory
memory = JobMemory(from_mapping({"name": sys.argv[2], "optimizer": {"kind": "adam"}}, "test"))
memory.create_control(parse("asp"))
try:
    first = InitialModel(place([Tensor("w", (8 << 20,))]), None)
    memory.enter_model(first, memory.make_model(first))
    checkpoints = Checkpoints(memory, selectors.DefaultSelector(), log.get())
    process.OOM_SCORE.write_text("300")
    process.end_last()
    print(process.OOM_SCORE.read_text().strip())
    for into in (NOWHERE, memory_file(96 << 20, [])):
        try:
            checkpoints.ask(lambda outcome: None, into)
        except CheckpointError as error:
            print(error)
    assert not checkpoints._busy
finally:
    memory.remove()
"""


def test_a_copy_beyond_the_limit_is_refused(group: tuple[Path, str], job_name: str) -> None:
    """Refuse it: weights and moments are 96 MiB; the kernel would kill a process."""
    directory, name = group
    (directory / name).write_text(str(208 * MB))
    done = subprocess.run(
        [sys.executable, "-P", "-c", COPIES, str(directory / "cgroup.procs"), job_name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done
    score, *refused = done.stdout.splitlines()
    assert score == "0"
    has = rf"the memory limit {directory / name} has \d+\.\d MiB free and"
    wanted = (
        rf"{has} a checkpoint of job '{job_name}' needs 136.0 MiB \(copy 96.0, process 40.0\):",
        rf"{has} a copy of job '{job_name}' needs 96.0 MiB \(copy 96.0\): free some",
    )
    assert len(refused) == 2
    for line, why in zip(refused, wanted, strict=True):
        assert re.match(why, line), line


KILLED = """
import os, subprocess, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from gadei_ps.machine import cgroups
kills = cgroups.Kills()
print(subprocess.run([sys.executable, "-S", "-c", "bytearray(200 << 20)"]).returncode)
print(kills.describe())
"""


def test_a_real_kill_names_the_limit(group: tuple[Path, str]) -> None:
    directory, name = group
    (directory / name).write_text(str(64 * MB))
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(directory / "cgroup.procs")],
        capture_output=True,
        text=True,
        check=True,
    )
    code, reason = done.stdout.splitlines()
    assert code == "-9"
    assert f"the memory limit {directory / name} of 64.0 MiB was reached" in reason


MAKER = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from gadei_ps.job.config import from_mapping
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.sync import parse
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.job_memory import JobMemory
memory = JobMemory(from_mapping({"name": sys.argv[2], "slots": 2}, "test"))
memory.create_control(parse("asp"))
first = InitialModel(place([Tensor("w", (1 << 20,))]), None)
memory.enter_model(first, memory.make_model(first))
for made in ("model", memory.make_ring):
    if callable(made):
        ring = made(0, 1)
        memory.enter_ring(0, ring)
        made = ring.size
    print(made, flush=True)
    sys.stdin.readline()
memory.remove()
"""


def test_a_ring_is_charged_to_the_watchdogs_group(group: tuple[Path, str], job_name: str) -> None:
    """Also that of a learner in another group, which only writes to it."""
    directory, limit = group
    used = directory / ("memory.current" if limit == "memory.max" else "memory.usage_in_bytes")
    maker = subprocess.Popen(
        [sys.executable, "-P", "-c", MAKER, str(directory / "cgroup.procs"), job_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        assert maker.stdout.readline() == "model\n"
        before = int(used.read_text())
        print(file=maker.stdin, flush=True)
        size = int(maker.stdout.readline())
        assert size > 8 * MB
        assert int(used.read_text()) - before > 0.9 * size
        before = int(used.read_text())
        ring = ring_of(job_name, 0)
        assert len(bytes(ring.memory)) == size, "every page is mapped here too"
        assert abs(int(used.read_text()) - before) < 0.1 * size
        print(file=maker.stdin, flush=True)
    assert not segments(job_name)
