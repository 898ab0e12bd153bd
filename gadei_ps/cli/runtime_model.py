"""The command `gadei-ps runtime-model train`."""

from __future__ import annotations

import importlib.util
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import Json, argument, option
from gadei_ps.cli.switches import App
from gadei_ps.errors import UsageError
from gadei_ps.show.plain import print_text

if TYPE_CHECKING:
    from rich.table import Table

    from gadei_ps.run_times.fitting import Progress, TrainingResult

EPOCH_LINE_S = 5.0  # at most one line of progress in this time
DEFAULT_OUT = Path("runtime-model.safetensors")
DEFAULT_EPOCHS = 30  # run_times.training.EPOCHS, whose module imports PyTorch
HELP = "Train the model of learners' run times that --sync cutoff:file=FILE uses."

app = App(help=HELP)


@app.callback(help=HELP)
def _group() -> None:
    """Keep `train` a word of the command line: typer leaves out the name of a single command."""


@app.command()
def train(
    trace: Annotated[Path, argument("TRACE", "Run times that gadei-ps trace has recorded (CSV).")],
    out: Annotated[Path, option("FILE", "File that the model is written to.")] = DEFAULT_OUT,
    epochs: Annotated[
        int, option("N", "Number of epochs, each of 40 mini-batches.", min=1)
    ] = DEFAULT_EPOCHS,
    seed: Annotated[
        int, option("N", "Seed for the first weights and the mini-batches.", min=0)
    ] = 0,
    as_json: Json = False,
) -> int:
    """Train a model of run times from a trace.

    A few hundred iterations are enough. A trace in which no gradient was dropped gives the best
    model.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("runtime-model train needs PyTorch: pip install 'gadei-ps[torch]'")
    from gadei_ps.run_times import traces

    # The file is read first, so that a mistake in it is reported before PyTorch is imported.
    read = traces.read(trace)
    from gadei_ps.run_times import fitting

    result = fitting.train(
        read,
        out=out,
        epochs=epochs,
        seed=seed,
        progress=None if as_json else _teller(),
    )
    if as_json:
        print_json(asdict(result))
    else:
        from gadei_ps.show import tables

        tables.show(_shown(result))
    return 0


def _teller() -> Progress:
    """Print the progress of training on standard error, every few seconds."""
    last = time.monotonic()

    def tell(epoch: int, epochs: int, held_out: float) -> None:
        nonlocal last
        if time.monotonic() - last >= EPOCH_LINE_S:
            last = time.monotonic()
            text = f"epoch {epoch} of {epochs}, held-out ELBO {held_out:.3f} nats a run time"
            print_text(text)

    return tell


def _shown(result: TrainingResult) -> Table:
    from gadei_ps.show.counts import counted
    from gadei_ps.show.tables import duration, facts

    trace = f"{counted(result.iterations, 'iteration')} of {counted(result.learners, 'learner')}"
    if result.missing:
        trace += f", {counted(result.missing, 'run time')} missing"
    if result.censored:
        trace += f", {result.censored:,} known as lower bounds"
    return facts(
        {
            "trace": trace,
            "held-out ELBO": (
                f"{result.held_out_elbo:.3f} nats a run time "
                f"(epoch {result.best_epoch} of {result.epochs})"
            ),
            "time": duration(result.seconds),
            "model": result.out,
            "use": f"gadei-ps run ... --sync {shlex.quote(f'cutoff:file={result.out}')}",
        }
    )
