"""The ring under ThreadSanitizer and its litmus tests, short; `make stress` runs them longer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STRESS = ROOT / "tests" / "stress"
NATIVE = ROOT / "native"
RACED = 66  # what the tool makes a program's exit code when it has seen a race
PARTS = [STRESS / "ring.c", NATIVE / "ps_ring.c"]
PLAIN = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", f"-I{NATIVE}", "-pthread"]
# -Wtsan says that the tool knows no fences: see tests/stress/run.
TSAN = ["gcc", *PLAIN, "-fno-strict-aliasing", "-fsanitize=thread", "-Wno-tsan"]


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = f"suppressions={STRESS / 'races.supp'} history_size=7 exitcode={RACED}"
    command = [str(part) for part in (program, *arguments)]
    if shutil.which("setarch"):  # an older libtsan does not know where newer kernels put programs
        still = ["setarch", "-R"]
        if not subprocess.run([*still, "true"], capture_output=True).returncode:
            command = [*still, *command]
    environment = os.environ | {"TSAN_OPTIONS": options}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def tsan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds ring.c under ThreadSanitizer."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    directory = tmp_path_factory.mktemp("tsan")
    source, probe = directory / "probe.c", directory / "probe"
    source.write_text("int main(void) { return 0; }\n")
    built = subprocess.run([*TSAN, "-o", probe, source], capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"gcc has no libtsan: {built.stderr.strip().splitlines()[-1]}")
    started = run(probe)
    if started.returncode:
        pytest.skip(f"ThreadSanitizer does not run here: {started.stderr.strip()[:200]}")

    def build(name: str, *more: Any) -> Path:
        program: Path = directory / name
        command = [*TSAN, *more, "-o", program, *PARTS, "-Wl,--wrap=syscall"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return program

    return build


def test_no_race_and_no_lost_wake_up(tsan: Any) -> None:
    program = tsan("ring")
    for configuration in ("3 2 2 0 hurry", "1 2 1 20000", "2 2 2 0 no-waitv"):
        done = run(program, 0.7, *configuration.split())
        assert done.returncode == 0, done.stderr[-4000:]
        assert "0 lost wake-ups" in done.stdout


def test_the_tool_sees_a_missing_order(tsan: Any) -> None:
    program = tsan("ring-weak", "-include", STRESS / "weaken.h", "-DWEAK_RELEASE")
    done = run(program, 0.5, 3, 2, 2, 0)
    assert done.returncode == RACED and "data race" in done.stderr, done.stderr[-2000:]


def test_litmus(programs: Any) -> None:
    program = programs.build(STRESS / "litmus.c", "-pthread")
    done = subprocess.run([program, "1.6"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("no forbidden outcome\n"), done.stdout
    assert done.stdout.count("BROKEN ON PURPOSE") == 8


def test_every_sync_point_is_argued() -> None:
    """Each SYNC POINT, and each litmus test's argument, has a heading in the document."""
    headings = set(re.findall(r"^### (.+)$", (ROOT / "docs/memory-order.md").read_text(), re.M))
    sources = [*NATIVE.glob("*.[ch]")]
    for folder in ("gadei_ps", "learners", "watchdog"):
        sources += (ROOT / folder).rglob("*.py")
    points = {
        (path.relative_to(ROOT).as_posix(), point)
        for path in sources
        for point in re.findall(r"SYNC POINT: ([a-z_ ]+)", path.read_text())
    }
    assert {"native/ps_ring.c", "gadei_ps/server/record.py"} <= {path for path, _ in points}
    missing = {(path, point) for path, point in points if point.strip() not in headings}
    assert not missing, "no argument in docs/memory-order.md"
    litmus = re.findall(r'^    \{"[^"]+", "([^"]+)"', (STRESS / "litmus.c").read_text(), re.M)
    assert len(litmus) == 16 and set(litmus) <= headings
