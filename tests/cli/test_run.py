"""`run` and `attach`: learners that the user writes."""

from __future__ import annotations

import fcntl
import math
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import support
from shell import FOREVER, Cli, is_running, learning
from support.small_disk import small_disk
from support.terminal import Terminal

from gadei_ps.cli.app import command_tree
from gadei_ps.cli.switches import separated
from gadei_ps.commands import jobs, run
from gadei_ps.errors import UsageError
from gadei_ps.job import paths, recorded
from gadei_ps.machine import gpus, process
from gadei_ps.watchdog.restart import Policy

pytestmark = pytest.mark.usefixtures("compiled")
# In what a command prints when it has seen the job's model, and holds weights that outlive the job.
HOLDS = "; sync "


def test_job_for_as_long_as_its_learners(
    cli: Cli, job_name: str, learner: list[str], interpreters: None
) -> None:
    flags = "--learners 2 --lr 0.5 --optimizer momentum --sync ssp:2 --log-dir logs --json"
    result = cli("run", job_name, *flags.split(), "--", *learner, 5)
    assert result.code == 0, result
    summary = result.json
    assert summary["job"] == job_name
    assert summary["gradients_applied"] == 50
    assert summary["samples"] == 200
    assert [one["exit_code"] for one in summary["ended"]] == [0, 0]
    for index in range(2):
        printed = (cli.directory / "logs" / f"learner-{index}.log").read_text()
        assert printed.startswith("done ")
        assert f"[{index}] {printed}" in result.err, "it is not on stdout with --json"
    text = "optimizer momentum, lr 0.5, momentum 0.9 (from the job; momentum by default); sync ssp:"
    assert result.err.count(text) == 1, result.err
    assert not is_running(job_name)


SLOW_END = """
import os, pathlib, signal, time
import numpy as np
from gadei_ps.learners.client import Client

def save(*_):
    time.sleep(0.2)
    pathlib.Path(f"saved.{os.environ['GADEI_PS_LEARNER']}").touch()
    raise SystemExit

for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, save)
with Client(tensors={"w": np.zeros(8)}) as client:
    while True:
        client.push({"w": np.ones(8)})
        time.sleep(0.001)
"""


@pytest.mark.parametrize(
    "words",
    [
        "run demo --lr 2 -- python train.py --lr 3 -- --out w.npz",
        "run --lr=2 demo -- python train.py --lr 3",
        "run --quiet demo --lr 2 -- python -u -m train --json",
        "attach demo -- python train.py --device cuda",
        "group run groups.toml --quiet -- python train.py --quiet",
        "run python --lr 2 -- true",
        "run '' -- true",
    ],
)
def test_all_words_after_the_program_belong_to_it(words: str) -> None:
    given = shlex.split(words)
    command = command_tree()
    assert separated(command, given) == given
    without = shlex.split(words.replace(" -- ", " ", 1))
    assert separated(command, without) == given


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("run --learners 2 -- python train.py", "run NAME --learners 2 -- python train.py"),
        ("run -- python -m train", "run NAME -- python -m train"),
        ("run python train.py --lr 1", "run NAME -- python train.py --lr 1"),
        ("run --lr 1 python -m train", "run NAME --lr 1 -- python -m train"),
        ("run --lr 1 train.py", "run NAME --lr 1 -- python train.py"),
        ("attach -- python train.py", "attach NAME -- python train.py"),
        ("group run -- python train.py", "group run GROUPS.toml -- python train.py"),
    ],
)
def test_a_forgotten_name_of_the_job(words: str, advice: str) -> None:
    what = "file of the groups" if words.startswith("group") else "name of the job"
    with pytest.raises(UsageError) as raised:
        separated(command_tree(), words.split())
    assert str(raised.value) == f"the {what} is missing: gadei-ps {advice}"


@pytest.mark.parametrize("reader", ["terminal", "tee"])
def test_a_closed_terminal_and_a_reader_that_has_ended(
    cli: Cli, job_name: str, learner: list[str], reader: str
) -> None:
    """Every print of the launcher fails, and all continues as with the signal alone."""
    (cli.directory / "learner.py").write_text(SLOW_END)
    options = ["--learners", "2", "--out", "w.npz"]
    words = [sys.executable, "-m", "gadei_ps", "run", job_name, *options, "--", *learner]
    tee = f"{{ trap : INT; {shlex.join(words)}; echo $? > code; }} 2>&1 | tee log"
    line = tee if reader == "tee" else f"exec {shlex.join(words)}"
    with Terminal(cli.directory, line) as terminal:
        support.eventually(learning(job_name, terminal, 2))
        terminal.interrupt() if reader == "tee" else terminal.close()
        code = terminal.wait()
    if reader == "tee":
        support.eventually((cli.directory / "code").exists)
        code = int((cli.directory / "code").read_text())
    assert code == 128 + (signal.SIGINT if reader == "tee" else signal.SIGHUP)
    for index in range(2):
        assert (cli.directory / f"saved.{index}").exists(), "it had the time to save"
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].max() < 0


