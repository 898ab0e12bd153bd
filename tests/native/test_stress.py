"""The ring under ThreadSanitizer and its litmus tests, short; `make stress` runs them longer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE_S

ROOT = Path(__file__).parents[2]
STRESS = ROOT / "tests" / "stress"
NATIVE = ROOT / "native"
RACED = 66  # what the tool makes a program's exit code when it has seen a race
PARTS = [STRESS / "ring.c", NATIVE / "ps_ring.c", "-Wl,--wrap=syscall"]
CALLS = [STRESS / "calls.c", NATIVE / "ps_calls.c"]
PLAIN = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", f"-I{NATIVE}", "-pthread"]
# -Wtsan says that the tool knows no fences: see tests/stress/run.
TSAN = ["gcc", *PLAIN, "-fno-strict-aliasing", "-fsanitize=thread", "-Wno-tsan"]


def argued() -> set[str]:
    """Return the names of all pairs that the two pages argue."""
    pages = ("memory-order.md", "memory-order-jobs.md")
    text = "".join((ROOT / "docs" / page).read_text() for page in pages)
    return set(re.findall(r"^### (.+)$", text, re.M))


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    options = f"suppressions={STRESS / 'races.supp'} history_size=7 exitcode={RACED}"
    command = [str(part) for part in (program, *arguments)]
    if shutil.which("setarch"):  # an older libtsan does not know where newer kernels put programs
        still = ["setarch", "-R"]
        if not subprocess.run([*still, "true"], capture_output=True).returncode:
            command = [*still, *command]
    environment = os.environ | {"TSAN_OPTIONS": options}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def tsan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build programs under ThreadSanitizer."""
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

    def build(name: str, *more: Any, parts: list[Any] = PARTS) -> Path:
        program: Path = directory / name
        command = [*TSAN, *more, "-o", program, *parts]
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


def test_one_thread_is_inside(tsan: Any) -> None:
    done = run(tsan("calls", parts=CALLS), 0.3, 3)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "none after the end" in done.stdout


def test_the_tool_sees_threads_that_order_nothing(tsan: Any) -> None:
    program = tsan("calls-weak", "-include", STRESS / "weaken_calls.h", parts=CALLS)
    done = run(program, 0.3, 3)
    assert done.returncode == RACED and "data race" in done.stderr, done.stderr[-2000:]


def test_litmus(programs: Any) -> None:
    program = programs.build(STRESS / "litmus.c", "-pthread")
    done = subprocess.run([program, "1.6"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.endswith("no forbidden outcome\n"), done.stdout
    assert done.stdout.count("BROKEN ON PURPOSE") == 8


# What stands at an end of a pair, in C and in Python.
RELEASE = re.compile(
    r"ps_store_release|ps_ring_bell|__atomic_fetch|mutex_unlock|_native\.store|\bput(32)?\("
)
ACQUIRE = re.compile(r"ps_load_acquire|EOWNERDEAD|_native\.load|\bget(32)?\(")
FENCE = re.compile(r"ps_fence\(\)")
POINT = re.compile(r"SYNC POINT: ([a-z_ ]+)")
NO_PAIR = {"hints"}  # words whose order decides nothing


def unpaired(lines: list[str], headings: set[str]) -> set[str]:
    """Return arguments with one end not marked at its load or store, and marks without argument."""
    ends: dict[str, list[str]] = {}
    wrong = set()
    for line in lines:
        for point in POINT.findall(line):
            name, code = point.strip(), line[: line.index("SYNC POINT")]
            if name not in headings:
                wrong.add(name)
            for kind, pattern in (("release", RELEASE), ("acquire", ACQUIRE), ("fence", FENCE)):
                if pattern.search(code):
                    ends.setdefault(name, []).append(kind)
    for name in headings - NO_PAIR:
        kinds = ends.get(name, [])
        if not {"release", "acquire"} <= set(kinds) and kinds.count("fence") < 2:
            wrong.add(name)
    return wrong


def marked_lines() -> list[str]:
    sources = [*NATIVE.glob("*.[ch]")]
    for folder in ("gadei_ps", "learners", "watchdog"):
        sources += (ROOT / folder).rglob("*.py")
    return [
        line for path in sources for line in path.read_text().splitlines() if "SYNC POINT" in line
    ]


def test_every_sync_point_is_argued_and_marked_at_both_ends() -> None:
    """Each pair has a heading in the document, and its name at the release and at the acquire."""
    headings = argued()
    lines = marked_lines()
    assert not unpaired(lines, headings)
    for name in headings - NO_PAIR:
        for pattern in (RELEASE, ACQUIRE, FENCE):  # the test itself: an end that is lost is found
            kept = [
                line
                for line in lines
                if f"SYNC POINT: {name}" not in line
                or not pattern.search(line[: line.index("SYNC POINT")])
            ]
            if len(kept) < len(lines):
                assert name in unpaired(kept, headings), (name, pattern.pattern)
    assert unpaired(["put(at, 1)  # SYNC POINT: nothing known"], set()) == {"nothing known"}


def test_every_litmus_test_is_argued() -> None:
    headings = argued()
    litmus = re.findall(r'^    \{"[^"]+", "([^"]+)"', (STRESS / "litmus.c").read_text(), re.M)
    assert len(litmus) == 16 and set(litmus) <= headings
