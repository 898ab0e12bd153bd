"""The command `gadei-ps partition`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

from gadei_ps.cli.options import (
    Json,
    argument,
    check_file,
    option,
    path_option,
    print_result,
    write_file,
)
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

REPEATS = 20  # learners.virtual.plan.REPEATS, whose module imports PyTorch
SYNC = "wsp:D=1,s_local=3"


def partition(
    layers: Annotated[
        str,
        argument(
            "MODULE:NAME",
            "The layers: a list or an nn.Sequential in a Python module, or a function that "
            "returns one.",
        ),
    ],
    sample: Annotated[
        str,
        option(
            "MODULE:NAME",
            "A mini-batch: (inputs, targets, loss_function), or a function that returns it.",
        ),
    ],
    devices: Annotated[
        str,
        option(
            "DEVICE,...",
            "At most 8 devices for the stages, in any order: host, host:CORES or cuda:NUMBER.",
        ),
    ],
    memory: Annotated[
        str | None,
        option(
            "SIZE,...",
            "Memory that a stage may take on each device, such as 512MB or 2GB.",
            "what is free, in equal shares",
        ),
    ] = None,
    sync: Annotated[
        str,
        option(
            "MODEL",
            "The job's synchronization model; of WSP, s_local + 1 mini-batches are in flight, "
            "of others one.",
        ),
    ] = SYNC,
    optimizer: Annotated[
        str,
        option(
            "NAME",
            "The worker's optimizer: sgd, momentum, adagrad, adam, adamw, rmsprop, "
            "MODULE:NAME of a function that makes it, or none if the job's server has it.",
        ),
    ] = "sgd",
    repeats: Annotated[int, option("N", "Measure each layer N times.", min=1)] = REPEATS,
    out: Annotated[
        Path | None,
        path_option("FILE.json", "Write the plan to this file; VirtualWorker(plan=) reads it."),
    ] = None,
    svg: Annotated[
        Path | None, path_option("FILE.svg", "Write a picture of what is shown to this file.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Profile layers and devices, and compute the pipeline stages of a virtual worker."""
    check_file("--out", out)
    check_file("--svg", svg, ".svg")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("partition needs PyTorch: pip install 'gadei-ps[torch]'")
    from rich.console import Group

    from gadei_ps.commands import partition as planner
    from gadei_ps.machine import process
    from gadei_ps.show import picture
    from gadei_ps.show import pipeline_plan as view

    made, call = planner.partition(layers, sample, devices, memory, sync, optimizer, repeats)
    report = made.model_dump()
    shown = view.plan(report, made.passes(view.drawn(made.in_flight)), process.cores())
    if out is not None:
        write_file("--out", out, made.model_dump_json(indent=1) + "\n")
    if svg is not None:
        write_file(
            "--svg", svg, picture.svg(Group(shown, "", call), f"gadei-ps partition {layers}")
        )
    print_result(as_json, report, lambda: shown)
    if not as_json:
        print_text(f"\n{call}", sys.stdout)  # in one line, however narrow the terminal is
    for file in (out, svg):
        if file is not None:
            print_text(f"wrote {file}")
    return 0
