#!/usr/bin/env python3
"""Leaves out stores, fences, leases and checks of generations, one at a time: tests must notice.

    mutants.py               all of them, for hours; also `make mutants`
    mutants.py --list        what would be left out
    mutants.py record.py:65  only those whose name contains one of these words

Each mutant runs in a copy of this tree that has an environment, /dev/shm and pids of its own; that
needs root. One that no test notices must stand in EQUIVALENT, with the reason. Exit code: 0 if all
others are noticed, 1 if one survives, 2 if nothing can be run.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORES = {"put", "put32", "mark", "fence", "store", "store32", "lease_make", "lease_release"}
LEASE_IS_HELD = {"lease_take": "0"}  # what it returns when the lease is taken
IN_C = re.compile(
    r"\b(?:ps_store_release(?:32)?|ps_fence|__atomic_(?:store_n|exchange_n|fetch_and|fetch_or))"
    r"\((?:[^;{}]|\n)*?\);"
)
GENERATION_IN_C = re.compile(r"[\w>.-]*(?:\([^()]*\))? [=!]= [\w>.-]*\bgeneration\b")
# Where a store is one of the ring's own words and no order depends on it, nothing is left out.
PASSED_OVER = re.compile(r"no_waitv|&chosen")


@dataclass(frozen=True)
class Room:
    """Files, and the tests that must notice what is left out in them, the telling ones first."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


def _in(folder: str, ending: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.{ending}" for name in names)


ROOMS = (
    Room(  # compiled: each mutant compiles anew
        _in(
            "gadei_ps/server",
            "py",
            *("record", "chunks", "undo", "recover", "journal", "account", "ledger", "superstep"),
            *("arrival", "context", "frames", "known", "shard", "statistics"),
        ),
        (
            "tests/counts/test_instructions.py",
            "tests/unit/test_recovery.py",
            "tests/unit/test_superstep.py",
            "tests/unit/test_shard.py",
            "tests/end_to_end/test_exactly_once.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_aimed.py",
            "tests/crash/test_deaths.py",
        ),
    ),
    Room(
        (
            *_in("gadei_ps/server", "py", "change", "driver", "manager", "rings", "shards"),
            "gadei_ps/job/modes.py",
        ),
        (
            "tests/end_to_end/test_exactly_once.py",
            "tests/end_to_end/test_set.py",
            "tests/end_to_end/test_sync.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_deaths.py",
            "tests/end_to_end/test_supervision.py",
            "tests/counts/test_statements.py",
            "tests/crash/test_models.py",
        ),
    ),
    Room(
        ("watchdog/*.py", "gadei_ps/memory/segment.py", "learners/attach.py"),
        (
            "tests/unit/test_segment.py",
            "tests/end_to_end/test_clean_stop.py",
            "tests/end_to_end/test_supervision.py",
            "tests/end_to_end/test_adoption.py",
            "tests/end_to_end/test_client.py",
            "tests/end_to_end/test_exactly_once.py",
            "tests/crash/test_deaths.py",
            "tests/crash/test_litter.py",
            "tests/counts/test_statements.py",
            "tests/unit/test_saver.py",
            "tests/cli/test_checkpoint.py",
        ),
    ),
    Room(
        _in(
            "native",
            "c",
            *("ps_frame", "ps_guard", "ps_land", "ps_lease", "ps_pull", "ps_ring"),
            *("gadei_attach", "gadei_push", "gadei_segments"),
        ),
        (
            "tests/native",
            "tests/conformance/test_clients.py",
            "tests/conformance/test_client_threads.py",
            "tests/conformance/test_client_waits.py",
            "tests/conformance/test_devices.py",
            "tests/end_to_end/test_clean_stop.py",
            "tests/crash/test_damaged_rings.py",
            "tests/crash/test_aimed.py",
            "tests/crash/test_deaths.py",
        ),
    ),
)

# What no test here can notice, by Mutant.key, and why.
EQUIVALENT: dict[str, str] = {}


@dataclass(frozen=True)
class Mutant:
    """A place in a file, and what stands there instead."""

    file: str
    line: int
    begin: int  # characters
    end: int
    instead: str
    where: str  # the function
    what: str

    @property
    def key(self) -> str:
        return f"{self.file} {self.where}: {self.what} -> {self.instead}"

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.where}: {self.what} -> {self.instead}"


