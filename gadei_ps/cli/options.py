"""Options and arguments that several commands share, and how they print and write a result."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gadei_ps.cli.exits import print_json
from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import NAMES
from gadei_ps.machine.launch import DEVICE_VARIABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

MODELS = (
    "asp, ssp:S, bsp, elastic-bsp:R, cutoff:C, cutoff:by=order, cutoff:by=sampled, "
    "cutoff:file=FILE or wsp:D=N,s_local=N; gadei-ps docs sync-models compares them."
)
SERVED = "Only if this command starts the job."


if TYPE_CHECKING:

    class OptimizerName(StrEnum):
        """Values of `kind` in the [optimizer] table of a job file."""
else:
    OptimizerName = StrEnum("OptimizerName", {name.upper(): name for name in NAMES})


class ModelName(StrEnum):
    """Classifiers of `train`."""

    ENSEMBLE = "ensemble"
    CNN = "cnn"


class Wire(StrEnum):
    """Number format of gradients in the ring."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    """Device that learners compute on."""

    AUTO = "auto"
    CUDA = "cuda"
    HOST = "host"


def option(
    metavar: str | None, text: str, shown: bool | str = True, name: str = "", **how: Any
) -> Any:
    """Return an option with a value. text: its help. shown: its default, in words."""
    names = [name] if name else []
    return typer.Option(*names, metavar=metavar, help=text, show_default=shown, **how)


def argument(metavar: str, text: str, shown: bool | str = True, **how: Any) -> Any:
    """Return an argument. text: its help. shown: its default, in words."""
    return typer.Argument(metavar=metavar, help=text, show_default=shown, **how)


def path(text: str) -> Path:
    """Return a path that was given. Raises BadParameter if it is empty, which pathlib takes for the
    current directory."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


path_option = functools.partial(option, parser=path)
path_argument = functools.partial(argument, parser=path)


def switch(name: str, text: str, *names: str) -> Any:
    """Return an option without a value. text: its help. names: other names of it."""
    return typer.Option(name, *names, help=text)


Json = Annotated[bool, switch("--json", "Print the result as one JSON object.")]
JsonLog = Annotated[bool, switch("--json-log", "Log one JSON object a line.")]
Details = Annotated[bool, switch("--verbose", "Log details.")]


def shards_option(condition: str, shown: str) -> Any:
    """Return the option --shards. condition: when it applies. shown: its default, in words."""
    return option(
        "N", f"Shards of the server, each with a thread. {condition}", shown, min=0, max=64
    )


def running_jobs(incomplete: str) -> list[str]:
    """List the names of running jobs for a shell's completion."""
    from gadei_ps.job import paths

    names = [path.stem for path in paths.directory().glob("*.sock")]
    return sorted(name for name in names if name.startswith(incomplete))


def recorded_jobs(incomplete: str) -> list[str]:
    """List the names of jobs that run or have left a history for a shell's completion."""
    from gadei_ps.commands import history
    from gadei_ps.storage.history_file import job_of

    names = {*running_jobs(""), *map(job_of, history.files())}
    return sorted(name for name in names if name.startswith(incomplete))


JobArgument = Annotated[
    str, argument("JOB", "The job's name, or the path of its socket.", autocompletion=running_jobs)
]
Command = Annotated[
    list[str],
    argument("COMMAND", "The learner's program and its arguments; -- before it is optional."),
]
Device = Annotated[
    DeviceName,
    option(
        None,
        "What learners compute on; auto takes CUDA if it can be used, and the host otherwise.",
        name="--device",
        envvar=DEVICE_VARIABLE,
    ),
]
Gpus = Annotated[
    str | None,
    option(
        "K,...",
        "Deal these GPUs out to the learners in turn: numbers of nvidia-smi, UUIDs "
        "(also of MIG parts), or positions in CUDA_VISIBLE_DEVICES if that is set.",
        "all GPUs",
        name="--gpus",
    ),
]
DevicesPerLearner = Annotated[
    int | None,
    option(
        "N",
        "Devices of each learner, for the stages of a virtual worker: N GPUs, or N parts of "
        "its share of the cores.",
        "one",
        name="--devices-per-learner",
        min=1,
        max=256,
    ),
]
TensorBoard = Annotated[
    Path | None,
    path_option("DIR", "Write curves for TensorBoard into this directory.", name="--tensorboard"),
]
MLflow = Annotated[
    str | None, option("URI", "Write curves to this MLflow server, or directory.", name="--mlflow")
]
WandB = Annotated[
    Path | None,
    path_option(
        "DIR", "Write offline runs of Weights & Biases into this directory.", name="--wandb"
    ),
]
Quiet = Annotated[bool, switch("--quiet", "In a terminal, print no lines on how training goes.")]
DryRun = Annotated[bool, switch("--dry-run", "List what would be removed, and remove nothing.")]
Verbose = Annotated[bool, switch("--verbose", "Print the log of the job's watchdog and servers.")]


def limits(given: Sequence[str]) -> dict[str, str]:
    """Parse `--stop-after WHAT=N` into N by WHAT. Raises UsageError."""
    for one in given:
        what, _, number = one.partition("=")
        if what not in ("gradients", "samples", "epochs") or not number.isdecimal():
            raise UsageError(f"--stop-after {one}: write gradients=N, samples=N or epochs=N")
    return dict(one.split("=") for one in given)


def print_result(
    as_json: bool, result: Mapping[str, Any], shown: Callable[[], RenderableType]
) -> None:
    """Print the result of a command, for programs or for people; before anything else it says."""
    if as_json:
        print_json(result)
    else:
        from gadei_ps.show import tables

        tables.show(shown())
    sys.stdout.flush()  # where this fails, that is the only error


def check_file(option: str, file: Path | None, suffix: str = "") -> None:
    """Raise UsageError if the file could not be written; for a command that takes long."""
    if file is None:
        return
    if not file.name.endswith(suffix):
        raise UsageError(f"{option} {file}: give a name that ends in {suffix}")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no directory {file.parent}; create it first")
    if file.is_dir():
        raise UsageError(f"{option} {file}: it is a directory; name a file")


def write_file(option: str, file: Path, text: str) -> None:
    """Write it whole, or not at all. Raises UsageError."""
    from gadei_ps.storage import files

    try:
        with files.replacing(file) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written ({error.strerror})") from None
