"""Errors are one line with an exit code, and leave nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch  # noqa: F401 - forks, which run train, have it then
from shell import Cli
from support import segments

from gadei_ps import sync
from gadei_ps.cli import exits, options
from gadei_ps.job.config import OptimizerConfig
from gadei_ps.learners import devices
from gadei_ps.memory.layout import WireType

ROWS = "text,label\n" + "".join(f"sentence {i},{'ab'[i % 2]}\n" for i in range(20))


def test_import_is_quick() -> None:
    """Check the command line, and what commands that only query a job import besides."""
    heavy = {
        "gadei_ps.cli.app": {"torch", "numba", "numpy", "pydantic", "psutil"},
        "gadei_ps.classifier.predict": {"torch", "numba"},
        "gadei_ps.commands.jobs": {"torch", "numba", "structlog", "asyncio"},
    }
    code = "import sys"
    for module, names in heavy.items():
        code += f"; import {module}; assert not {names} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_choices_are_those_of_the_job_file() -> None:
    kinds, nothing = get_args(OptimizerConfig.model_fields["kind"].annotation)
    assert nothing is type(None)
    assert set(options.OptimizerName) == set(get_args(kinds))
    assert {one.upper() for one in options.Wire} == set(WireType.__members__)
    assert tuple(options.DeviceName) == devices.NAMES


def test_the_help_of_sync_names_every_model() -> None:
    forms = re.split(r", | or ", options.MODELS.partition(";")[0])
    models = [sync.parse(re.sub(r"\b[A-Z]\b(?!=)", "1", form)) for form in forms]
    assert {model.name for model in models} == set(sync.names())


def test_help_and_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("gadei-ps ")
    assert "Usage" in cli("run", "--help").out
    alone = cli()
    assert alone.code == 0
    assert "doctor" in alone.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "No such command"),
        ("train", "Missing argument"),
        ("train x.csv --optimizer newton", "'newton' is not one of 'sgd', 'momentum'"),
        ("train x.csv --learners many", "--learners"),
        ("train x.csv --sync chaos", "--sync: unknown model 'chaos'; the models are asp"),
        ("train x.csv --model cnn --sync ssp:-1", "--sync: ssp: s must be a whole number"),
        ("run demo --learners 0 -- true", "--learners"),
        ("run demo --learners 2", "COMMAND"),
        ("run demo --lr -1 -- true", "job demo: optimizer: lr must be at least 0"),
        ("run demo --sync chaos -- true", "job demo: sync: unknown model 'chaos'"),
        ("run demo --device tpu -- true", "'tpu' is not one of 'auto', 'cuda', 'host'"),
        ("run demo --gpus x -- true", "--gpus 'x': give numbers of GPUs, as in --gpus 0,1"),
        ("run demo --gpus 0,-1 -- true", "--gpus '0,-1': give numbers of GPUs"),
        ("run demo --gpus 0 --device host -- true", "--gpus needs --device cuda or auto"),
        ("train x.csv --gpus , --json", "--gpus ',': give numbers of GPUs"),
        ("train x.csv --gpus 0 --device host", "--gpus needs --device cuda or auto"),
        ("run demo -- no-such-program", "no program 'no-such-program'"),
        ("run two.words -- true", "job name 'two.words': use 1 to 48 letters"),
        ("run ./gone.toml -- true", "gone.toml: No such file or directory; check the path"),
        ("serve gone.toml", "gone.toml: No such file or directory; check the path"),
        ("serve .", "it is a directory"),
        ("serve demo", "demo: No such file or directory; give the job file, such as demo.toml"),
        ("reload exp1", "such as exp1.toml, not the name of a job"),
        ("restore {}", "job name ''"),  # of a variable that is not set, not this directory
        ("export {} x.npz", "job name ''"),
        ("my_train.py --lr 1", "start learners: gadei-ps run NAME -- python my_train.py --lr 1"),
        ("python train.py", "is not a command; to start learners: gadei-ps run NAME -- python tr"),
        (
            "kill demo --learner",
            "'--learner' requires an argument; see gadei-ps kill --help",
        ),
        ("group status --adress x", "see gadei-ps group status --help"),
        ("set demo --lr 0.02", "cannot read '--lr'; write FIELD=VALUE, as lr=0.01"),
        ("set demo --lr=0.02", "cannot read '--lr=0.02'; write FIELD=VALUE, as lr=0.01"),
        ("status --watch --json", "give only one of --watch, --json"),
        ("predict model --out x.csv", "--out needs --csv"),
        ("predict model --csv x.csv text", "not both"),
        ("predict model --threshold 0.5 text", "--threshold needs --none"),
        (
            "predict model --none --threshold 1.5 text",
            "--threshold must be from 0 to 1, not 1.5",
        ),
        ("train {}", "Invalid value for 'FILE.csv': the path is empty"),
        ("train x.csv --out {}", "Invalid value for '--out': the path is empty"),
        ("run demo --log-dir {} -- true", "Invalid value for '--log-dir': the path is empty"),
        (
            "predict model --csv x.csv --out gone/x.csv",
            "--out gone/x.csv: there is no directory gone; create it first",
        ),
    ],
)
def test_usage(cli: Cli, arguments: str, message: str) -> None:
    result = cli(*(word.replace("{}", "") for word in arguments.split()))
    assert result.code == 2
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("gadei-ps: ")
    if "--json" in arguments:
        assert message in result.json["error"]
        assert result.json["kind"] == "UsageError"
    else:
        assert not result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plot gone", "is not running and has left no history"),
        ("plot empty.jsonl", "there is nothing to draw yet"),
        ("plot empty.jsonl --out x.png", "give a name that ends in .svg"),
        ("simulate bsp --learners 1 --plot x.svg", "--learners must be from 2"),
        ("simulate bsp --plot gone/x.svg", "there is no directory gone"),
        ("dashboard --listen nine", "not a valid HOST:PORT"),
        ("partition a:b --sample a:c --devices host:1 --svg x.png", "a name that ends in .svg"),
        ("runtime-model train gone.csv", "gone.csv"),
        ("train gone.csv --model cnn", "gone.csv"),
        ("run demo --out gone/x.pt -- true", "there is no directory gone"),
    ],
)
def test_mistakes_are_reported_before_missing_libraries(
    cli: Cli, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user would install a library only to read then that a file does not exist."""
    for library in ("matplotlib", "uvicorn"):
        monkeypatch.setitem(sys.modules, library, None)
    found = importlib.util.find_spec
    without_torch = lambda name: None if name == "torch" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without_torch)
    (cli.directory / "empty.jsonl").write_text("")
    assert message in cli(*arguments.split()).error


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("docs faq >&-", 0, ""),
        ("docs faq <&- >&- 2>&-", 0, ""),
        ("docs nopage 2>&-", 2, ""),
        ("docs faq --json > /dev/full", 1, "gadei-ps: No space left on device; free some space\n"),
    ],
)
def test_standard_streams_that_cannot_be_written(line: str, code: int, error: str) -> None:
    command = f"{sys.executable} -m gadei_ps {line}"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, error)


