"""`train` and `predict`: from a CSV file to labels for new sentences."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest
import support
import torch
from shell import Cli, Result, Running, is_running
from support.small_disk import small_disk

from gadei_ps.classifier import learner, predict
from gadei_ps.classifier.dataset import Table
from gadei_ps.classifier.predict import Prediction
from gadei_ps.cli import training
from gadei_ps.errors import UsageError
from gadei_ps.machine import process

pytestmark = [pytest.mark.usefixtures("compiled"), pytest.mark.timeout(5 * support.PATIENCE_S)]

WORDS = {"billing": "invoice payment charge", "claim": "accident damage report"}
ROWS = [
    (f"{'please help ' * (i % 3)}{word} number {i}", label)
    for i in range(10)
    for label, words in WORDS.items()
    for word in words.split()
]


ARGUMENTS = """train train.csv --test test.csv --out model --learners 2 --epochs 12
    --wire bfloat16 --sync ssp:4 --seed 1 --device host"""
BATCHES = 4  # of an epoch: 54 and 60 rows, 16 in each


def write_csv(path: Path, rows: list[tuple[str, str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> tuple[Path, Result]:
    """A directory with a model, and the result of its training."""
    directory = tmp_path_factory.mktemp("trained")
    write_csv(directory / "train.csv", ROWS)
    write_csv(directory / "test.csv", [*ROWS[:5], ("invoice", "unheard of")])
    with pytest.MonkeyPatch.context() as patch:
        (directory / "rt").mkdir(mode=0o700)
        patch.setenv("GADEI_PS_RUNTIME_DIR", str(directory / "rt"))
        cli = Cli(directory, interpreters=True)
        result = cli(
            *ARGUMENTS.split(),
            "--job",
            f"trained-{os.getpid()}",
            "--json",
            patience_s=4 * support.PATIENCE_S,
        )
    assert not list((directory / "rt").iterdir())
    return directory, result


def test_summary(trained: tuple[Path, Result]) -> None:
    directory, result = trained
    assert result.code == 0, result
    assert not result.err, "no progress display with --json"
    summary = result.json
    assert summary["validation_accuracy"] == 1.0
    assert summary["test_accuracy"] == pytest.approx(5 / 6)
    assert summary["epochs"] == 24, "once more on all rows"
    assert (summary["measured_epoch"], summary["best_epoch"]) == (12, 24)
    assert (summary["planned_epochs"], summary["held_out_rows"]) == (24, 6)
    assert summary["gradients_applied"] == BATCHES * summary["epochs"]
    assert 0 <= summary["calibration_error"] <= 1
    assert 0 < summary["threshold"] < 1
    assert {one["label"] for one in summary["worst_labels"]} == WORDS.keys()
    assert summary["gradients_dropped"] == summary["gradients_refused"] == 0
    assert summary["samples_per_s"] > 0
    assert (summary["learners"], summary["rows"], summary["device"]) == (2, 60, "host")
    model = directory / summary["model_dir"]
    assert json.loads((model / "config.json").read_text())["format"] == 4
    confusion = json.loads((model / "confusion.json").read_text())
    assert (confusion["labels"], confusion["counts"]) == (sorted(WORDS), [[0, 0, 3], [1, 1, 3]])
    ElementTree.parse(model / "confusion.svg")


def test_plain_lines_and_summary(cli: Cli, job_name: str) -> None:
    """Train the CNN on a file as a German Excel writes it, compressed, with copies of rows."""
    rows = [("Satz", "Kategorie"), *ROWS, *ROWS[:5], (ROWS[0][0], ROWS[-1][1]), ("", "claim")]
    lines = "".join(f"{text};{label}\r\n" for text, label in rows)
    (cli.directory / "data.csv").write_bytes(gzip.compress(lines.encode("utf-16")))
    columns = ("--text-column", "Satz", "--label-column", 2)
    result = cli(
        *("train", "data.csv", *columns, "--model", "cnn", "--epochs", 1, "--job", job_name),
        TMPDIR=str(cli.directory),
    )
    assert result.code == 0, result
    assert "epoch 1: validation accuracy" in result.err
    assert "learners compute " in result.err
    assert f"job {job_name}; its history is in " in result.err
    assert result.err.startswith(
        "data.csv: gzip, UTF-16, columns separated by semicolons; column 'Kategorie' holds the "
        "labels\n"
        "warning: data.csv:68: 1 row without a text or a label, from here on: left out\n"
        "warning: data.csv: 6 of 66 rows are copies"
    )
    assert "1 text with copies of different labels" in result.err
    assert "\x1b" not in result.err + result.out
    assert "gadei-ps predict model-1" in result.out
    assert re.search(r"accuracy .* on \d+ held-out rows \(epoch 1\)\s+epochs +1 of 1\s", result.out)
    assert "\nprobabilities and threshold of predict rest on " in result.err
    left = {path.name for path in cli.directory.iterdir()} - {"state"}  # where histories lie
    assert {name for name in left if "torch" not in name} == {"data.csv", "model-1"}
    refused = cli("train", "data.csv", *columns, "--out", ".", "--job", job_name)
    assert "holds other files than an earlier result" in refused.error
    refused = cli("train", "data.csv", *columns, "--out", "model-1", "--job", job_name)
    assert (refused.code, "there is a model already" in refused.error) == (2, True)


def test_predict(cli: Cli, trained: tuple[Path, Result], interpreters: None) -> None:
    model = trained[0] / "model"
    texts = ["a new invoice", "the accident"]
    lines = [line.split("\t") for line in cli("predict", model, *texts).out.splitlines()]
    assert [(label, text) for label, _, text in lines] == [
        ("billing", texts[0]),
        ("claim", texts[1]),
    ]
    assert all(0.5 < float(probability) <= 1 for _, probability, _ in lines)

    several = cli("predict", model, "--top", 2, "--none", "--threshold", 1, texts[0]).out
    assert several.split("\t")[::2] == ["", "claim", texts[0] + "\n"]

    cli.interpreters = False
    result = cli("predict", model, "--json", stdin=b"a new invoice\n\nthe accident\nqwertz")
    found = result.json["predictions"]
    assert [one["text"] for one in found] == [texts[0], "", texts[1], "qwertz"]
    assert (found[0]["label"], found[2]["label"]) == ("billing", "claim")
    assert [bool(one["known_words"]) for one in found] == [True, False, True, False]
    assert "2 of 4 sentences without a word of the model's vocabulary (first: '')" in result.err


def test_several_labels(cli: Cli, job_name: str) -> None:
    """Check that texts have all labels that are likely for them."""
    both = [
        (f"{'please help ' * (i % 3)}{one} {other} {i}", "billing;claim")
        for i in range(10)
        for one, other in zip(*(words.split() for words in WORDS.values()), strict=True)
    ]
    write_csv(cli.directory / "data.csv", [*ROWS, *both])
    given = ("--label-separator", ";", "--job", job_name, "--out", "model", "--json")
    result = cli("train", "data.csv", *given, patience_s=4 * support.PATIENCE_S)
    assert result.code == 0, result
    assert result.json["micro_f1"] > 0.8
    answered = cli("predict", "model", "invoice number", "the accident with the payment", "--json")
    assert [one["label"] for one in answered.json["predictions"]] == ["billing", "billing;claim"]


def test_standard_input_that_is_not_text() -> None:
    from gadei_ps.classifier.predict import sentences

    with pytest.raises(UsageError, match="line 2: byte 0xff is not UTF-8"):
        list(sentences(io.BytesIO(b"fine\nnot \xff fine\n")))


def test_predict_csv(cli: Cli, trained: tuple[Path, Result]) -> None:
    model = trained[0] / "model"
    (cli.directory / "in.csv").write_text('id,words\n7,"invoice, please"\n8,accident\n')
    (cli.directory / "in.jsonl").write_text('{"words": "accident", "id": [1]}\n')
    result = cli("predict", model, "--csv", "in.jsonl", "--text-column", "words")
    assert result.out.startswith("words,id,label,probability\naccident,[1],claim,")
    assert result.err == "gadei-ps: in.jsonl: JSON\n"
    result = cli("predict", model, "--csv", "in.csv", "--text-column", "words")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert [(row["id"], row["words"], row["label"]) for row in rows] == [
        ("7", "invoice, please", "billing"),
        ("8", "accident", "claim"),
    ]
    labelled = cli("predict", model, "--csv", trained[0] / "test.csv", "--out", "out.csv", "--json")
    assert labelled.json["csv"] == "out.csv"
    with (cli.directory / "out.csv").open(newline="") as file:
        header, *rest = csv.reader(file)
    assert header == ["text", "label", "predicted_label", "predicted_probability"]
    assert len(rest) == len(labelled.json["predictions"]) == 6
    right = sum(row[1] == row[2] for row in rest)
    assert labelled.json["accuracy"] == right / 6
    assert f"accuracy {right / 6:.4f} on 6 rows with a label in column 'label'" in labelled.err
    again = cli("predict", model, "--csv", "out.csv", "--json")
    assert again.json["accuracy"] == right / 6
    assert "no column named 'text'" in cli("predict", model, "--csv", "in.csv").error
    refused = cli("predict", model, "--csv", "out.csv", "--out", cli.directory / "out.csv")
    assert (refused.code, "it is the file of --csv; name another" in refused.error) == (2, True)


@pytest.mark.parametrize(
    ("terminal", "text"), [(True, "a\\x1b[2Jb c d\n"), (False, "a\x1b[2Jb c d\n")]
)
def test_a_prediction_is_one_line_and_no_command_to_a_terminal(
    terminal: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    with contextlib.redirect_stdout(out):
        one = Prediction("a\x1b[2Jb\r\nc\td", "x\ty", 0.5, 1, False, (("x\ty", 0.5),))
        training._print_prediction(one)
    assert out.getvalue() == f"x y\t0.5000\t{text}"


def test_an_error_of_out_names_the_path_of_the_user(tmp_path: Path) -> None:
    table, one = Table(("text",), [["a"]], []), Prediction("a", "x", 0.5, 1)
    out = tmp_path / "gone" / "out.csv"
    with pytest.raises(FileNotFoundError) as caught:
        predict.write_csv(table, [one], out)
    assert caught.value.filename == str(out)


def test_model_in_numbers(trained: tuple[Path, Result]) -> None:
    metrics = json.loads((trained[0] / "model" / "metrics.json").read_text())
    assert metrics["validation_accuracy"] == trained[1].json["validation_accuracy"]


def endless(cli: Cli, job_name: str, out: str = "model-1", **env: str) -> Running:
    """An endless training, once gradients are applied and it has mapped the weights."""
    write_csv(cli.directory / "data.csv", ROWS)
    words = ["train", "data.csv", "--epochs", "100000", "--job", job_name]
    training = cli.start(*words, "--out", out, **env)
    support.eventually(
        lambda: (
            training.process.poll() is not None
            or (
                is_running(job_name)
                and support.status(job_name)["version"] > 0
                and f"{job_name}.weights" in Path(f"/proc/{training.process.pid}/maps").read_text()
            )
        )
    )
    return training


def test_options_of_the_cnn_are_refused_without_it(cli: Cli) -> None:
    refused = cli("train", "data.csv", "--lr", 0.1)
    assert (refused.code, "--lr is for --model cnn" in refused.error) == (2, True)


def test_interrupted(cli: Cli, job_name: str) -> None:
    """Replace killed learners, and those of a killed loaded process; keep the best model."""
    training = endless(cli, job_name)
    loaded = psutil.Process(support.status(job_name)["learners"][0]["pid"]).ppid()
    assert loaded != training.process.pid
    gone: set[int] = set()

    def joined() -> set[int]:
        return {one["pid"] for one in support.status(job_name)["learners"]} - gone

    for whole in (False, True):
        support.eventually(lambda: len(joined()) == 2)
        pids = joined()
        killed = pids if whole else {min(pids)}
        os.kill(loaded if whole else min(pids), signal.SIGKILL)
        gone |= killed
    support.eventually(lambda: len(joined()) == 2)
    assert all(f"(pid {one}) was killed by" in training.err for one in gone)
    result = training.signal(signal.SIGINT)
    assert result.code == 128 + signal.SIGINT, result
    assert "SIGINT: the best weights so far are kept" in result.err
    assert "gadei-ps predict model-1" in result.out
    metrics = json.loads((cli.directory / "model-1" / "metrics.json").read_text())
    assert (metrics["interrupted"], metrics["finished"]) == ("SIGINT", False)
    assert metrics["best_epoch"] > 0
    assert metrics["planned_epochs"] == 200_000
    last = cli("history", job_name, "--last", 1, "--json").json["lines"][0]
    assert last["ended"] == "stopped"
    assert cli("predict", "model-1", "an invoice").code == 0


def test_stopped(cli: Cli, job_name: str) -> None:
    """Suspend, and stop from another process: the model is written."""
    training = endless(cli, job_name)
    pids = [one["pid"] for one in support.status(job_name)["learners"]]
    training.process.send_signal(signal.SIGTSTP)  # as by Ctrl-Z
    support.eventually(lambda: all(map(process.is_suspended, pids)))
    training.process.send_signal(signal.SIGCONT)
    support.eventually(lambda: not any(map(process.is_suspended, pids)))
    cli("stop", job_name)
    result = training.wait()
    assert result.code == 4, result
    assert "the job was stopped: the best weights so far are kept" in result.err
    assert cli("predict", "model-1", "an invoice").code == 0


def test_a_full_disk(cli: Cli, job_name: str) -> None:
    """Training continues, and the model goes elsewhere; if that is full, to memory."""
    with small_disk(cli.directory / "full", "16k") as full:
        (full / "other").write_bytes(bytes(8192))
        training = endless(cli, job_name, out="full/model")
        support.eventually(lambda: "training continues" in training.err)
        ended = training.signal(signal.SIGINT)
        assert ended.code == 1, ended
        kept = cli.directory / "state" / f"{job_name}.model"
        assert ended.err.splitlines()[-1].endswith(f"is in {kept}")
        assert cli("predict", kept, "an invoice").code == 0
        assert not support.segments(job_name)

        (full / "state").mkdir()
        training = endless(cli, job_name, out="full/model", GADEI_PS_STATE_DIR=str(full / "state"))
        support.eventually(lambda: "training continues" in training.err)
        ended = training.signal(signal.SIGINT)
        kept = Path(os.environ["GADEI_PS_RUNTIME_DIR"], f"{job_name}.model")
        assert ended.err.splitlines()[-1].endswith(f"is in {kept}")
        assert cli("predict", kept, "an invoice").code == 0


def test_a_learner_that_comes_too_late_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training may end while a learner still loads PyTorch."""
    settings = {
        "model": "cnn",
        "threads": torch.get_num_threads(),
        "sizes": {"vocabulary_size": 10, "classes": 2},
        "seed": 1,
        "wire": "float32",
        "error_feedback": False,
        "device": "host",
    }
    np.savez(
        tmp_path / "data.npz",
        tokens=np.zeros(1, np.int32),
        lengths=np.ones(1, np.int32),
        labels=np.zeros(1, np.int64),
        settings=json.dumps(settings),
    )
    monkeypatch.setenv("GADEI_PS_JOB", str(tmp_path / "ended.sock"))
    monkeypatch.setattr("sys.argv", ["learner", str(tmp_path / "data.npz")])
    learner.main()
    assert capsys.readouterr() == ("", "")


def test_launcher_killed(cli: Cli, job_name: str) -> None:
    """`nothing_left` checks that daemon and learners end; best model and last weights stay."""
    temporary = cli.directory / "tmp"
    temporary.mkdir()
    training = endless(cli, job_name, TMPDIR=str(temporary))
    support.eventually((cli.directory / "model-1" / "config.json").exists)
    assert training.signal(signal.SIGKILL).code == -signal.SIGKILL
    assert cli("predict", "model-1", "an invoice").code == 0
    support.eventually(lambda: cli("export", job_name, "w.npz").code == 0)
    assert not list(temporary.glob("gadei-ps*"))
    support.eventually(lambda: not is_running(job_name))
    refused = cli("train", "data.csv", "--job", job_name)
    assert (refused.code, "stays in memory" in refused.err) == (1, True), refused
    support.eventually(lambda: cli("gc", job_name) and not support.segments(job_name))
