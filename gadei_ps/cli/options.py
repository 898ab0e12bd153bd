"""What several commands share: options, arguments, and how a result is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gadei_ps.cli.outcome import print_json
from gadei_ps.machine.launch import DEVICE_VARIABLE

if TYPE_CHECKING:
    from rich.console import RenderableType

MODELS = (
    "asp, ssp:S, bsp, elastic-bsp:R, cutoff:C, cutoff:by=order, cutoff:by=sampled, "
    "cutoff:file=MODEL or wsp:D=N,s_local=N; docs/sync-models.md tells which when."
)


class OptimizerName(StrEnum):
    """As in a job file's [optimizer] kind."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    NESTEROV = "nesterov"
    ADAGRAD = "adagrad"
    ADAM = "adam"
    ADAMW = "adamw"


class Wire(StrEnum):
    """How gradients travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceName(StrEnum):
    """What learners compute on."""

    AUTO = "auto"
    CUDA = "cuda"
    HOST = "host"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Name or socket of a job.")]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND", help="After --: program and arguments.")
]
Sync = Annotated[
    str | None,
    typer.Option("--sync", metavar="MODEL", help=MODELS),
]
Device = Annotated[
    DeviceName,
    typer.Option(
        "--device",
        envvar=DEVICE_VARIABLE,
        help="What learners compute on; auto: CUDA where it can be used, else the host.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="K,...",
        help="GPUs that learners get in turn, one each; without it all. Numbers of nvidia-smi, "
        "UUIDs of parts (MIG), or places in CUDA_VISIBLE_DEVICES where that is set.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the log of the job's daemon.")]


def tell(as_json: bool, result: Mapping[str, Any], shown: Callable[[], RenderableType]) -> None:
    """Prints the result of a command, for programs or for people."""
    if as_json:
        print_json(result)
        return
    from gadei_ps.show import tables

    tables.show(shown())
