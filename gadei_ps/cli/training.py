"""Commands that train a sentence classifier and use it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gadei_ps.cli.options import (
    Device,
    DeviceName,
    Gpus,
    Json,
    OptimizerName,
    Sync,
    Verbose,
    Wire,
    tell,
)
from gadei_ps.cli.outcome import print_json
from gadei_ps.errors import UsageError

if TYPE_CHECKING:
    from gadei_ps.classifier.predict import Prediction


def train(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Labelled sentences, UTF-8, with a header.")
    ],
    test: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Measure the model on these at the end.")
    ] = None,
    learners: Annotated[int, typer.Option(metavar="N", help="Learner processes.")] = 2,
    epochs: Annotated[
        int | None, typer.Option(metavar="E", help="At most so many passes. [default: 200]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", help="Mini-batch. [default: 2, 4 or 32 by rows]")
    ] = None,
    optimizer: Annotated[
        OptimizerName, typer.Option(help="What moves the weights.")
    ] = OptimizerName.ADAGRAD,
    lr: Annotated[
        float | None, typer.Option(metavar="RATE", help="Learning rate. [default: 0.01]")
    ] = None,
    sync: Sync = "asp",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the model goes.")] = Path("model"),
    patience: Annotated[
        int, typer.Option(metavar="E", help="Stop after so many epochs without improvement.")
    ] = 5,
    dropout: Annotated[float, typer.Option(metavar="P", help="Share of units dropped.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the hold-out, the weights and the order.")] = 0,
    wire: Annotated[Wire, typer.Option(help="Number format of gradients.")] = Wire.FLOAT32,
    error_feedback: Annotated[
        bool, typer.Option("--error-feedback", help="Add what 16 bits lose to the next gradient.")
    ] = False,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    text_column: Annotated[str, typer.Option(metavar="NAME", help="Column of the texts.")] = "text",
    label_column: Annotated[
        str, typer.Option(metavar="NAME", help="Column of the labels.")
    ] = "label",
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job. [default: train-PID]")
    ] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Train a sentence classifier from a CSV file; the model directory is for predict."""
    _need_torch("train")
    from gadei_ps.classifier.train import Settings
    from gadei_ps.classifier.train import train as run_training
    from gadei_ps.show import view

    settings = Settings(
        train_file=file,
        test_file=test,
        learners=learners,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer.value,
        lr=lr,
        sync=sync or "asp",
        patience=patience,
        dropout=dropout,
        seed=seed,
        wire=wire.value,
        error_feedback=error_feedback,
        device=device.value,
        gpus=gpus,
        out=out,
        text_column=text_column,
        label_column=label_column,
        job=job,
        verbose=verbose,
    )
    summary = run_training(settings, display_silent=as_json)
    tell(as_json, summary, lambda: view.trained(summary, str(test)))
    return 0


def predict(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model directory that train has made.")
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Sentences; without any, lines of stdin."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Add label and probability to its rows.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Where --csv writes. [default: stdout]")
    ] = None,
    text_column: Annotated[
        str, typer.Option(metavar="NAME", help="Column of --csv with the texts.")
    ] = "text",
    as_json: Json = False,
) -> int:
    """Label sentences: from the arguments, from standard input, or from a CSV file."""
    if csv is not None and texts:
        raise UsageError("give sentences or --csv, not both")
    if out is not None and csv is None:
        raise UsageError("--out goes with --csv")
    _need_torch("predict")
    from gadei_ps.classifier import dataset

    # Read first: a mistake in the file is told before the model is loaded.
    table = None if csv is None else dataset.read_table(csv, text_column)
    from gadei_ps.classifier.predict import Predictor, sentences, write_csv

    predictor = Predictor(directory)
    if table is not None:
        found = predictor.predict(table.texts)
        if out is not None or not as_json:
            write_csv(table, found, out)
        if out is not None and not as_json:
            print(f"{len(found):,} sentences labelled: {out}")
    elif texts:
        found = predictor.predict(texts)
    else:
        typed = sys.stdin.isatty()
        if typed:
            print("one sentence a line; end with Ctrl-D", file=sys.stderr)
        stream = predictor.stream(sentences(sys.stdin.buffer), *([1] if typed else []))
        found = []
        for one in stream:
            found.append(one)
            if not as_json:
                _print_prediction(one)
    if as_json:
        print_json(
            {
                "model_dir": str(directory),
                "csv": None if out is None else str(out),
                "predictions": [one._asdict() for one in found],
            }
        )
    elif texts:
        for one in found:
            _print_prediction(one)
    return 0


def _print_prediction(one: Prediction) -> None:
    """Label, probability and sentence, by tabs: for eyes and for cut."""
    print(one.label, f"{one.probability:.4f}", one.text, sep="\t", flush=sys.stdout.isatty())


def _need_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"{command} needs PyTorch: pip install 'gadei-ps[torch]'")