@pytest.mark.parametrize(
    "arguments", ["status", "stop", "attach --json", "status --json", "stop --json"]
)
def test_unknown_job(cli: Cli, job_name: str, arguments: str) -> None:
    command, *flags = arguments.split()
    result = cli(command, job_name, *flags, *(["--", "true"] if command == "attach" else []))
    assert result.code == 1
    assert f"no job '{job_name}' is running" in result.error
    if flags:
        assert result.json == {"error": result.error, "kind": "JobNotFound"}


@pytest.mark.parametrize(
    "arguments",
    [
        *("history", "plot", "export {} x.npz", "restore", "kill {} --server", "set {} lr=1"),
        *("trace", "checkpoint", "chaos", "run --join {} true"),
    ],
)
def test_the_exit_code_of_all_commands_without_the_job(
    cli: Cli, job_name: str, arguments: str
) -> None:
    words = arguments.format(job_name).split()
    result = cli(*words[:1], "--json", *(words[1:] or [job_name]))
    assert (result.code, result.json["kind"]) == (1, "JobNotFound"), result.error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimzer = 3", "optimzer: there is no such field: did you mean 'optimizer'?"),
        ("sinc = 'bsp'", "sinc: there is no such field: did you mean 'sync'?"),
        (
            "[optimizer]\nmomentun = 1",
            "momentun: there is no such field: did you mean 'momentum'?",
        ),
        ("[checkpoint]\nhue = 1", "checkpoint.hue: there is no such field"),
        ("slots = 0", "slots: Input should be greater than or equal to 1"),
        ("sync = 'ssp'", "sync: ssp: s is missing"),
        ("[optimizer]\nkind = 'newton'", "optimizer.kind: Input should be 'sgd'"),
        ("[optimizer]\nlr = nan", "optimizer: lr must be"),
        ("name = 'a b'", "job name 'a b'"),
        ("[checkpoint]\ndirectory = ''", "checkpoint.directory: the path is empty"),
        ("weights = ''", "weights: the path is empty"),
        ("[curves]\nwandb = ''", "curves.wandb: the path is empty"),
        ("[learners]\ncommand = ['']", "the program's name is empty"),
        ("shards = 1\nslots = ", "job.toml:2: Invalid value; correct it"),
        ("[[tensors]]\nname = 'w'\nshape = [-1]", "shape"),
    ],
)
def test_job_file(cli: Cli, text: str, message: str) -> None:
    (cli.directory / "job.toml").write_text(text)
    result = cli("serve", "job.toml")
    assert result.code == 2
    assert message in result.error


