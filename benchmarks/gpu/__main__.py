"""Command line of the benchmarks of learners on a GPU.

    python -m gadei_ps.benchmarks.gpu [--quick] [--device cuda|host] [--seconds N] [--out DIR]
        [NAME]...

Each part runs in a process of its own and writes benchmarks/results/gpu-NAME.json, again after
each measurement, so that a part that fails or is ended leaves what it has. A part leaves out what
it has no time for. `--seconds`: time of each part, instead of its own. `--quick`: small sizes, to
see that the program works. `--device host`: the same small sizes on the CPU, to try all that is
not CUDA's. Figures of these two mean little; they are written to --out only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from gadei_ps.benchmarks import suite
from gadei_ps.benchmarks.common import Report, end
from gadei_ps.benchmarks.gpu import sizes, tables
from gadei_ps.errors import DeviceError, GadeiError, UsageError
from gadei_ps.machine import cuda, interrupts, process
from gadei_ps.machine.cuda import first_line

PARTS = {
    "overhead": "what a step takes besides forward and backward",
    "bandwidth": "push and pull against copies of pinned memory",
    "learners": "samples per second of several learners on one GPU, against torch's ways",
    "vision": "convolutional networks against plain torch, and a learner on each GPU",
    "timeline": "how much of push and pull overlaps with the computation",
    "server_on_gpu": "an experiment: the update on the GPU instead of the host",
}
PACKAGE = "gadei_ps.benchmarks.gpu"
PLOTS = suite.RESULTS.parents[1] / "docs" / "plots"
GRACE_S = 30.0
"""Seconds that a part may take beyond its time, before it is ended."""
END_S = 15.0
MOST_S = 86400.0
SHM = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {PACKAGE}")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seconds", type=_time, help="time of each part")
    parser.add_argument("--out", type=_path, help="where results go, instead of the checkout")
    parser.add_argument("--commit", help="the commit that results name; by default git's HEAD")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("parts", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"unknown part {name!r}: there are {', '.join(PARTS)}")
    interrupts.install()
    try:
        failed = _part(options) if options.here else _all(options)
    except GadeiError as error:
        print(f"gadei-ps: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except interrupts.Interrupted as error:
        sys.exit(128 + error.number)
    if failed:
        print(f"gadei-ps: these parts have failed: {', '.join(failed)}", file=sys.stderr)
        sys.exit(1)


def _time(text: str) -> float:
    """Return a time (s). Raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= MOST_S:
            return float(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of seconds (above 0, to {MOST_S:g})"
    )


def _path(text: str) -> Path:
    """Return a path. Raises ArgumentTypeError if the text is empty, as after an unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name a directory")
    return Path(text)


def _all(options: argparse.Namespace) -> list[str]:
    """Run each part in a process of its own; return those that have failed."""
    if options.device == "cuda" and (why := cuda.missing()):
        print(f"{PACKAGE}: {why}", file=sys.stderr)
        sys.exit(1)
    _directory(options)
    # No part shall contain the time in which the server's kernels are compiled.
    code = "from gadei_ps.server import units; units.load()"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    failed = []
    for name in options.parts or PARTS:
        print(f"{name} ...", flush=True)
        begin = time.monotonic()
        flags = [*_how(options), *_where(options)]
        limit_s = _seconds(options, name) + GRACE_S
        if _run(process.module_command(PACKAGE, "--here", *flags, name), limit_s):
            failed.append(name)
        print(f"  {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def _how(options: argparse.Namespace) -> list[str]:
    """Return the options that results depend on."""
    flags = ["--device", options.device] + ["--quick"] * options.quick
    return flags if options.seconds is None else [*flags, "--seconds", f"{options.seconds:g}"]


def _where(options: argparse.Namespace) -> list[str]:
    """Return the other options for the process of a part."""
    flags = []
    for name in ("out", "commit"):
        if (value := getattr(options, name)) is not None:
            flags += [f"--{name}", str(value)]
    return flags


def _seconds(options: argparse.Namespace, part: str) -> float:
    """Return the time of a part (s)."""
    if options.seconds is not None:
        return float(options.seconds)
    return float(sizes.of(options.device, quick=options.quick)[part]["seconds"])


def _directory(options: argparse.Namespace) -> Path | None:
    """Make the directory for results; None if none are written. Raises UsageError."""
    small = options.quick or options.device == "host"
    directory: Path | None = options.out
    if directory is None:
        directory = None if small else suite.RESULTS
    elif small and directory.resolve() == suite.RESULTS:
        raise UsageError(f"{directory}: quick figures would replace the full ones")
    if directory is not None:
        suite.prepare(directory)
    return directory


def _run(command: list[str], limit_s: float) -> int:
    """Return a part's exit code. The part and all that it has started end in every case."""
    with _no_litter():
        # If this process is killed, the part gets SIGTERM and cleans up.
        child = process.spawn(command, how=15)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"  ended: it takes longer than {limit_s:.0f} s", file=sys.stderr)
            return 1
        finally:
            end(child, END_S)


@contextlib.contextmanager
def _no_litter() -> Iterator[None]:
    """Remove counters of shared tensors that ended processes of torch have left in /dev/shm."""

    def found() -> set[Path]:
        return {path for path in SHM.glob("torch_*") if path.name.split("_")[1].isdecimal()}

    before = found()
    try:
        yield
    finally:
        for path in found() - before:
            if not process.start_ticks(int(path.name.split("_")[1])):
                with contextlib.suppress(OSError):
                    path.unlink()


def _part(options: argparse.Namespace) -> list[str]:
    """One part, in this process. Writes its result after each measurement."""
    until = time.monotonic() + _seconds(options, options.parts[0])
    from gadei_ps.benchmarks.gpu.target import Target, facts, why_not

    (name,) = options.parts
    if why := why_not(options.device):
        raise DeviceError(why)
    target = Target(options.device, options.quick, until)
    directory = _directory(options)
    common = {
        "commit": options.commit or suite.commit(),
        "gpu": facts(target),
        "quick": options.quick or not target.on_gpu,
    }
    command = " ".join([f"python -m {PACKAGE}", *_how(options), name])

    def write(report: Report) -> None:
        if directory is not None and report.rows:  # else earlier ones stay
            suite.write(suite.result_of(f"gpu-{name}", report, command) | common, directory)

    report, failed = Report([]), []
    try:
        for report in importlib.import_module(f"{PACKAGE}.{name}").measure(target):
            write(report)
    except UsageError:
        raise
    except Exception as error:  # CUDA's are of any class, and what was measured counts
        traceback.print_exc()
        report.notes.append(f"ends early: {type(error).__name__}: {first_line(error)}")
        failed.append(name)
    write(report)
    print(suite.shown(report), flush=True)
    if directory is not None:
        print(directory / f"gpu-{name}.json")
        _draw(directory, directory if options.out else PLOTS, f"gpu-{name}")
        for table in tables.TABLES:
            if table.result == f"gpu-{name}" and not options.out:
                table.write()
    return failed


def _draw(results: Path, directory: Path, name: str) -> None:
    """Draw the plot of a result, if it has one and matplotlib is installed."""
    try:
        from gadei_ps.benchmarks import plots
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    for path in plots.draw(results, directory, [name]):
        print(path)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
