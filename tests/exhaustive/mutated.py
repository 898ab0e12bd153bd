"""A copy of this tree in which one of all mutants may be chosen, and runs of tests in it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from places import ROOT, Mutant, Room

from gadei_ps.kernels import cache

TIMED_OUT = "timed out"
BY_PYTEST = re.compile(r"Timeout \(?>|\++ Timeout \++")
BY_A_TEST = re.compile(r"(?:E  |FAILED|ERROR) .*(?:\bnot within [\d.]+ s\b|TimeoutExpired)")


def ran_out_of_time(lines: Iterable[str]) -> bool:
    """Return whether pytest, or a test itself, reports that it has waited too long."""
    return any(BY_PYTEST.search(line) or BY_A_TEST.match(line) for line in lines)


LEFT_OUT = "GADEI_PS_LEFT_OUT"  # the number of the mutant; none is 0
PATIENCE = {"PATIENCE_S": "20"}  # many places are noticed because a test waits in vain
REACHED = "GADEI_PS_REACHED"  # a file with a byte for each mutant, set where one would be left out
# Appended to the bridge between compiled Python and C.
BRIDGE = """

_left_out = types.ExternalFunction("ps_left_out_at", types.int64(types.int64))


def left_out(number: int) -> int:
    from gadei_ps import left_out
    return left_out.left_out(number)


@__import__("numba").extending.overload(left_out)
def _compiled_left_out(number: int) -> Any:
    def code(number: int) -> int:
        return _left_out(number)
    return code
"""
# For Python that is not compiled. The lock of the interpreter is kept: nothing may run in between.
MODULE = """
import ctypes

from gadei_ps import _native

left_out = ctypes.PyDLL(_native.__file__).ps_left_out_at
left_out.argtypes, left_out.restype = [ctypes.c_int64], ctypes.c_int64
"""
HEADER = f"""#ifndef PS_LEFT_OUT_H
#define PS_LEFT_OUT_H
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static inline int ps_left_out(int number)
{{
    static int known;
    static unsigned char *reached;
    int chosen = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    if (!chosen) {{
        const char *given = getenv("{LEFT_OUT}"), *file = getenv("{REACHED}");
        int opened = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
        if (opened >= 0) {{
            void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
            __atomic_store_n(&reached, at == MAP_FAILED ? NULL : at, __ATOMIC_RELAXED);
            close(opened);
        }}
        chosen = given && atoi(given) ? atoi(given) : -1;
        __atomic_store_n(&known, chosen, __ATOMIC_RELEASE);
    }}
    unsigned char *at = __atomic_load_n(&reached, __ATOMIC_RELAXED);
    if (at)
        __atomic_store_n(at + number, 1, __ATOMIC_RELAXED);
    return number == chosen;
}}
#endif
"""
EXPORTED = """
#include <stdint.h>
int64_t ps_left_out_at(int64_t number);
int64_t ps_left_out_at(int64_t number) { return ps_left_out((int)number); }
"""


def with_all(text: str, chosen: list[tuple[int, Mutant]], compiled: bool) -> str:
    """A file in which each mutant can be chosen by its number. compiled: by Numba, if Python."""
    in_c = chosen[0][1].file.endswith(".c")
    asked = "ps_left_out" if in_c else "left_out" if compiled else "_left_out"
    added: list[tuple[int, int, int, str]] = []  # where, in which order there, and what
    for order, (number, one) in enumerate(chosen):
        now = f"{asked}({number})"
        before, after = f"({one.instead} if {now} else (", "))"
        if one.instead == "(void)0;":
            before, after = f"do {{ if (!{now}) {{ ", " } } while (0);"
        elif one.instead == "pass":
            before, after = f"if not {now}: ", ""
        elif in_c:
            before, after = f"({now} ? {one.instead} : (", "))"
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
            source = "from gadei_ps.left_out import left_out as _left_out"
        future = "from __future__ import annotations\n"
        text = text.replace(future, f"{future}\n{source}\n", 1)
    return text


class Tree:
    """A copy of this tree, with all mutants and an environment of its own."""

    def __init__(self, home: Path) -> None:
        self.home, self.tree, self.cache = home, home / "tree", home / "cache"
        self.python = str(self.tree / ".venv/bin/python")
        self.running: set[int] = set()  # groups of processes
        self.reached: dict[int, dict[str, float]] = {}  # by mutant: tests and their seconds

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
        compiled = [str(path.relative_to(ROOT)) for path in cache.SOURCES]
        for file, chosen in by_file.items():
            path = self.tree / file
            path.write_text(with_all(path.read_text(), chosen, file in compiled))
        (self.tree / "native/ps_left_out.h").write_text(HEADER)
        (self.tree / "gadei_ps/left_out.py").write_text(MODULE)
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
        """End what still runs."""
        for group in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def reach(self, tests: tuple[str, ...]) -> tuple[str, str]:
        """Run tests with nothing left out, and record which places each of them reaches."""
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            file = Path(folder) / "reached"
            file.write_bytes(bytes(4096))
            noted = {REACHED: str(file), "PYTHONPATH": str(self.tree / "tests/exhaustive")}
            verdict, line = self._run(0, ["-p", "reached", *tests], 1800.0, noted)
            records = file.with_suffix(".jsonl")
            for one in map(
                json.loads, records.read_text().splitlines() if records.exists() else []
            ):
                for number in one["reached"]:
                    known = self.reached.setdefault(number, {})
                    known[one["test"]] = min(one["seconds"], known.get(one["test"], 1e9))
        return verdict, line

    def run(self, number: int, room: Room) -> tuple[str, str]:
        """passed, failed, timed out or broken, and the line that says so.

        Of the room's tests, only those that reach the place are run. The quick ones are first;
        tests that take about as long are in the order of their files, which share what they set up.
        """
        reached = {
            test: seconds
            for test, seconds in self.reached.get(number, {}).items()
            if test.startswith(room.tests)
        }
        if not reached:
            return "passed", "no test reaches it"
        tests = sorted(reached, key=lambda test: (round(math.log2(reached[test] + 1e-3)), test))
        return self._run(number, tests, 3 * sum(reached.values()) + 300)

    def _run(
        self, number: int, what: list[str], limit_s: float, more: Mapping[str, str] | None = None
    ) -> tuple[str, str]:
        script = (
            "mount -t tmpfs -o size=4g tmpfs /dev/shm && mkdir -m 700 /dev/shm/run && "
            'export XDG_RUNTIME_DIR=/dev/shm/run && exec "$@"'
        )
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["bash", "-c", script, "mutant", self.python, "-m", "pytest", "-x", "-q"]
        a_test_s = "100" if number else "900"  # the first run compiles
        command += ["-p", "no:cacheprovider", "--timeout", a_test_s, *what]
        ours = {"NUMBA_CACHE_DIR": str(self.cache), LEFT_OUT: str(number)}
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(
                command,
                cwd=self.tree,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | PATIENCE | ours | (more or {}),
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
