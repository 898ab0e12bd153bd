#!/usr/bin/env python3
"""Leaves out stores, fences, leases and checks of generations, one at a time: tests must notice.

    mutants.py               all of them, for hours; also `make mutants`
    mutants.py --list        what would be left out
    mutants.py record.py:65  only those whose name contains one of these words
    mutants.py --known FILE  not those that were noticed in a run that printed these lines

All are built into one copy of this tree, with a number each; a variable of the environment says
which one is left out, so that nothing is compiled anew. Each runs with a /dev/shm and pids of its
own; that needs root. With nothing left out, the tests must pass several times. One that no test
notices must stand in EQUIVALENT, with the reason. Where a test runs out of time, a busy machine may
be the reason, so this does not count as noticed: it is tried once more, alone, after all others.

Exit code: 0 if all others are noticed, 1 if one survives, 2 if nothing can be run, 3 if none
survives, but some only ran out of time. The last line says how many of each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from places import ROOT, Mutant, Room, mutants

# What no test here can notice, by Mutant.key, and why.
_ORDER = (
    "orders stores before later stores; x86-64 does so by itself, and the count of instructions "
    "has seen the compiled code stop between any two of them"
)
EQUIVALENT: dict[str, str] = {
    "gadei_ps/server/record.py lock: fence() -> pass": _ORDER,
    "gadei_ps/server/record.py finish: fence() -> pass": _ORDER,
    "gadei_ps/server/record.py finish: fence() (number 2) -> pass": _ORDER,
    "gadei_ps/server/record.py finish: fence() (number 3) -> pass": _ORDER,
    "gadei_ps/server/account.py show_all_work: fence() -> pass": _ORDER,
    'watchdog/memory.py JobMemory._adopt_ring: int(entry["generation"]) == int(entry["retired"]) '
    "-> False": "the ring of a free row is adopted, and the first look frees it",
}


CLEAN_RUNS = 3  # with nothing left out; a test that fails now and then would prove nothing
TIMED_OUT = "timed out"
BY_PYTEST = re.compile(r"Timeout \(?>|\++ Timeout \++")
BY_A_TEST = re.compile(r"(?:E  |FAILED|ERROR) .*(?:\bnot within [\d.]+ s\b|TimeoutExpired)")


def ran_out_of_time(lines: Iterable[str]) -> bool:
    """Whether pytest says that a test took too long, or a test that it has waited too long."""
    return any(BY_PYTEST.search(line) or BY_A_TEST.match(line) for line in lines)


def known_places(text: str) -> set[str]:
    """Mutant.key of those that an earlier run has noticed, from the lines that it printed.

    A line's number in its file may have changed since. Those that hung are not known.
    """
    found = set()
    for line in text.splitlines():
        told = re.match(r"(?:failed|equivalent) +\d+ s  (\S+?):\d+ (.*?)(?:  |$)(.*)", line)
        if told and not BY_PYTEST.search(told[3]):
            found.add(f"{told[1]} {told[2]}")
    return found


# -- the tree that has them all --------------------------------------------------------------------

LEFT_OUT = "GADEI_PS_LEFT_OUT"  # the number of the mutant; none is 0
# Appended to the bridge between compiled Python and C.
BRIDGE = f"""

def left_out() -> int:
    import os
    return int(os.environ.get("{LEFT_OUT}", "0"))


_left_out = types.ExternalFunction("ps_left_out_now", types.int64())


@__import__("numba").extending.overload(left_out)
def _compiled_left_out() -> Any:
    def code() -> int:
        return _left_out()
    return code
