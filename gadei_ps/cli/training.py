"""Commands that train a sentence classifier and use it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gadei_ps.cli.exits import print_json
from gadei_ps.cli.options import (
    MODELS,
    Device,
    DeviceName,
    Gpus,
    Json,
    MLflow,
    ModelName,
    OptimizerName,
    TensorBoard,
    Verbose,
    WandB,
    Wire,
    argument,
    check_file,
    option,
    path_argument,
    path_option,
    print_result,
    switch,
)
from gadei_ps.errors import UsageError
from gadei_ps.show.counts import counted
from gadei_ps.show.plain import escaped, print_text

if TYPE_CHECKING:
    from gadei_ps.classifier.predict import Choice, Prediction, Predictor


def train(
    file: Annotated[
        Path, path_argument("FILE.csv", "Sentences with labels: CSV, JSON lines or Parquet.")
    ],
    test: Annotated[
        Path | None, path_option("FILE.csv", "Sentences on which the finished model is measured.")
    ] = None,
    model: Annotated[
        ModelName | None,
        option(
            None,
            "What is trained: an ensemble, or the CNN of the GaDei paper.",
            "ensemble; cnn with --groups",
        ),
    ] = None,
    learners: Annotated[
        int | None, option("N", "Number of learner processes; with --groups, on each machine.", "2")
    ] = None,
    epochs: Annotated[
        int | None,
        option("E", "Passes over the data; of the CNN at most.", "4 to 16, by rows; cnn: 200"),
    ] = None,
    batch_size: Annotated[
        int | None, option("B", "Sentences in a mini-batch.", "16; cnn: 2, 4 or 32, by rows")
    ] = None,
    optimizer: Annotated[
        OptimizerName | None,
        option(None, "With the CNN: the rule by which gradients change the weights.", "adagrad"),
    ] = None,
    lr: Annotated[
        float | None,
        option(
            "RATE",
            "With the CNN: learning rate.",
            "0.01; of several replicas with adagrad, up to 0.04",
        ),
    ] = None,
    sync: Annotated[str | None, option("MODEL", f"Synchronization model: {MODELS}", "asp")] = None,
    out: Annotated[
        Path | None,
        path_option("DIR", "Directory that the model is written to.", "model-1, model-2 and so on"),
    ] = None,
    overwrite: Annotated[
        bool, switch("--overwrite", "Replace an earlier model in the directory of --out.")
    ] = False,
    patience: Annotated[
        int | None,
        option(
            "E",
            "With the CNN: stop after E epochs without a better held-out accuracy or loss.",
            "5",
        ),
    ] = None,
    dropout: Annotated[
        float | None,
        option("P", "With the CNN: probability with which dropout zeroes a unit.", "0.5"),
    ] = None,
    seed: Annotated[
        int, option(None, "Seed for the held-out rows, the first weights and the order of samples.")
    ] = 0,
    wire: Annotated[
        Wire, option(None, "Number format in which gradients are sent.")
    ] = Wire.FLOAT32,
    error_feedback: Annotated[
        bool, switch("--error-feedback", "Add what rounding to 16 bits loses to the next gradient.")
    ] = False,
    device: Device = DeviceName.AUTO,
    gpus: Gpus = None,
    text_column: Annotated[
        str | None,
        option(
            "NAME",
            "Column that holds the sentences: its name, or its number from 1.",
            "text, or a usual name",
        ),
    ] = None,
    label_column: Annotated[
        str | None,
        option(
            "NAME",
            "Column that holds the labels: its name, or its number from 1.",
            "label, or a usual name",
        ),
    ] = None,
    label_separator: Annotated[
        str | None,
        option("SEP", "Rows may have several labels, separated by this text.", "one label"),
    ] = None,
    job: Annotated[str | None, option("NAME", "Name of the job.", "train-PID")] = None,
    groups: Annotated[
        Path | None,
        path_option(
            "GROUPS.toml",
            "Train on the replicas of this file, as gadei-ps group run does.",
            "this machine",
        ),
    ] = None,
    address: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "With --groups: a Ray cluster that runs; this host is one of its nodes.",
            "a cluster of this host's own",
        ),
    ] = None,
    tensorboard: TensorBoard = None,
    mlflow: MLflow = None,
    wandb: WandB = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Train a sentence classifier from a file of labelled sentences.

    Label sentences with it by gadei-ps predict. The model so far is written while it is trained.
    Ctrl-C ends the training; pressed again, it ends at once.
    """
    if address is not None and groups is None:
        raise UsageError("--address needs --groups")
    from gadei_ps.classifier.training_settings import Settings
    from gadei_ps.show import view

    wanted = {
        "learners": learners,
        "optimizer": optimizer.value if optimizer is not None else None,
        "lr": lr,
        "sync": sync,
        "patience": patience,
        "dropout": dropout,
    }
    given: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
    if groups is None and model is not ModelName.CNN:
        for name in given.keys() & {"optimizer", "lr", "patience", "dropout"}:
            raise UsageError(f"--{name} is for --model cnn; the ensemble has its own settings")
        # Before NumPy is imported: more threads would take the cores of learners, and spin there.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = Settings(
        train_file=file,
        test_file=test,
        model=model.value if model is not None else None,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        wire=wire.value,
        error_feedback=error_feedback,
        device=device.value,
        gpus=gpus,
        out=out,
        overwrite=overwrite,
        text_column=text_column,
        label_column=label_column,
        label_separator=label_separator,
        job=job,
        groups=groups,
        address=address,
        tensorboard=tensorboard,
        mlflow=mlflow,
        wandb=wandb,
        verbose=verbose,
        **given,
    )
    if groups is None:
        from gadei_ps.classifier.train import train as run_training

        summary = run_training(settings, display_silent=as_json)
    else:
        from gadei_ps.classifier.grouped import train as run_grouped

        summary = run_grouped(settings, given, display_silent=as_json)
    print_result(as_json, summary, lambda: view.trained(summary, str(test)))
    return int(summary["exit_code"])