def test_job_file_with_a_flag(cli: Cli, job_name: str, learner: list[str]) -> None:
    (cli.directory / "job.toml").write_text(
        f'name = "{job_name}"\nslots = 3\nshards = 3\n[optimizer]\nkind = "adam"\nlr = 0.1\n'
    )
    flags = ("--lr", "0.2", "--shards", "2")
    running = cli.start("run", "job.toml", *flags, "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 1))
    config = recorded.read(job_name)
    assert config is not None
    assert (config.slots, config.shards, config.optimizer.lr) == (3, 2, 0.2)
    status = cli("status", job_name, "--json").json
    assert (status["optimizer"], len(status["learners"])) == ("adam", 1)
    assert running.signal(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert not is_running(job_name)


def test_a_job_that_goes_on_from_a_checkpoint(cli: Cli, job_name: str, learner: list[str]) -> None:
    """Check that its work is done, and that what was done before does not count."""
    (cli.directory / "job.toml").write_text(
        f'name = "{job_name}"\n[checkpoint]\ndirectory = "{cli.directory}/kept"\n'
    )
    for gradients, how in ((50, ()), (0, ()), (50, ("--fresh",))):
        ran = cli("run", "job.toml", "--json", *how, "--", *learner, 5)
        assert (ran.code, ran.json["gradients_applied"]) == (0, gradients), ran


def test_learners_of_a_running_job(cli: Cli, job_name: str, learner: list[str]) -> None:
    cli.serve(job_name)
    options = ("--lr", "0.1", "--shards", "2", "--fresh")
    refused = cli("run", job_name, *options, "--", *learner, 5)
    assert refused.code == 2
    assert "--lr, --shards, --fresh: job" in refused.error
    assert "is running and has its configuration" in refused.error
    result = cli("run", job_name, "--json", "--", *learner, 5)
    assert (result.code, result.json["gradients_applied"]) == (0, 50)
    status = support.status(job_name)
    assert status["gradients_applied"] == 50, "the job continues"
    assert not status["learners"]


def test_attach(cli: Cli, job_name: str, learner: list[str]) -> None:
    cli.serve(job_name)
    show = [sys.executable, "-c", "import os; print(os.environ['GADEI_PS_JOB'])"]
    assert cli("attach", job_name, "--", *show).out == (
        f"{os.environ['GADEI_PS_RUNTIME_DIR']}/{job_name}.sock\n"
    )
    assert cli("attach", job_name, "--", *show[:2], "raise SystemExit(7)").code == 7
    assert "no program" in cli("attach", job_name, "--", "no-such-program").error
    result = cli("attach", job_name, "--json", "--", *learner, 5)
    assert result.json["gradients_applied"] == 50


def test_the_others_go_on(cli: Cli, job_name: str, learner: list[str]) -> None:
    result = cli("run", job_name, "--learners", 2, "--restart", 0, "--json", "--", *learner, 30, 1)
    assert result.code == 0, result
    assert "learner 1" in result.err
    # On a busy machine the other learner may be done by then.
    assert re.search("was killed by SIGKILL; (1 left|none is left)", result.err)
    assert result.json["samples"] == 1200, "every sample of every epoch"
    assert [one["exit_code"] for one in result.json["ended"]] == [0, -signal.SIGKILL]


def test_killed_learners_are_started_again(cli: Cli, job_name: str, learner: list[str]) -> None:
    """Check that the weights survive the loss of all learners, for the next `run`."""
    command = ("run", job_name, "--lr", 1, "--json")
    lost = cli(*command, "--restart", 2, "--", *learner, 5, "0")
    assert (lost.code, lost.json["restarts"], lost.json["gradients_applied"]) == (1, 2, 9), lost
    assert "none is left" in lost.err
    assert (lost.json["kept_in"], lost.json["kept_version"]) == ("memory", 9)
    *_, last = lost.err.splitlines()
    assert last.startswith(f"gadei-ps: job {job_name} stays in memory at version 9: ")
    assert f"gadei-ps export {job_name} {job_name}.safetensors writes its weights" in last
    assert cli("export", job_name, "w.npz").code == 0
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == [9.0] * 8
    refused = cli("run", job_name, "--lr", 2, "--", *learner, 5)
    assert refused.code == 2, refused
    assert "with another optimizer: start it with" in refused.err
    assert "--sync bsp: job" in cli(*command, "--sync", "bsp", "--", *learner, 5).err
    more = cli(*command, "--out", "w.npz", "--", *learner, 5)
    assert (more.code, more.json["gradients_applied"]) == (0, 41), more
    assert f"job '{job_name}' continues at version 9; --fresh" in more.err
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == [50.0] * 8
    assert not support.segments(job_name)


DIES = """
import os, pathlib, signal, sys
import numpy as np
from gadei_ps.learners.client import Client

lives = pathlib.Path("lives")
lives.write_text((lives.read_text() if lives.exists() else "") + "x")
how = sys.argv[3]
if how == "idle":
    os.kill(os.getpid(), signal.SIGKILL)
with Client(tensors={"w": np.zeros(8)}) as client:
    client.push({"w": np.ones(8)})
    client.wait_applied()
    if len(lives.read_text()) <= int(sys.argv[1]):
        os.kill(os.getpid(), getattr(signal, how))
    while how == "SIGUSR1":
        signal.pause()
raise SystemExit(int(sys.argv[2]))
"""


def test_restarts_by_default(cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart until a learner is killed again and again; not after its own error or fault."""
    monkeypatch.setattr(run, "POLICY", Policy(limit=3, within_s=math.inf))  # commands are forks
    (cli.directory / "dies.py").write_text(DIES)
    command = ("run", job_name, "--fresh", "--json", "--", sys.executable, "dies.py")
    for useful_s, how, kills, code, restarts, kept in (
        (math.inf, "SIGKILL", 2, 0, 2, None),
        (math.inf, "SIGKILL", 9, 0, 2, 3),
        (math.inf, "SIGKILL", 1, 3, 1, 2),
        (0.0, "idle", 9, 0, 2, None),
        (0.0, "SIGABRT", 9, 0, 0, 1),
    ):
        monkeypatch.setattr(run, "USEFUL_S", useful_s)
        (cli.directory / "lives").unlink(missing_ok=True)
        ran = cli(*command, kills, code, how)
        lost = bool(code) or kills == 9
        assert (ran.code, ran.json["restarts"], ran.json["kept_version"]) == (
            int(lost),
            restarts,
            kept,
        ), ran
        assert ("; not restarted: 3 deaths in a row within" in ran.err) == (restarts == 2 and lost)
        assert ("; not restarted: a fault of the program" in ran.err) == (how == "SIGABRT")
    cli("gc", job_name)


def test_ctrl_c_after_restarts(cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier deaths are not the reason why the learner is not restarted then."""
    monkeypatch.setattr(run, "POLICY", Policy(limit=1, within_s=-1.0))
    (cli.directory / "dies.py").write_text(DIES)
    command = ("run", job_name, "--", sys.executable, "dies.py", 1, 0, "SIGUSR1")
    running = cli.start(*command)
    support.eventually(lambda: "by SIGUSR1; started again" in running.err)
    support.eventually(lambda: support.status(job_name)["version"] == 2)
    ended = running.signal(signal.SIGTERM)
    assert ended.code == 128 + signal.SIGTERM
    assert "was killed by SIGTERM; none is left" in ended.err


def test_a_full_disk(cli: Cli, job_name: str, learner: list[str]) -> None:
    """The job stays, so that its weights can be written elsewhere."""
    with small_disk(cli.directory / "full", "4k") as full:
        (full / "other").write_bytes(bytes(4096))
        command = ("run", job_name, "--lr", 1, "--out", "full/w.npz", "--", *learner)
        ended = cli(*command, 5)
        assert ended.code == 1, ended
        assert "full/w.npz is not written: " in ended.err
        assert "stays in memory at version 50" in ended.err.splitlines()[-1]
        assert cli("export", job_name, "w.npz").code == 0
        cli("gc", job_name)
        running = cli.start(*command, FOREVER)
        support.eventually(learning(job_name, running, 1))
        support.eventually(lambda: HOLDS in running.err)
        cli("stop", job_name)
        stopped = running.wait()
        assert f"the weights are in {cli.directory}/state/{job_name}.safetensors" in stopped.err
        running = cli.start(*command, FOREVER, GADEI_PS_STATE_DIR=str(full / "state"))
        support.eventually(learning(job_name, running, 1))
        support.eventually(lambda: HOLDS in running.err)
        cli("stop", job_name)
        rescued = Path(os.environ["GADEI_PS_RUNTIME_DIR"], f"{job_name}.safetensors")
        assert f"the weights are in {rescued}" in running.wait().err
        assert rescued.stat().st_size
    for path in ("w.npz", f"state/{job_name}.safetensors"):
        assert (cli.directory / path).stat().st_size


def test_failing_learner(cli: Cli, job_name: str, learner: list[str]) -> None:
    result = cli("run", job_name, "--", sys.executable, "-c", "raise SystemExit(3)")
    assert result.code == 1
    assert "ended with exit code 3" in result.err
    assert "0 gradients applied" in result.err
    assert gpus.has_driver() or "compute on the host" not in result.err


FAILS_EARLY = """
import os, signal
import numpy as np
from gadei_ps.learners.client import Client

index = int(os.environ["GADEI_PS_LEARNER"])
if index == 0:
    raise SystemExit("no data")
with Client(tensors={"w": np.zeros(8)}) as client:
    client.push({"w": np.ones(8)})
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    client.wait_applied()
"""


def test_learners_that_fail_before_all_have_come_are_not_awaited(cli: Cli, job_name: str) -> None:
    """Neither the one that was to make the model, nor one whose gradient waits for all."""
    (cli.directory / "early.py").write_text(FAILS_EARLY)
    (cli.directory / "job.toml").write_text(
        f'name = "{job_name}"\nsync = "bsp"\nlearner_timeout_s = 0\n'
    )
    how = ("--learners", 3, "--restart", 0, "--json")
    ran = cli("run", "job.toml", *how, "--", sys.executable, "early.py")
    assert ran.code == 1, ran
    assert [one["exit_code"] for one in ran.json["ended"]] == [1, -signal.SIGKILL, 0]
    assert ran.json["gradients_applied"] == ran.json["kept_version"] == 2
    cli("gc", job_name)


def test_a_script_saves_at_ctrl_c(cli: Cli, job_name: str, learner: list[str]) -> None:
    """Press Ctrl-C as in a terminal: KeyboardInterrupt in the script, also below a shell."""
    script = Path(learner[1])
    forever = "client.push({'w': -np.ones(8)}); (here / f'begun.{index}').touch()"
    text = script.read_text().partition("    while learners.isdigit()")[0]
    script.write_text(f"""{text}
    try:
        while True:
            {forever}
    except KeyboardInterrupt:
        (here / f"saved.{{index}}").write_text(str(client.published))
""")
    shell = ["sh", "-c", f"{shlex.join(learner)} 1; exit 0"]
    begin = ("run", job_name, "--lr", "1", "--learners", 2, "--out", "w.npz", "--json")
    running = cli.start(*begin, "--", *shell)
    # Each is in its loop: Ctrl-C before that ends it without a word, as any other script.
    support.eventually(lambda: len(list(script.parent.glob("begun.*"))) == 2)
    result = running.signal(signal.SIGINT)
    assert result.code == result.json["exit_code"] == 128 + signal.SIGINT, result
    assert result.json["interrupted"] == "SIGINT"
    assert "SIGINT: the learners have 30 s to end" in result.err
    assert "Traceback" not in result.err
    saved = [int((script.parent / f"saved.{index}").read_text()) for index in range(2)]
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == [float(sum(saved))] * 8, "each gradient adds 1"
    assert not support.segments(job_name)


DEAF = """
import signal, time
import numpy as np
from gadei_ps.learners.client import Client

for number in (1, 2, 15):
    signal.signal(number, signal.SIG_IGN)
client = Client(tensors={"w": np.zeros(8)})
client.push({"w": np.ones(8)})
client.wait_applied()
open("deaf", "w").close()
time.sleep(1e6)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_asked_twice(cli: Cli, job_name: str, number: int) -> None:
    """The learners are not notified, and need not be waited for; the weights are written."""
    running = cli.start("run", job_name, "--out", "w.npz", "--", sys.executable, "-c", DEAF)
    support.eventually((cli.directory / "deaf").exists)
    running.process.send_signal(number)
    support.eventually(lambda: "once more ends them at once" in running.err)
    result = running.signal(number)
    assert result.code == 128 + number
    assert "Traceback" not in result.err
    assert "; weights in w.npz" in result.err
    assert (cli.directory / "w.npz").exists()
    assert not support.segments(job_name)
    assert not is_running(job_name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_weights_that_nobody_has_asked_for(cli: Cli, job_name: str, number: int) -> None:
    """They stay after the end of a terminal, and not after Ctrl-C."""
    deaf = DEAF.replace("(1, 2, 15)", "()")
    running = cli.start("run", job_name, "--", sys.executable, "-c", deaf)
    support.eventually((cli.directory / "deaf").exists)
    result = running.signal(number)
    assert result.code == 128 + number
    stays = number == signal.SIGHUP
    assert ("stays in memory at version 1" in result.err) == stays
    assert bool(support.segments(job_name)) == stays
    cli("gc", job_name)


def test_the_weights_of_a_job_that_run_has_made(
    cli: Cli, job_name: str, learner: list[str]
) -> None:
    for out, what in (
        ("w.bin", "name a file that ends in .safetensors"),
        ("nowhere/w.npz", "there is no directory nowhere"),
    ):
        refused = cli("run", job_name, "--out", out, "--", *learner, 5)
        assert (refused.code, what in refused.error) == (2, True), refused
    result = cli("run", job_name, "--lr", "1", "--out", "w.npz", "--", *learner, 5)
    assert result.code == 0, result
    assert "; weights in w.npz" in result.err
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == [50.0] * 8
    cli.serve(job_name)
    cli("run", job_name, "--out", "w.npz", "--", *learner, 5)
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == pytest.approx([0.5] * 8), "of another's job"


def test_launcher_killed(cli: Cli, job_name: str, learner: list[str]) -> None:
    """The kernel signals its children, `nothing_left` checks that they end; the weights stay."""
    running = cli.start("run", job_name, "--learners", 2, "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 2))
    assert running.signal(signal.SIGKILL).code == -signal.SIGKILL
    again = cli.start("run", job_name, "--json", "--out", "w.npz", "--", *learner, FOREVER)
    support.eventually(
        lambda: f"job '{job_name}' continues at version" in again.err, what=lambda: again.err
    )
    support.eventually(learning(job_name, again, 1))
    assert again.signal(signal.SIGTERM).code == 128 + signal.SIGTERM
    assert (cli.directory / "w.npz").exists()
    assert not support.segments(job_name)


def test_it_says_that_it_waits_for_another_watchdog(
    cli: Cli, job_name: str, learner: list[str]
) -> None:
    """One that starts, or ends, has its lock and does not answer."""
    path = paths.lock_path(job_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = paths.open_lock(path, create=True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        running = cli.start("run", job_name, "--", *learner, 1)
        text = f"waiting up to 20 s: job '{job_name}' is starting or ending"
        support.eventually(lambda: text in running.err, what=lambda: running.err)
    finally:
        os.close(fd)
    assert running.wait().code == 0
    assert running.err.count("waiting") == 1


@pytest.mark.parametrize("drain", [(), ("--drain",)])
def test_job_stopped_meanwhile(
    cli: Cli, job_name: str, learner: list[str], drain: tuple[str, ...]
) -> None:
    how = ("--learners", 2, "--lr", 1, "--out", "w.npz", "--json")
    running = cli.start("run", job_name, *how, "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 2))
    support.eventually(lambda: HOLDS in running.err)
    report = cli("stop", job_name, *drain, "--json").json
    assert not support.segments(job_name), "the next job of this name is a new one"
    result = running.wait()
    assert result.code == 0, result
    with np.load(cli.directory / "w.npz") as weights:
        assert weights["w"].tolist() == [float(report["gradients_applied"])] * 8
    assert report["gradients_applied"] == result.json["gradients_applied"] > 0
    assert report["samples"] == result.json["samples"]


@pytest.mark.parametrize("drain", [(), ("--drain",)])
def test_job_stopped_before_its_learners_have_joined(
    cli: Cli, job_name: str, drain: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not learn of the stop, and are not waited for without end."""
    monkeypatch.setattr("gadei_ps.commands.run.GRACE_S", 0.5)
    sleeps = (sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(1000)")
    running = cli.start("run", job_name, "--", *sleeps)
    support.eventually(lambda: "begun" in running.out)
    assert cli("stop", job_name, *drain).code == 0
    result = running.wait()
    assert "1 learner did not end in time: ended" in result.err
    assert result.code == 1


@pytest.mark.parametrize("drain", [(), ("--drain",)])
def test_anothers_job_stopped_meanwhile(
    cli: Cli, job_name: str, learner: list[str], drain: tuple[str, ...]
) -> None:
    """It has an exit code of its own, even if all learners end well."""
    cli.serve(job_name)
    running = cli.start("run", job_name, "--json", "--out", "w.npz", "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 1))
    support.eventually(lambda: HOLDS in running.err)
    cli("stop", job_name, *drain)
    result = running.wait()
    assert result.code == result.json["exit_code"] == 4, result
    assert (cli.directory / "w.npz").exists()


def test_anothers_job_that_ends_with_its_learners(
    cli: Cli, job_name: str, learner: list[str]
) -> None:
    daemon = cli.serve(job_name, 'when_idle = "stop"\n')
    assert cli("run", job_name, "--json", "--", *learner, 5).code == 0
    assert daemon.wait().code == 0


@pytest.mark.parametrize("who", ["server_pid", "watchdog_pid"])
def test_killed_meanwhile(cli: Cli, job_name: str, learner: list[str], who: str) -> None:
    """Check that learners continue after a server's or watchdog's death; all gradients count."""
    running = cli.start("run", job_name, "--learners", 2, "--json", "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 2))
    support.eventually(lambda: support.status(job_name)["standby_pid"])
    before = support.status(job_name)
    os.kill(before[who], signal.SIGKILL)
    support.eventually(lambda: support.gone(before[who]))

    def goes_on() -> bool:
        if not is_running(job_name):
            return False
        now = support.status(job_name)
        # Gradients are also applied after the look, before the process dies.
        return now[who] != before[who] and now["version"] > before["version"] + 9

    support.eventually(goes_on)
    report = support.status(job_name)
    assert {one["pid"] for one in report["learners"]} == {one["pid"] for one in before["learners"]}
    stopped = cli("stop", job_name, "--drain", "--json").json
    assert stopped["gradients_applied"] >= report["version"]
    assert running.wait().code == 0


def test_watchdog_of_anothers_job(
    cli: Cli, job_name: str, learner: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that learners that `run` starts in a running job outlive the watchdog of the job."""
    monkeypatch.setattr(jobs, "ANSWER_TIMEOUT_S", 1.0)  # also in the commands, which are forks
    daemon = cli.serve(job_name)
    running = cli.start("run", job_name, "--restart", 0, "--json", "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 1))
    (one,) = support.status(job_name)["learners"]
    daemon.process.send_signal(signal.SIGSTOP)
    support.eventually(lambda: "no watchdog answers" in running.err, what=lambda: running.err)
    assert daemon.signal(signal.SIGKILL).code == -signal.SIGKILL
    refused = cli("run", job_name, "--", *learner, 5).err.splitlines()
    assert "serve it again (gadei-ps serve JOB.toml)" in refused[-1], "it is not the job of `run`"
    daemon = cli.serve(job_name)
    assert support.learner(job_name, one["pid"])
    support.eventually(learning(job_name, running, 1))
    assert daemon.signal(signal.SIGKILL).code == -signal.SIGKILL
    os.kill(one["pid"], signal.SIGKILL)
    result = running.wait()
    assert result.code == 1, "all were lost"
    applied = cli("stop", job_name, "--json").json["gradients_applied"]
    assert result.json["gradients_applied"] == applied > 0


def test_name_in_use(cli: Cli, job_name: str) -> None:
    cli.serve(job_name)
    (cli.directory / "again.toml").write_text(f'name = "{job_name}"')
    for command in (["serve", "again.toml"], ["run", "again.toml", "--", "true"]):
        result = cli(*command)
        assert result.code == 1
        assert f"job '{job_name}' is running already" in result.err.splitlines()[-1]
    assert is_running(job_name)


DIVERGED = """
import sys, pathlib, time, numpy as np
from gadei_ps.learners.client import Client

with Client(tensors={"w": np.zeros(10)}) as client:
    for _ in range(30):
        client.push({"w": np.full(10, np.nan)})
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.01)
"""


def test_divergence_is_told(cli: Cli, job_name: str) -> None:
    """Check the log, status and learner while the job runs, and at the end."""
    (cli.directory / "script.py").write_text(DIVERGED)
    go = cli.directory / "go"
    running = cli.start("run", job_name, "--", sys.executable, "script.py", go)
    support.eventually(lambda: "gradients are refused: the last one holds a NaN" in running.err)
    assert "a gradient that holds a NaN" in cli("status", job_name).out
    go.touch()
    ended = running.wait()
    assert ended.code == 1
    assert ended.err.count("the job refuses it") == 1
    assert "30 of 30 gradients were refused: most likely the model has diverged" in ended.err


PUSHES = """
import os, pathlib, sys, time, numpy as np
from gadei_ps.learners.client import Client

print(*(os.environ[f"GADEI_PS_LEARNER{s}"] for s in ("", "S")), os.environ["OMP_NUM_THREADS"])
with Client(tensors={"w": np.zeros(8)}) as client:
    while client.published < int(sys.argv[1]):
        client.push({"w": np.ones(8)})
        client.wait_applied()
        time.sleep(0.001)
"""


def test_learners_that_join_others(
    cli: Cli, job_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a number of its own and its share of the cores, and gradients are its command's."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (cli.directory / "pushes.py").write_text(PUSHES)
    program = ["--", sys.executable, "pushes.py"]
    assert cli("run", job_name, *program, 1).out == f"0 1 {process.cores()}\n"
    first = cli.start("run", job_name, "--learners", 2, "--json", *program, FOREVER)
    support.eventually(learning(job_name, first, 2))
    refused = cli("run", job_name, *program, 5)
    assert refused.code == 2
    assert f"with another program: '{sys.executable} pushes.py {FOREVER}' in" in refused.error
    attached = cli("attach", job_name, *program, 5)
    assert attached.out == "2 3 1\n"
    joined = cli("run", job_name, "--join", "--learners", 2, "--json", *program, 7)
    assert (joined.code, joined.json["gradients_applied"]) == (0, 14), joined
    assert [one["learner"] for one in joined.json["ended"]] == [2, 3]
    assert "[3] 3 4 1\n" in joined.err
    session = ("--", "setsid", "--wait", *program[1:], 7)
    joined = cli("run", job_name, "--join", "--json", *session)
    assert (joined.code, joined.json["gradients_applied"]) == (0, 7), joined
    again = cli.start("run", job_name, *program, FOREVER)
    support.eventually(lambda: len(support.status(job_name)["learners"]) == 3)
    assert "and has 2 learners: joining it; another name starts another job" in again.err
    again.signal(signal.SIGTERM)
    assert first.signal(signal.SIGINT).json["gradients_applied"] > 0
    assert "no job" in cli("run", job_name, "--join", *program, 1).error


def test_learners_that_never_join(cli: Cli, job_name: str) -> None:
    ended = cli("run", job_name, "--learners", 2, "--", sys.executable, "-c", "pass")
    assert ended.code == 1
    assert f"no learner joined job '{job_name}': does the script make a gadei_ps" in ended.err


STOPS = """
import os, pathlib, sys, time, numpy as np
from gadei_ps.learners.client import Client

with Client(tensors={"w": np.zeros(8)}) as client:
    while not pathlib.Path("end" if "leaves" in sys.argv else "go").exists():
        client.push({"w": -np.ones(8)})
        client.wait_applied()
        time.sleep(0.001)
    if sys.argv[1] == "stops" and os.environ["GADEI_PS_LEARNER"] == "0":
        client.stop_job("it is good enough")
    while sys.argv[1] == "stops" and os.environ["GADEI_PS_LEARNER"] != "0":
        client.push({"w": -np.ones(8)})
print("after the loop")
"""


def test_a_learner_that_stops_its_job(cli: Cli, job_name: str) -> None:
    """End learners in order: one without looking at `stopping`, and one that was attached."""
    (cli.directory / "stops.py").write_text(STOPS)
    program = ["--", sys.executable, "stops.py", "stops"]
    run = cli.start("run", job_name, "--learners", 2, "--out", "w.npz", "--json", *program)
    support.eventually(learning(job_name, run, 2))
    attached = cli.start("attach", job_name, *program)
    support.eventually(learning(job_name, run, 3))
    (cli.directory / "go").touch()
    ended, extra = run.wait(), attached.wait()
    line = f"ends: job '{job_name}' has ended: it is good enough\n"
    assert (ended.code, ended.json["exit_code"]) == (0, 0), ended
    assert "[0] after the loop" in ended.err
    assert f"[1] gadei-ps: learner 1 {line}" in ended.err
    assert (extra.code, extra.err) == (4, f"gadei-ps: learner 2 {line}"), extra
    assert "Traceback" not in ended.err
    with np.load(cli.directory / "w.npz") as weights:
        assert (weights["w"] > 0).all()


def test_an_attached_learner_is_awaited(cli: Cli, job_name: str) -> None:
    (cli.directory / "stops.py").write_text(STOPS)
    program = ["--", sys.executable, "stops.py"]
    run = cli.start("run", job_name, *program, "leaves")
    support.eventually(learning(job_name, run, 1))
    attached = cli.start("attach", job_name, *program, "stays")
    support.eventually(learning(job_name, run, 2))
    (cli.directory / "end").touch()
    ended, extra = run.wait(), attached.wait()
    assert ended.code == 0
    assert "waiting up to 30 s for 1 attached learner to end" in ended.err
    line = f"learner 1 ends: job '{job_name}' has ended: the learners of its run have ended\n"
    assert (extra.code, extra.err) == (4, f"gadei-ps: {line}"), extra


def test_a_limit(cli: Cli, job_name: str, learner: list[str]) -> None:
    ended = cli("run", job_name, "--stop-after", "epochs=3", "--", *learner, FOREVER)
    assert ended.code == 0, ended
    assert " of 3 epochs" in ended.err
    refused = cli("run", job_name, "--stop-after", "time=3", "--", *learner, FOREVER)
    assert refused.error == "--stop-after time=3: write gradients=N, samples=N or epochs=N"


@pytest.mark.parametrize(
    ("end", "state"),
    [
        ("leaves", "finished"),
        ("stop_job", "finished"),
        ("limit", "finished"),
        ("idle", "finished"),
        ("stop", "stopped"),
        ("signal", "stopped"),
        ("kill", "kept"),
    ],
)
def test_the_history_says_how_a_run_ended(cli: Cli, job_name: str, end: str, state: str) -> None:
    (cli.directory / "stops.py").write_text(STOPS)
    name = job_name
    if end == "idle":
        name = f"{job_name}.toml"
        (cli.directory / name).write_text('when_idle = "stop"')
    limit = ["--stop-after", "gradients=2000"] if end == "limit" else []
    program = ["--", sys.executable, "stops.py", "stops" if end == "stop_job" else "leaves"]
    running = cli.start("run", name, *limit, *program)
    if end != "limit":
        support.eventually(learning(job_name, running, 1))
        file = Path(support.status(job_name)["history"])
        support.eventually(lambda: file.exists() and "samples" in file.read_text())
    if end == "stop":
        cli("stop", job_name)
    elif end == "signal":
        running.signal(signal.SIGINT)
    elif end == "kill":
        os.kill(support.status(job_name)["learners"][0]["pid"], signal.SIGSEGV)
    elif end != "limit":
        (cli.directory / ("go" if end == "stop_job" else "end")).touch()
    running.wait()
    cli("gc", job_name)
    last = cli("history", job_name, "--last", 1, "--json").json["lines"][0]
    assert last["ended"] == state
    runs = cli("history", "--json").json["runs"]
    assert [one["state"] for one in runs if one["job"] == job_name] == [state]


def test_ctrl_z_stops_the_learners_too(cli: Cli, job_name: str, learner: list[str]) -> None:
    running = cli.start("run", job_name, "--learners", 2, "--", *learner, FOREVER)
    support.eventually(learning(job_name, running, 2))
    pids = [one["pid"] for one in support.status(job_name)["learners"]]
    running.process.send_signal(signal.SIGTSTP)
    support.eventually(lambda: all(map(process.is_suspended, pids)))
    stopped = support.status(job_name)["version"]
    running.process.send_signal(signal.SIGCONT)
    support.eventually(lambda: support.status(job_name)["version"] > stopped + 9)
    support.eventually(lambda: not any(map(process.is_suspended, pids)))
    assert running.signal(signal.SIGINT).code == 128 + signal.SIGINT


def test_pdb(cli: Cli, job_name: str) -> None:
    """The only learner reads from the terminal, and Ctrl-C is for it alone then."""
    (cli.directory / "pushes.py").write_text(PUSHES)
    words = [sys.executable, "-m", "gadei_ps", "run", job_name, "--", sys.executable, "-m", "pdb"]
    with Terminal(cli.directory, f"exec {shlex.join(words)} pushes.py {FOREVER}") as terminal:
        support.eventually(lambda: "(Pdb)" in terminal.err, what=lambda: terminal.err)
        terminal.type("p 6 * 7\n")
        support.eventually(lambda: "\r\n42" in terminal.err, what=lambda: terminal.err)
        terminal.type("c\n")
        support.eventually(learning(job_name, terminal, 1))
        terminal.interrupt()
        support.eventually(lambda: terminal.err.count("(Pdb)") >= 3, what=lambda: terminal.err)
        terminal.type("q\n")
        assert terminal.wait() == 0
    assert "gradients applied" in terminal.err or "gradient applied" in terminal.err