def mutants(root: Path = ROOT) -> Iterator[tuple[Mutant, Room]]:
    """Everything that is left out."""
    for room in ROOMS:
        for pattern in room.files:
            for path in sorted(root.glob(pattern)):
                text = path.read_text()
                file = str(path.relative_to(root))
                found = _of_python(file, text) if path.suffix == ".py" else _of_c(file, text)
                known: Counter[str] = Counter()
                for one in sorted(found, key=lambda one: (one.begin, one.instead)):
                    known[one.key] += 1
                    again = f" (number {known[one.key]})" if known[one.key] > 1 else ""
                    parts = one.begin, one.end, one.instead, one.where, one.what + again
                    yield Mutant(one.file, one.line, *parts), room


def _of_python(file: str, text: str) -> Iterator[Mutant]:
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def made(node: ast.expr | ast.stmt, instead: str, where: str) -> Mutant:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        what = " ".join(raw[begin:end].decode().split())
        chars = len(raw[:begin].decode()), len(raw[:end].decode())
        return Mutant(file, node.lineno, *chars, instead, where, what)

    def visit(node: ast.AST, where: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _called(node.value) in STORES:
                yield made(node, "pass", where)
        elif isinstance(node, ast.Call) and _called(node) in LEASE_IS_HELD:
            yield made(node, LEASE_IS_HELD[_called(node)], where)
        elif isinstance(node, ast.Compare) and _of_one_generation(node):
            yield made(node, "True", where)
            yield made(node, "False", where)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    yield from visit(ast.parse(text), "")


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(name) | ast.Attribute(ast.Name("_native"), name):
            return name
    return ""


def _of_one_generation(node: ast.Compare) -> bool:
    """Not where whole columns of the roster are compared: True or False would not fit there."""
    text = ast.unparse(node)
    columns = re.findall(r"\b(?:entries|roster|retired|generation)\b(?:\['\w+'\])?(?!\[)", text)
    whole = [one for one in columns if one.startswith(("entries[", "roster["))]
    return len(node.ops) == 1 and bool(re.search(r"\bgeneration\b", text)) and not whole


def _of_c(file: str, text: str) -> Iterator[Mutant]:
    function = re.compile(r"^\w[\w *]*?(\w+)\([^;]*?\)\n?\s*\{", re.M)
    heads = [(one.start(), one[1]) for one in function.finditer(text)]

    def made(match: re.Match[str], instead: str) -> Mutant:
        where = next((name for at, name in reversed(heads) if at < match.start()), "")
        line = text.count("\n", 0, match.start()) + 1
        what = " ".join(match[0].replace("\\\n", " ").split())
        return Mutant(file, line, match.start(), match.end(), instead, where, what)

    for match in IN_C.finditer(text):
        if not PASSED_OVER.search(match[0]):
            yield made(match, "(void)0;")
    for match in GENERATION_IN_C.finditer(text):
        yield made(match, "0")
        yield made(match, "1")


# -- running them ---------------------------------------------------------------------------------


@dataclass
class Slot:
    """A copy of the tree in which one mutant at a time is tried."""

    home: Path
    kept: set[str] = field(default_factory=set)  # compiled code of the unchanged tree

    @property
    def tree(self) -> Path:
        return self.home / "tree"

    @property
    def python(self) -> str:
        return str(self.tree / ".venv/bin/python")

    @property
    def cache(self) -> Path:
        return self.home / "cache/gadei-ps"

    def make(self) -> None:
        files = subprocess.check_output(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, text=True
        )
        for name in filter(None, files.split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=self.tree, check=True
        )
        ours = next((self.tree / ".venv/lib").glob("python*/site-packages"))
        theirs = [path for path in sys.path if path.endswith("site-packages")]
        (ours / "zz-base.pth").write_text("\n".join(theirs) + "\n")
        self.build()

    def build(self) -> None:
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

    def run(self, tests: tuple[str, ...], limit_s: float) -> tuple[str, str]:
        """passed, failed, hung or broken, and the line that says so."""
        self.cache.parent.mkdir(exist_ok=True)
        script = (
            "mount -t tmpfs -o size=4g tmpfs /dev/shm && mkdir -m 700 /dev/shm/run && "
            'export XDG_RUNTIME_DIR=/dev/shm/run && exec "$@"'
        )
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["bash", "-c", script, "mutant", self.python, "-m", "pytest", "-x", "-q"]
        command += ["-p", "no:cacheprovider", "--timeout", "150", *tests]
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                command,
                cwd=self.tree,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"NUMBA_CACHE_DIR": str(self.cache.parent)},
                start_new_session=True,
            )
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return "hung", f"after {limit_s:.0f} s"
            except BaseException:
                os.killpg(child.pid, signal.SIGKILL)
                raise
            out.seek(0)
            lines = out.read().splitlines()
        found = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
        return {0: "passed", 1: "failed"}.get(code, "broken"), "".join(found[:1])

    def keep_compiled(self) -> None:
        """To be called after a run of the unchanged tree."""
        self.kept = {path.name for path in self.cache.iterdir()}

    def attempt(self, mutant: Mutant, room: Room, limit_s: float) -> tuple[str, str]:
        path = self.tree / mutant.file
        text, times = path.read_text(), path.stat()
        path.write_text(text[: mutant.begin] + mutant.instead + text[mutant.end :])
        try:
            if path.suffix == ".c":
                self.build()
            return self.run(room.tests, limit_s)
        finally:
            path.write_text(text)
            # Compiled code is taken as that of its file while this is as old as it was.
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if path.suffix == ".c":
                self.build()
            for made in self.cache.iterdir():
                if made.name not in self.kept:
                    shutil.rmtree(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    how = parser.parse_args()
    chosen = [
        (one, room)
        for one, room in mutants()
        if not how.words or any(word in one.name for word in how.words)
    ]
    if not chosen:
        print("mutants: no place has such a name", file=sys.stderr)
        return 2
    if how.list:
        print(*(one.name for one, _ in chosen), sep="\n")
        return 0
    if os.geteuid() != 0 or not shutil.which("unshare"):
        print("mutants: needs root and unshare", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gadei-ps-mutants-") as folder:
        return _run(Path(folder), chosen, how.jobs)


def _run(folder: Path, chosen: list[tuple[Mutant, Room]], jobs: int) -> int:
    slots = [Slot(folder / str(number)) for number in range(jobs)]
    limits: dict[Room, float] = {}
    for slot in slots:
        slot.make()
        for room in dict.fromkeys(room for _, room in chosen):
            begin = time.monotonic()
            verdict, line = slot.run(room.tests, 1800.0)
            if verdict != "passed":
                print(f"mutants: the unchanged tree {verdict}: {line}", file=sys.stderr)
                return 2
            seconds = time.monotonic() - begin
            limits[room] = max(limits.get(room, 0.0), 3 * seconds + 120)
            print(f"unchanged: passed in {seconds:.0f} s", flush=True)
        slot.keep_compiled()
    free = list(slots)
    lock = threading.Lock()

    def attempt(one: Mutant, room: Room) -> str:
        with lock:
            slot = free.pop()
        begin = time.monotonic()
        try:
            verdict, line = slot.attempt(one, room, limits[room])
        finally:
            with lock:
                free.append(slot)
        if verdict == "passed":
            verdict = "equivalent" if one.key in EQUIVALENT else "SURVIVES"
            line = EQUIVALENT.get(one.key, "")
        elif one.key in EQUIVALENT:
            verdict = "NOT EQUIVALENT"
        seconds = time.monotonic() - begin
        print(f"{verdict:14}  {seconds:4.0f} s  {one.name}  {line}", flush=True)
        return verdict

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        verdicts = Counter(pool.map(lambda each: attempt(*each), chosen))
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    return 1 if set(verdicts) - {"failed", "hung", "equivalent"} else 0


if __name__ == "__main__":
    sys.exit(main())