def test_job_file_of_another_name(cli: Cli) -> None:
    (cli.directory / "mine.toml").write_text("name = 'yours'")
    result = cli("serve", "--name", "mine", "mine.toml")
    assert result.code == 2
    assert "mine.toml is the file of job 'yours', not of job 'mine'" in result.error


@pytest.mark.parametrize(
    ("place", "why"),
    [("job.toml/kept", "Not a directory"), ("job.toml", "Not a directory"), ("/proc/x", "")],
)
def test_checkpoints_that_cannot_be_written(
    place: str, why: str, cli: Cli, job_name: str, compiled: None
) -> None:
    """Said at the start, and not when the first one is made; and no unit starts it again."""
    text = f"name = '{job_name}'\n[checkpoint]\ndirectory = '{place}'\n"
    (cli.directory / "job.toml").write_text(text)
    result = cli("serve", "job.toml")
    assert result.code == 2
    assert f"{place}: cannot be written" in result.error
    assert why in result.error
    assert not segments(job_name)


def test_job_file_that_is_not_text(cli: Cli) -> None:
    (cli.directory / "job.toml").write_bytes(b"name = '\xff'")
    assert cli("serve", "job.toml").error == "job.toml:1: not UTF-8 text; give a TOML file"


@pytest.mark.parametrize("command", ["serve {} --json", "run {} --json -- true"])
def test_model_larger_than_memory(cli: Cli, job_name: str, compiled: None, command: str) -> None:
    free = os.statvfs("/dev/shm")
    values = free.f_blocks * free.f_frsize
    tensor = f"[[tensors]]\nname = 'w'\nshape = [{values}]\n"
    (cli.directory / "big.toml").write_text(f"name = '{job_name}'\n{tensor}")
    result = cli(*command.format("big.toml").split())
    assert result.code == 1
    assert result.json["kind"] == "NoSharedMemory"
    # Whatever has least: /dev/shm, the machine's memory, or a control group's limit.
    assert re.match(
        r"(/dev/shm|this machine's memory|the memory limit \S+) has ", result.json["error"]
    )
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "the file is empty"),
        (b"text,label\n", "there is a header but no row"),
        (ROWS.replace("label\n", "what,ever\n").encode(), "no column named 'label'"),
        (ROWS.replace(",b\n", ",a\n").encode(), "every row has the label 'a'"),
        (ROWS.replace("sentence 3", "sent\udcffence 3").encode(errors="surrogateescape"), "UTF-8"),
    ],
    ids=["missing", "empty", "no rows", "no column", "one label", "bad UTF-8"],
)
def test_training_file(cli: Cli, content: bytes | None, message: str) -> None:
    if content is not None:
        (cli.directory / "data.csv").write_bytes(content)
    result = cli("train", "data.csv", "--json")
    assert result.code == 2
    assert message in result.error
    assert result.json == {"error": result.error, "kind": "DatasetError"}
    assert not (cli.directory / "model").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model cnn --lr -1", "lr must be at least 0"),
        ("--lr 1", "--lr is for --model cnn"),
        ("--sync chaos", "unknown model 'chaos'"),
        ("--job a/b", "--job: job name 'a/b': use 1 to 48 letters"),
        ("--out {directory}/data.csv", "cannot be used (Not a directory)"),
    ],
)
def test_training_options(cli: Cli, arguments: str, message: str) -> None:
    (cli.directory / "data.csv").write_text(ROWS)
    result = cli("train", "data.csv", *arguments.format(directory=cli.directory).split())
    assert message in result.error


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write everything")
def test_no_permission(cli: Cli, job_name: str) -> None:
    cli.directory.chmod(0o500)
    assert "Permission denied" in cli("ls", GADEI_PS_RUNTIME_DIR=str(cli.directory / "rt")).error


