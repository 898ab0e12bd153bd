"""The models of the protocol: the short ones; `make verify` checks all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.models import SCRIPT, verify


@pytest.mark.timeout(600)
def test_the_short_models_end_as_they_must() -> None:
    verify()
    done = subprocess.run([SCRIPT, "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 not as they must be\n")


def test_every_rule_left_out_names_what_must_fail() -> None:
    for run in verify().RUNS:
        assert Path(SCRIPT.parent, f"{run.model}.pml").is_file()
        assert (run.kind == "wrong") == bool(run.fails), run


def test_another_counterexample_is_not_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = verify()
    run = next(run for run in models.RUNS if run.defines == "N=1 KILLS=1 IDLE_FIRST")
    assert not models.check(run._replace(fails="(steps[i]==head)"))
    assert "ANOTHER COUNTEREXAMPLE: (w[i]==head)" in capsys.readouterr().out
    assert not models.check(run._replace(defines="N=1 KILLS=1"))
    assert "NO COUNTEREXAMPLE" in capsys.readouterr().out