def predict(
    directory: Annotated[
        Path, path_argument("DIR", "Directory of a model that gadei-ps train has written.")
    ],
    texts: Annotated[list[str] | None, argument("TEXT", "Sentences.", "lines of stdin")] = None,
    csv: Annotated[Path | None, path_option("FILE.csv", "Label the rows of this file.")] = None,
    out: Annotated[
        Path | None,
        path_option(
            "FILE.csv", "With --csv: file for the rows with label and probability.", "stdout"
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        option(
            "NAME",
            "With --csv: column that holds the sentences, by its name or number.",
            "text, or a usual name",
        ),
    ] = None,
    top: Annotated[int, option("N", "Print the N most likely labels of each sentence.")] = 1,
    none: Annotated[
        bool, switch("--none", "Leave the label empty where none is likely: below a threshold.")
    ] = False,
    threshold: Annotated[
        float | None, option("P", "With --none: the threshold.", "the model's")
    ] = None,
    as_json: Json = False,
) -> int:
    """Label sentences: from the arguments, from standard input, or from a CSV file."""
    if csv is not None and texts:
        raise UsageError("give sentences or --csv, not both")
    if out is not None and csv is None:
        raise UsageError("--out needs --csv")
    check_file("--out", out)
    if csv is not None and out is not None and _same_file(csv, out):
        raise UsageError(f"--out {out}: it is the file of --csv; name another file")
    if top < 1:
        raise UsageError(f"--top must be at least 1, not {top}")
    if threshold is not None and not none:
        raise UsageError("--threshold needs --none")
    if threshold is not None and not 0 <= threshold <= 1:
        raise UsageError(f"--threshold must be from 0 to 1, not {threshold:g}")
    from gadei_ps.classifier.predict import Choice

    choice = Choice(top, none, threshold)
    result: dict[str, Any] = {"model_dir": str(directory), "csv": None if out is None else str(out)}
    if csv is not None:
        found, more = _predict_table(directory, csv, choice, text_column, out, as_json)
        result |= more
    elif texts:
        found = _predictor(directory, choice).predict(texts)
        if not as_json:
            for one in found:
                _print_prediction(one)
    else:
        found = _predict_lines(_predictor(directory, choice), as_json)
    if as_json:
        print_json(result | {"predictions": [one.as_dict() for one in found]})
    if strange := [one.text for one in found if not one.known_words]:
        _notice(
            f"{len(strange):,} of {counted(len(found), 'sentence')} without a word of the model's "
            f"vocabulary (first: {strange[0][:40]!r}): the label is a guess"
        )
    return 0


def _same_file(one: Path, other: Path) -> bool:
    """Return whether both are the same regular file: a terminal may be read and written."""
    return one.is_file() and other.is_file() and one.samefile(other)


def _predictor(directory: Path, choice: Choice) -> Predictor:
    from gadei_ps.classifier.predict import Predictor

    predictor = Predictor(directory, choice)
    if choice.none and choice.threshold is None and not predictor.threshold:
        raise UsageError(
            f"{directory} is of an earlier release and has no threshold: give --threshold"
        )
    return predictor


def _predict_table(
    directory: Path,
    csv: Path,
    choice: Choice,
    text_column: str | None,
    out: Path | None,
    as_json: bool,
) -> tuple[list[Prediction], dict[str, Any]]:
    """Predict a file, and measure the result on it; write the predictions unless as_json."""
    from gadei_ps.classifier import dataset
    from gadei_ps.classifier.predict import compare, write_csv

    # The file is read first, so that a mistake in it is reported before the model is loaded.
    table = dataset.read_table(csv, text_column)
    for notice in table.notices:
        _notice(notice)
    predictor = _predictor(directory, choice)
    found = predictor.predict(table.texts)
    if out is not None or not as_json:
        write_csv(table, found, out)
    if out is not None and not as_json:
        print_text(f"{counted(len(found), 'sentence')} labelled: {out}", sys.stdout)
    if (true := compare(table, found, predictor.label_names, predictor.separator)) is None:
        return found, {}
    rows = counted(true.rows, "row")
    _notice(f"accuracy {true.accuracy:.4f} on {rows} with a label in column {true.column}")
    return found, {"accuracy": true.accuracy}


def _predict_lines(predictor: Predictor, as_json: bool) -> list[Prediction]:
    """Predict the lines of standard input; print the predictions unless as_json."""
    from gadei_ps.classifier.predict import sentences

    typed = sys.stdin.isatty()
    if typed:
        _notice("one sentence a line; end with Ctrl-D")
    found = []
    for one in predictor.stream(sentences(sys.stdin.buffer), *([1] if typed else [])):
        found.append(one)
        if not as_json:
            _print_prediction(one)
    return found


def _notice(text: str) -> None:
    print_text(f"gadei-ps: {text}")


def _print_prediction(one: Prediction) -> None:
    """Print labels with their probabilities, and the sentence, in a line and separated by tabs."""
    terminal = sys.stdout.isatty()
    cells = (*one.cells(), one.text)
    parts = [" ".join(cell.splitlines()).replace("\t", " ") for cell in cells]
    print(*(map(escaped, parts) if terminal else parts), sep="\t", flush=terminal)
