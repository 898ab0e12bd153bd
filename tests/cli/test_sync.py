"""Changing a job's synchronization model, recording run times, and refused models."""

from __future__ import annotations

import pytest
import support
from shell import FOREVER, Cli, is_running, learning

from gadei_ps.run_times import traces

pytestmark = pytest.mark.usefixtures("compiled")


def test_set_and_adopt(cli: Cli, job_name: str, learner: list[str]) -> None:
    daemon = cli.serve(job_name)
    team = [cli.start("attach", job_name, "--", *learner, FOREVER) for _ in range(2)]
    support.eventually(learning(job_name, team[0], 2))
    assert cli("set", job_name, "sync=ssp:4").out == f"{job_name}: asp -> ssp:s=4\n"
    assert cli("set", job_name, "sync=ssp:s=4").out == f"{job_name}: already has ssp:s=4\n"
    report = cli("set", job_name, "sync=bsp", "--json").json
    assert report == {"job": job_name, "sync": "bsp", "before": "ssp:s=4", "changed": True}
    refused = cli("set", job_name, "sync=cutoff:c=9")
    assert (refused.code, refused.error) == (
        1,
        "cutoff: c = 9 is above the number of learners, 2",
    )
    for bad, why in (
        ("sync=nosuch", "sync: unknown model 'nosuch'"),
        ("size=3", "size cannot be set in a running job; these can"),
        ("sync", "cannot read 'sync'; write FIELD=VALUE"),
    ):
        result = cli("set", job_name, bad)
        assert result.code == 2
        assert result.error.startswith(why)
    assert support.status(job_name)["sync"] == "bsp"
    # The model that was set outlives the watchdog, although the job file says asp.
    daemon.process.kill()
    daemon.wait()
    again = cli.serve(job_name)
    assert support.status(job_name)["sync"] == "bsp"
    assert "the job keeps the synchronization model that it has" in again.err


def test_trace_and_simulate(cli: Cli, job_name: str, learner: list[str]) -> None:
    cli.serve(job_name, "sync = 'bsp'\n")
    team = [cli.start("attach", job_name, "--", *learner, FOREVER) for _ in range(2)]
    support.eventually(learning(job_name, team[0], 2))
    for time in ("300ms", "5s", "60s"):  # longer ones for a busy machine
        report = cli("trace", job_name, "--for", time, "--json").json
        if report["learners"] == 2 and report["run_times"] > 10:
            break
    assert report["file"] == f"{job_name}-trace.csv"
    assert report["learners"] == 2
    recorded = traces.read(cli.directory / report["file"])
    assert recorded.times.shape[1] == 2
    assert report["run_times"] == recorded.times.size - recorded.missing > 10
    simulated = cli(
        "simulate", "bsp", "ssp:1", "--learners", 2, "--times", report["file"], "--json"
    ).json
    assert [one["model"] for one in simulated["models"]] == ["bsp", "ssp:s=1"]
    assert cli("trace", "nosuch").error.startswith("no job 'nosuch' with a model is running")
    assert cli("trace", job_name, "--for", "soon").code == 2
    assert "cannot be written" in cli("trace", job_name, "--out", "no/such/dir.csv").error


def test_models_that_do_not_fit_are_refused_before_the_start(
    cli: Cli, job_name: str, learner: list[str]
) -> None:
    few = cli("run", job_name, "--learners", 2, "--sync", "cutoff:c=3", "--", *learner, 1)
    assert few.code == 2
    assert few.error == ("run --learners 2: sync: cutoff: c = 3 is above the number of learners, 2")
    (cli.directory / "job.toml").write_text(
        f"name = '{job_name}'\nsync = 'cutoff:file=model.safetensors'\n"
        "[learners]\ncommand = ['true']\ncount = 2\n"
    )
    missing = cli("serve", "job.toml")
    assert missing.code == 2
    assert str(cli.directory / "model.safetensors") in missing.error
    long = cli("run", job_name, "--sync", f"cutoff:file=/{'x' * 600}", "--", *learner, 1)
    assert long.code == 2
    assert "cutoff: " in long.error
    for spec, why in (
        ("ssp:s=-1", "s must be a whole number"),
        ("elastic-bsp:R=0", "R must be a whole number"),
        ("wsp", "D is missing"),
        ("cutoff:c=1,by=order", "give one of c, by and file"),
    ):
        bad = cli("run", job_name, "--sync", spec, "--", *learner, 1)
        assert bad.code == 2
        assert why in bad.error
    assert not is_running(job_name)
