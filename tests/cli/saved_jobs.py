"""Make jobs with checkpoints, end them as a power failure does, and serve them again.

With SGD and a rate of 1, the weights count integer gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import support
from shell import Cli, Running, is_running

from gadei_ps.commands import jobs
from gadei_ps.job import config
from gadei_ps.learners.client import Client
from gadei_ps.memory import segment
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.storage import checkpoint
from gadei_ps.storage.checkpoint import Snapshot

VALUES = 1000
ALONE = "standby = false\n"  # a standby would only make the start longer
SGD = "[optimizer]\nkind = 'sgd'\nlr = 1.0\n"
ADAM = "[optimizer]\nkind = 'adam'\nlr = 0.1\nspike_compensation = false\n"
MODEL = f"[[tensors]]\nname = 'w'\nshape = [{VALUES}]\n"
COUNTED = ALONE + "shards = 3\n" + SGD + MODEL


def count(client: Client, gradients: int) -> None:
    """Push gradients, each of which subtracts 1 from every weight."""
    for _ in range(gradients):
        client.push({"w": np.ones(VALUES, np.float32)}, samples=1)
    client.wait_applied()


def weights(job: str) -> np.ndarray:
    return support.live_weights(job)[:VALUES]


def there(job: str, cli: Cli) -> list[Path]:
    """The checkpoints of a job, newest first."""
    return [one.path for one in checkpoint.found(cli.directory / "state" / job)]


def die(job: str) -> None:
    """End a job as a power failure does: no process and no memory is left."""
    support.kill_all(job)
    for name in support.segments(job):
        segment.unlink(name)


def again(cli: Cli, job: str, *options: str) -> Running:
    """Serve the job file again."""
    daemon = cli.start("serve", f"{job}.toml", *options)
    support.eventually(
        lambda: is_running(job) or daemon.process.poll() is not None, what=lambda: daemon.err
    )
    assert daemon.process.poll() is None, daemon.err
    return daemon


def refused(cli: Cli, job: str) -> str:
    """The error of serving the job file. Checks that nothing of the job is left.

    The exit code is the one after which no unit starts it again.
    """
    done = cli("serve", f"{job}.toml")
    assert done.code == 2, done
    assert not support.segments(job)
    line = done.err.splitlines()[-1]
    assert line.startswith("gadei-ps: ")
    return line


def take(job: str) -> dict[str, Any]:
    """Make a checkpoint as the command `checkpoint` does."""
    return jobs.checkpoint(job)


def stop(job: str) -> dict[str, Any]:
    return jobs.stop(job, drain=False, timeout_s=5)


def truncate(path: Path) -> None:
    file = path / "weights.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def write(cli: Cli, job: str, text: str, versions: range, slots: int = 0) -> None:
    """Write the job file and the checkpoints of a job that has ended."""
    file = cli.directory / f"{job}.toml"
    file.write_text(text)
    cli.made(job)
    wanted = config.load(file)
    model = place([Tensor("w", (VALUES,))])
    for version in versions:
        one = Snapshot(
            job=job,
            config=wanted.model_dump(mode="json"),
            model=model,
            weights=np.full(model.elements, -version, np.float32),
            slots=(np.zeros(model.elements, np.float32),) * slots,
            version=version,
            steps=version,
            supersteps=0,
            work=dict.fromkeys(("batches", "epochs", "seed", "next", "epochs_done", "state"), 0),
            requeue=np.empty(0, np.uint64),
            counts=dict.fromkeys(("dropped", "refused", "requeued_total"), 0)
            | {"applied": version, "samples": version},
            clocks={},
        )
        checkpoint.write(wanted.checkpoint_directory(), one, len(versions))
