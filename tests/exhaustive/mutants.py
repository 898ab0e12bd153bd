#!/usr/bin/env python3
"""Leaves out stores, fences, leases and checks of generations, one at a time: tests must notice.

    mutants.py               all of them, for hours; also `make mutants`
    mutants.py --list        what would be left out
    mutants.py record.py:65  only those whose name contains one of these words
    mutants.py --known FILE  not those that were noticed in a run that printed these lines
    mutants.py --reached FILE --clean 0  by which tests an earlier run with --reached has found

All are built into one copy of this tree, with a number each; a variable of the environment says
which one is left out, so that nothing is compiled again. Each runs with a /dev/shm and pids of its
own; that needs root. With nothing left out, the tests must pass several times. These runs also show
which tests reach which place; for each place only those are run, the quick ones first. One that no
test notices must stand in EQUIVALENT, with the reason. Where a test runs out of time, a busy
machine may be the reason, so this does not count as noticed: it is tried once more, alone, after
all others.

Exit code: 0 if all others are noticed, 1 if one survives, 2 if nothing can be run, 3 if none
survives, but some only ran out of time. The last line says how many of each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from mutated import BY_PYTEST, TIMED_OUT, Tree
from places import Mutant, Room, mutants

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
    "gadei_ps/server/statistics.py note_run: fence() -> pass": _ORDER,
    "gadei_ps/server/statistics.py note_run: fence() (number 2) -> pass": _ORDER,
    "native/ps_lease.c ps_lease_make: error = pthread_mutexattr_setpshared(&how, "
    "PTHREAD_PROCESS_SHARED); -> (void)0;": "glibc shares each robust mutex; POSIX need not",
}


CLEAN_RUNS = 3  # with nothing left out; a test that fails now and then would prove nothing


def known_places(text: str) -> set[str]:
    """Mutant.key of those that an earlier run has noticed, from the lines that it printed.

    A line's number in its file may have changed since. Those that hung are not known.
    """
    found = set()
    for line in text.splitlines():
        match = re.match(r"(?:failed|equivalent) +\d+ s  (\S+?):\d+ (.*?)(?:  |$)(.*)", line)
        if match and not BY_PYTEST.search(match[3]):
            found.add(f"{match[1]} {match[2]}")
    return found


# -- running them ---------------------------------------------------------------------------------


def told_of(every: list[Mutant]) -> str:
    """Return how many places there are."""
    kinds = Counter(one.kind for one in every)
    listed = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(every)} places: {listed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only places whose names contain one of them")
    parser.add_argument("--list", action="store_true", help="the places; leaves nothing out")
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--known", type=Path, help="what a run has printed: not those noticed")
    parser.add_argument("--clean", type=int, default=CLEAN_RUNS, help="runs with nothing left out")
    parser.add_argument("--reached", type=Path, help="file: which tests reach which place")
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
        keys = [one.key for one, _ in every]
        if how.reached and how.reached.exists():
            kept = json.loads(how.reached.read_text())
            tree.reached = {number: kept.get(key, {}) for number, key in enumerate(keys, 1)}
        try:
            return _run(tree, chosen, how.jobs, how.clean, lambda: keep(tree, keys, how.reached))
        finally:
            tree.stop()


def keep(tree: Tree, keys: list[str], file: Path | None) -> None:
    """Record which tests reach which place, by Mutant.key: the next run needs no clean run."""
    if file is not None:
        kept = {key: tree.reached.get(number, {}) for number, key in enumerate(keys, 1)}
        file.write_text(json.dumps(kept))


def _run(
    tree: Tree,
    chosen: list[tuple[int, Mutant, Room]],
    jobs: int,
    clean: int = CLEAN_RUNS,
    cleaned: Callable[[], None] = lambda: None,
) -> int:
    def wrong(room: Room) -> str:
        begin = time.monotonic()
        verdict, line = tree.reach(room.tests)
        seconds = time.monotonic() - begin
        print(f"nothing left out: {verdict} in {seconds:.0f} s  {line}", flush=True)
        return "" if verdict == "passed" else f"a test {verdict}: {line}"

    def attempt(number: int, one: Mutant, room: Room) -> str:
        begin = time.monotonic()
        verdict, line = tree.run(number, room)
        if verdict == "passed":
            verdict = "equivalent" if one.key in EQUIVALENT else "SURVIVES"
            line = EQUIVALENT.get(one.key, line)
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
        cleaned()
        verdicts = list(pool.map(lambda each: attempt(*each), chosen))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        tree.stop()
        pool.shutdown()
    for at, verdict in enumerate(verdicts):
        if verdict == TIMED_OUT:
            verdicts[at] = attempt(*chosen[at])
    counts = Counter(verdicts)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return exit_code(counts)


def exit_code(verdicts: Mapping[str, int]) -> int:
    """Return the exit code of a run with so many of each verdict."""
    if set(verdicts) - {"failed", "equivalent", TIMED_OUT}:
        return 1
    return 3 if verdicts.get(TIMED_OUT) else 0


if __name__ == "__main__":
    sys.exit(main())