"""
HEADER = f"""#ifndef PS_LEFT_OUT_H
#define PS_LEFT_OUT_H
#include <stdlib.h>
static inline int ps_left_out(void)
{{
    static int known;
    int number = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!number) {{
        const char *given = getenv("{LEFT_OUT}");
        number = given ? atoi(given) : -1;
        __atomic_store_n(&known, number, __ATOMIC_RELAXED);
    }}
    return number;
}}
#endif
"""
EXPORTED = """
#include <stdint.h>
int64_t ps_left_out_now(void);
int64_t ps_left_out_now(void) { return ps_left_out(); }
"""


def with_all(text: str, chosen: list[tuple[int, Mutant]], compiled: bool) -> str:
    """A file in which each mutant can be chosen by its number. compiled: by Numba, if Python."""
    in_c = chosen[0][1].file.endswith(".c")
    now = "ps_left_out()" if in_c else "left_out()" if compiled else "_left_out()"
    added: list[tuple[int, int, int, str]] = []  # where, in which order there, and what
    for order, (number, one) in enumerate(chosen):
        before, after = f"({one.instead} if {now} == {number} else (", "))"
        if one.instead == "(void)0;":
            before, after = f"do {{ if ({now} != {number}) {{ ", " } } while (0);"
        elif one.instead == "pass":
            before, after = f"if {now} != {number}: ", ""
        elif in_c:
            before, after = f"({now} == {number} ? {one.instead} : (", "))"
        size = one.end - one.begin  # one place may lie in another
        added += [(one.begin, -size, order, before), (one.end, size - len(text), -order, after)]
    for at, _, _, more in sorted(added, reverse=True):
        text = text[:at] + more + text[at:]
    if in_c:
        last = [line for line in text.splitlines() if line.startswith("#include")][-1]
        text = text.replace(last, f'{last}\n#include "ps_left_out.h"', 1)
    else:
        source = "from gadei_ps.server.symbols import left_out"
        if not compiled:
            source = f"_left_out = lambda: int(__import__('os').environ.get('{LEFT_OUT}', 0))"
        future = "from __future__ import annotations\n"
        text = text.replace(future, f"{future}\n{source}\n", 1)
    return text


class Tree:
    """A copy of this tree, with all mutants and an environment of its own."""

    def __init__(self, home: Path) -> None:
        self.tree, self.cache = home / "tree", home / "cache"
        self.python = str(self.tree / ".venv/bin/python")
        self.running: set[int] = set()  # groups of processes

    def make(self, numbered: list[tuple[int, Mutant]]) -> None:
        files = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True
        )
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self._change(numbered)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=self.tree, check=True
        )
        ours = next((self.tree / ".venv/lib").glob("python*/site-packages"))
        theirs = [path for path in sys.path if path.endswith("site-packages")]
        (ours / "zz-base.pth").write_text("\n".join(theirs) + "\n")
        self.cache.mkdir()
        self._build()

    def _change(self, numbered: list[tuple[int, Mutant]]) -> None:
        by_file: dict[str, list[tuple[int, Mutant]]] = {}
        for number, one in numbered:
            by_file.setdefault(one.file, []).append((number, one))
        compiled = (ROOT / "gadei_ps/kernels/cache.py").read_text()
        for file, chosen in by_file.items():
            path = self.tree / file
            in_numba = f'"{file.removeprefix("gadei_ps/")}"' in compiled
            path.write_text(with_all(path.read_text(), chosen, in_numba))
        (self.tree / "native/ps_left_out.h").write_text(HEADER)
        with (self.tree / "native/ps_lease.c").open("a") as out:
            out.write('#include "ps_left_out.h"\n' + EXPORTED)
        with (self.tree / "gadei_ps/server/symbols.py").open("a") as out:
            out.write(BRIDGE)

    def _build(self) -> None:
        subprocess.run(
            [self.python, "native/build_identity.py"],
            cwd=self.tree,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        install = [self.python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        done = subprocess.run([*install, "-e", "."], cwd=self.tree, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot be built: {done.stderr.strip()[-500:]}")

    def stop(self) -> None:
        """Ends what still runs."""
        for group in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def run(self, number: int, tests: tuple[str, ...], limit_s: float) -> tuple[str, str]:
        """passed, failed, timed out or broken, and the line that says so. number: 0: no mutant."""
        script = (
            "mount -t tmpfs -o size=4g tmpfs /dev/shm && mkdir -m 700 /dev/shm/run && "
            'export XDG_RUNTIME_DIR=/dev/shm/run && exec "$@"'
        )
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["bash", "-c", script, "mutant", self.python, "-m", "pytest", "-x", "-q"]
        a_test_s = "100" if number else "900"  # the first run compiles
        command += ["-p", "no:cacheprovider", "--timeout", a_test_s, *tests]
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                command,
                cwd=self.tree,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NUMBA_CACHE_DIR": str(self.cache), LEFT_OUT: str(number)},
                start_new_session=True,
            )
            self.running.add(child.pid)
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return TIMED_OUT, f"all tests, after {limit_s:.0f} s"
            self.running.discard(child.pid)
            out.seek(0)
            lines = out.read().splitlines()
        if not number and code:
            print(*lines, sep="\n", flush=True)
        found = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
        if code == 1 and ran_out_of_time(lines):
            return TIMED_OUT, "".join(found[:1])
        crashed = code < 0 or code > 128  # by a signal, of pytest's own process
        verdict = "failed" if crashed else {0: "passed", 1: "failed"}.get(code, "broken")
        return verdict, "".join(found[:1])


# -- running them ---------------------------------------------------------------------------------


def told_of(every: list[Mutant]) -> str:
    """How many places there are."""
    kinds = Counter(one.kind for one in every)
    listed = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(every)} places: {listed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--clean", type=int, default=CLEAN_RUNS, help="runs with nothing left out")
    how = parser.parse_args()
    every = list(mutants())
    known = known_places(how.known.read_text()) if how.known else set()
    chosen = [
        (number, one, room)
        for number, (one, room) in enumerate(every, 1)
        if not how.words or any(word in one.name for word in how.words)
        if one.key not in known
    ]
    if not chosen:
        print("mutants: no place is left that has such a name", file=sys.stderr)
        return 2
    if how.list:
        print(*(one.name for _, one, _ in chosen), sep="\n")
        print(told_of([one for one, _ in every]), f"; {len(chosen)} are listed", sep="")
        return 0
    if os.geteuid() != 0 or not shutil.which("unshare"):
        print("mutants: needs root and unshare", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(told_of([one for one, _ in every]), f"; {len(chosen)} are tried", sep="", flush=True)
    with tempfile.TemporaryDirectory(prefix="gadei-ps-mutants-") as folder:
        tree = Tree(Path(folder))
        tree.make([(number, one) for number, (one, _) in enumerate(every, 1)])
        try:
            return _run(tree, chosen, how.jobs, how.clean)
        finally:
            tree.stop()


def _run(
    tree: Tree, chosen: list[tuple[int, Mutant, Room]], jobs: int, clean: int = CLEAN_RUNS
) -> int:
    limits: dict[Room, float] = {}

    def wrong(room: Room) -> str:
        begin = time.monotonic()
        verdict, line = tree.run(0, room.tests, 1800.0)
        seconds = time.monotonic() - begin
        limits[room] = max(limits.get(room, 0.0), 3 * seconds + 120)
        print(f"nothing left out: {verdict} in {seconds:.0f} s  {line}", flush=True)
        return "" if verdict == "passed" else f"a test {verdict}: {line}"

    def attempt(number: int, one: Mutant, room: Room) -> str:
        begin = time.monotonic()
        verdict, line = tree.run(number, room.tests, limits[room])
        if verdict == "passed":
            verdict = "equivalent" if one.key in EQUIVALENT else "SURVIVES"
            line = EQUIVALENT.get(one.key, "")
        elif one.key in EQUIVALENT and verdict != TIMED_OUT:
            verdict = "NOT EQUIVALENT"
        seconds = time.monotonic() - begin
        print(f"{verdict:14}  {seconds:4.0f} s  {one.name}  {line}", flush=True)
        return verdict

    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    rooms = dict.fromkeys(room for _, _, room in chosen)
    try:
        runs = [room for room in rooms for _ in range(clean)]
        if found := next(filter(None, list(pool.map(wrong, runs))), None):
            print(f"mutants: with nothing left out, {found}", file=sys.stderr)
            return 2
        verdicts = list(pool.map(lambda each: attempt(*each), chosen))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        tree.stop()
        pool.shutdown()
    for at, verdict in enumerate(verdicts):
        if verdict == TIMED_OUT:
            verdicts[at] = attempt(*chosen[at])
    told = Counter(verdicts)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(told.items())))
    return exit_code(told)


def exit_code(verdicts: Mapping[str, int]) -> int:
    """Of a run in which so many had each verdict."""
    if set(verdicts) - {"failed", "equivalent", TIMED_OUT}:
        return 1
    return 3 if verdicts.get(TIMED_OUT) else 0


if __name__ == "__main__":
    sys.exit(main())
