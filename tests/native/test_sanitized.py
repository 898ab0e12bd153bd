"""The C extensions and learners in C under AddressSanitizer and UndefinedBehaviorSanitizer.

Tests of them, again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(300)  # a time-out of its own lets a long test begin early
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
# The flags of setup.py come after those above; compiling takes twice as long with -O3.
SETUP = "from pathlib import Path; exec(Path('setup.py').read_text().replace('-O3', '-O1'))"
# Those that run in one process: others would preload the sanitizers into every daemon.
TESTS = ("test_ring.py", "test_ring_machine.py", "test_module.py", "test_copy.py")

# Those of learners in C, whose programs alone have the sanitizers.
OF_LEARNERS = ("test_replies.py", "test_learner.py")
# Not those that are linked by themselves, or end a learner by SIGSEGV.
EXCEPT = "not cpp and not example and not cannot_be_written"
# Python keeps what it needs until its end; the guard has SIGBUS for itself.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:handle_sigbus=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


def _runtime() -> str:
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    path = found.stdout.strip()
    return path if Path(path).is_absolute() else ""


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the extensions, built with both."""
    if not shutil.which("gcc") or not _runtime():
        pytest.skip("needs gcc and its libasan")
    out = tmp_path_factory.mktemp("sanitized")
    done = subprocess.run(
        [sys.executable, "-c", SETUP, "-q", "build_ext", "-b", out / "lib", "-t", out / "temp"],
        cwd=ROOT,
        env=os.environ | {"CC": "gcc", "CFLAGS": FLAGS, "LDFLAGS": FLAGS},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out / "lib" / "gadei_ps"


def _run(extensions: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A Python that takes the extensions from this folder, if it imports preload first."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(HERE / "sanitizers"),
            "TESTED_EXTENSIONS": str(extensions),
            "LD_PRELOAD": _runtime(),
        }
        | OPTIONS,
        capture_output=True,
        text=True,
    )


def test_the_extensions(extensions: Path) -> None:
    tests = [HERE / name for name in TESTS]
    done = _run(extensions, "-m", "pytest", "-p", "preload", "-q", "-s", *tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_what_is_wrong_is_seen(extensions: Path) -> None:
    """A store behind the end of what was allocated."""
    done = _run(
        extensions,
        "-c",
        "import ctypes, preload\n"
        "from gadei_ps import _native\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "at = libc.malloc(24)\n"
        "_native.store(at + 24, 1)\n",
    )
    assert done.returncode
    assert "heap-buffer-overflow" in done.stdout + done.stderr


def _with_sanitizers(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a Python whose tests/clients/drivers.py builds programs with both."""
    if not shutil.which("gcc") or not _runtime():
        pytest.skip("needs gcc and its libasan")
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"TESTED_CFLAGS": FLAGS, "PYTHONPATH": str(ROOT / "tests")} | OPTIONS,
        capture_output=True,
        text=True,
    )


def test_learners_in_c() -> None:
    tests = [HERE / name for name in OF_LEARNERS]
    done = _with_sanitizers("-m", "pytest", "-q", "-s", "-k", EXCEPT, *tests)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def test_what_is_wrong_in_a_learner_is_seen(tmp_path: Path) -> None:
    """A program that is built as learners are writes behind the end of what was allocated."""
    source, program = tmp_path / "broken.c", tmp_path / "broken"
    source.write_text(
        "#include <stdlib.h>\n"
        "int main(int count, char **words) {\n"
        "    (void)words;\n"
        "    volatile char *at = calloc(24, 1);\n"
        "    at[23 + count] = 1;\n"
        "    return at[0];\n"
        "}\n"
    )
    script = (
        "import subprocess\n"
        "from clients.drivers import CC\n"
        f"subprocess.run([*CC, {str(source)!r}, '-o', {str(program)!r}], check=True)\n"
        f"raise SystemExit(subprocess.run([{str(program)!r}]).returncode)\n"
    )
    done = _with_sanitizers("-c", script)
    assert done.returncode
    output = done.stdout + done.stderr
    assert "heap-buffer-overflow" in output or "insufficient space" in output, output
