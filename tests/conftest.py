"""Names and places for every test, and a check that it leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# NumPy's threads spin for 25 ms at the start of each interpreter, and no test computes with them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
HERE = Path(__file__).parent
# For `import support`, `import shell` and `import emulator`.
sys.path[:0] = [str(HERE), str(HERE / "cli"), str(HERE / "gpu")]
pytest.register_assert_rewrite("support", "shell", "saved_jobs")

import support  # noqa: E402
from shell import Cli  # noqa: E402
from support import kept  # noqa: E402
from support.turns import Turns  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36
JOBS = f"t{os.getpid()}-"
TURNS = pytest.StashKey[Turns]()
_numbers = itertools.count()
NEEDS_TORCH = re.compile(
    r"^(import|from) (torch\b|support.torch_models"
    r"|gadei_ps\.(classifier|learners\.(torch|virtual)|benchmarks))|importorskip\(.torch",
    re.M,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --part: tests fork their own process, and a large one makes all forks slow."""
    parser.addoption(
        "--part",
        choices=("large", "small"),
        help="large: only the tests that import torch or compile; small: only the others",
    )


def is_large(path: Path) -> bool:
    """Return whether tests of a file make their own process much larger. Few of them fork it."""
    return path.parent.name == "unit" or NEEDS_TORCH.search(path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Select files as --part requires."""
    part = config.getoption("--part")
    if part is None or not collection_path.match("test_*.py"):
        return None
    return True if is_large(collection_path) != (part == "large") else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a small part that has become large; spare the collector what has been loaded."""
    gc.collect()
    gc.freeze()
    if session.config.getoption("--part") == "small" and "torch" in sys.modules:
        raise pytest.UsageError("a file of the small part imports torch; see NEEDS_TORCH")


def pytest_configure(config: pytest.Config) -> None:
    """Set up this process, and the locks that the workers of a run share."""
    # Other work slows examples down. A run draws the same ones as the last, so that what fails was
    # broken by what has changed; --hypothesis-profile search draws others.
    hypothesis.settings.register_profile("search", deadline=None)
    hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("repeatable")
    # Orphans of killed processes become our children, so that nothing_left sees them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A shell gives what it runs in the background, as nohup does, ignored signals: the processes
    # under test would inherit them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[TURNS] = Turns(Path(given["turns"]))
        return
    directory = Path(tempfile.mkdtemp(prefix="gadei-ps-turns-"))
    config.add_cleanup(lambda: shutil.rmtree(directory))
    config.stash[TURNS] = Turns(directory)
    if config.getoption("numprocesses", None):  # beside the workers' first tests
        compiling = threading.Thread(target=config.stash[TURNS].compile)
        compiling.start()
        config.add_cleanup(compiling.join)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Set for a worker of pytest-xdist where the locks of all workers are."""
    node.workerinput["turns"] = str(node.config.stash[TURNS].directory)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[object]:
    """Begin elsewhere in each folder than the other workers do.

    A worker that finds a test file not compiled compiles it, as the others would at the same time.
    """
    report: pytest.CollectReport = yield  # type: ignore[assignment]
    given = getattr(collector.config, "workerinput", None)
    if given is not None and isinstance(collector, pytest.Directory):
        number = int(given["workerid"].removeprefix("gw"))
        begin = len(report.result) * number // int(given["workercount"])
        report.result = report.result[begin:] + report.result[:begin]
    return report


def needs_compiled(item: pytest.Item) -> bool:
    """Return whether the test may run the server's code."""
    asks = "compiled" in getattr(item, "fixturenames", ())
    # A rig would compile here what is being compiled beside it.
    asks = asks or hasattr(getattr(item, "module", None), "Rig")
    return asks or item.path.parent.name not in ("unit", "cli", "docs")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """The tests that need nothing compiled come first: the compiler runs beside them.

    So for each worker: pytest-xdist gives each of them a piece of the list. Of the others, files
    with tests that may take long come first, so that no worker is left with one of them at the end.
    """
    if hasattr(config, "workerinput"):  # each worker has collected the files in another order
        items.sort(key=lambda one: one.path)
    yield
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    plain = [one for one in items if not needs_compiled(one)]
    files: dict[Path, list[pytest.Item]] = {}
    for one in filter(needs_compiled, items):
        files.setdefault(one.path, []).append(one)
    longest = sorted(files.values(), key=lambda tests: max(map(limit_s, tests)), reverse=True)
    items[:] = [
        one
        for worker in range(workers)
        for one in (
            *plain[len(plain) * worker // workers : len(plain) * (worker + 1) // workers],
            *itertools.chain.from_iterable(longest[worker::workers]),
        )
    ]
    # Threads that PyTorch has started here would be missing in forks, which would wait for them.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def limit_s(item: pytest.Item) -> float:
    """The test's own time-out; 0 if it has none."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark else 0.0


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """A test's turn. The time to wait for it is not counted against the test's time-out."""
    turns = item.config.stash[TURNS]
    if needs_compiled(item):
        turns.compile()
    with turns.turn(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[object]:
    """Add to a test that fails what its children reported of fatal signals."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed and (faults := os.pread(support.FAULTS.fileno(), 100_000, 0)):
        report.sections.append(("fatal signals of children", faults.decode(errors="replace")))
    if report.when == "teardown":
        support.FAULTS.seek(0)
        support.FAULTS.truncate()
    return report


@pytest.fixture(scope="session")
def turns(request: pytest.FixtureRequest) -> Turns:
    """Provide what the workers of this run share."""
    return request.config.stash[TURNS]


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile for tests of unit, cli and docs that run the server's code: see needs_compiled."""
    kept.keep()


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A directory for sockets; its path is short, as an address of AF_UNIX must be.

    Checkpoints go elsewhere: to tmp_path / "state".
    """
    path = Path(tempfile.mkdtemp(prefix="gps-", dir="/tmp"))
    monkeypatch.setenv("GADEI_PS_RUNTIME_DIR", str(path))
    monkeypatch.setenv("GADEI_PS_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("GADEI_PS_JOB", raising=False)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def job_name(runtime_dir: Path) -> str:
    """A job name that no other test has."""
    return f"{JOBS}{next(_numbers)}"


@pytest.fixture
def interpreters() -> None:
    """Run gadei-ps as users do: each process is a new interpreter, not a fork."""


@pytest.fixture
def cli(request: pytest.FixtureRequest, runtime_dir: Path, tmp_path: Path) -> Iterator[Cli]:
    """Run gadei-ps; what it has started is ended after the test."""
    plain = "interpreters" in request.fixturenames
    made = Cli(tmp_path, interpreters=plain, servers=needs_compiled(request.node))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check after each test that none of its processes runs and no segment of its jobs exists."""
    before = support.children()
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "a test has replaced it"
    support.eventually(
        lambda: not support.children() - before, what=lambda: support.described(before)
    )
    try:
        support.eventually(lambda: not support.segments(JOBS), what=lambda: support.segments(JOBS))
    finally:  # so that only the test fails that has left them
        support.remove_segments(JOBS)
