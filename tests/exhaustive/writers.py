"""Programs that write to the disk, with recorded operations: see test_power_cuts.py.

Run with recorder.c preloaded. Each line of standard input is a task: what is done, in which
directory, where it is recorded, before which operation it dies. A fork does it; its exit code is
printed.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.snapshots import one

from gadei_ps.memory.layout import Role
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.storage import checkpoint
from gadei_ps.storage.export import export

MODEL = place([Tensor("a", (2500,)), Tensor("b", (10,), Role.BUFFER)])
OLD, NEW = 11, 12  # versions of what is replaced and of what replaces it
LOG = Path()


def mark(text: str) -> None:
    """Record that this is done."""
    with open(LOG, "ab") as file:
        file.write(f"mark {text}\n".encode())


def _write(directory: Path, version: int, keep: int = 2) -> None:
    mark(f"begin {version}")
    checkpoint.write(directory, one(version, MODEL), keep)
    mark(f"end {version}")


def checkpoints(root: Path) -> None:
    """A life: first ones, pruning, the same version again, an older one after a restore."""
    for version, keep in ((1, 2), (2, 2), (3, 2), (3, 2), (2, 2), (4, 1)):
        _write(root / "jobs" / "a", version, keep)


def two(root: Path) -> None:
    for version in (1, 2):
        _write(root / "jobs" / "a", version)


def fourth(root: Path) -> None:
    _write(root / "jobs" / "a", 4)


def fifth(root: Path) -> None:
    _write(root / "jobs" / "a", 5)


def exports(root: Path) -> None:
    """Replace the files that are there, one of each format."""
    for suffix in ("safetensors", "npz", "pt"):
        if (root / f"out.{suffix}").exists():
            mark(f"begin out.{suffix}")
            export(one(NEW, MODEL), root / f"out.{suffix}")
            mark(f"end out.{suffix}")


def singles(root: Path) -> None:
    """Single files of commands: an older one of each is replaced."""
    from gadei_ps.classifier.words import Vocabulary
    from gadei_ps.commands import unit_files
    from gadei_ps.run_times import fitting

    for name, write in (
        ("model.npz", lambda: fitting._write(root / "model.npz", b"12" * 4000)),
        ("unit.service", lambda: unit_files._write(root / "unit.service", "12" * 4000)),
        ("words.json", lambda: Vocabulary(tuple(map(str, range(3000)))).save(root / "words.json")),
    ):
        mark(f"begin {name}")
        write()
        mark(f"end {name}")


def _result(path: Path, version: int) -> None:
    from gadei_ps.classifier.inference import Classifier, Sizes
    from gadei_ps.classifier.model_directory import save_result
    from gadei_ps.classifier.words import Vocabulary

    words = Vocabulary(("a", "b"))
    sizes = Sizes(len(words), 2, embedding=4, maps=4)
    tensors = {name: np.ones(shape, np.float32) for name, shape in sizes.shapes.items()}
    save_result(path, Classifier(sizes, tensors), words, ["x", "y"], {"version": version}, {})


def result_of_old(root: Path) -> None:
    _result(root / "again", OLD)


def results(root: Path) -> None:
    """Write as `train` and `predict` do; all but the first replace an older one."""
    from gadei_ps.classifier import predict
    from gadei_ps.classifier.dataset import Table

    for name in ("new/first", "again"):
        mark(f"begin {name}")
        _result(root / name, NEW)
        mark(f"end {name}")
    table = Table(["text"], [[f"{number}"] for number in range(3000)], [])
    mark("begin labels.csv")
    predict.write_csv(table, [predict.Prediction("x", "y", 1.0, 1)] * 3000, root / "labels.csv")
    mark("end labels.csv")


def watchdog(root: Path) -> None:
    """The files by which a watchdog is found."""
    from gadei_ps.job.lock_file import NameLock
    from gadei_ps.watchdog.sockets import ControlServer

    os.environ["GADEI_PS_RUNTIME_DIR"] = str(root / "run")
    lock = NameLock("a-job")
    with selectors.DefaultSelector() as selector:
        ControlServer(
            root / "run" / "a-job.sock", selector, lambda *_: None, lambda _: None
        ).shut_down()
    lock.release()


def toy(number: int) -> int:
    """Is compiled."""
    return 2 * number + 1


def code(root: Path) -> None:
    """Store a compiled function."""
    from numba import types

    from gadei_ps.kernels import cache, compiled

    os.environ["NUMBA_CACHE_DIR"] = str(root)
    cache.keep("toy", compiled.machine_code("toy", types.int64(types.int64), toy))


TASKS: dict[str, Callable[[Path], None]] = {
    task.__name__: task
    for task in (
        *(checkpoints, two, fourth, fifth, exports, singles),
        *(results, result_of_old, watchdog, code),
    )
}


def _do(task: str, root: str, log: str, die: int) -> int:
    """Run it in a fork; return its exit code, negative for a signal."""
    global LOG
    LOG = Path(log)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            ctypes.CDLL(None).counts_record(root.encode(), log.encode(), ctypes.c_long(die))
            TASKS[task](Path(root))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    for line in sys.stdin:
        print(_do(**json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