def test_too_few_files(job_name: str, compiled: None) -> None:
    """The watchdog would serve nobody, and the command would wait for it as long as it may."""
    command = ("prlimit", "--nofile=48", sys.executable, "-m", "gadei_ps")
    found = subprocess.run(
        [*command, "run", job_name, "--", "true"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert "the watchdog may open 48 files, and needs 64" in found.stderr
    assert "Traceback" not in found.stderr
    assert not segments(job_name)


def test_runtime_directory_of_others(cli: Cli, job_name: str) -> None:
    cli.directory.chmod(0o777)
    result = cli("status", job_name, "--json", GADEI_PS_RUNTIME_DIR=str(cli.directory))
    assert result.code == 2
    assert "not a directory that only you may write" in result.json["error"]


def test_model_directory_without_a_model(cli: Cli) -> None:
    result = cli("predict", cli.directory, "hello", "--json")
    assert result.code == 2
    assert "missing or damaged" in result.json["error"]
    missing = cli("predict", "none", "hello")
    assert (missing.code, "no such directory" in missing.error) == (2, True)
    assert missing.error.endswith("give a directory that gadei-ps train has written")


def test_traceback_on_request(cli: Cli, job_name: str) -> None:
    result = cli("status", job_name, GADEI_PS_TRACEBACK="1")
    assert result.code == 1
    assert "Traceback" in result.err


def test_nobody_reads_the_output(cli: Cli) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "gadei_ps", "ls", "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == 1
    assert not done.stderr


def test_bug_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits._report(ValueError("two\nlines"), "gadei-ps", as_json=True) == 1
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert json.loads(captured.out)["kind"] == "ValueError"


def test_module_runs_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "gadei_ps", "--version"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


def test_an_error_is_the_last_object_of_a_json_log(cli: Cli) -> None:
    for arguments, code in ((("serve", "nowhere.toml"), 2), (("serve", "--fast", "x.toml"), 2)):
        result = cli(*arguments, "--json-log")
        assert result.code == code
        event = json.loads(result.err)
        assert (event["level"], event["kind"], event["exit_code"]) == (
            "critical",
            "UsageError",
            code,
        )
        assert "nowhere.toml" in event["event"] or "--fast" in event["event"]


def test_a_terminal_takes_no_name_for_commands(cli: Cli) -> None:
    assert cli("serve", "a\x1b[2Jb.toml").error.startswith("a\\x1b[2Jb.toml: ")
