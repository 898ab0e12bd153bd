"""A changed job file under a running job."""

from __future__ import annotations

import os
import re
import signal

import numpy as np
import pytest
from shell import Cli
from support import status

from gadei_ps.learners.client import Client

FILE = """\
standby = false
hang_s = 5.0
[optimizer]
lr = {lr}
[checkpoint]
every_s = 0
keep = {keep}
[[tensors]]
name = "w"
shape = [{size}]
"""


def test_a_changed_job_file(cli: Cli, job_name: str) -> None:
    """It is taken over at once, and by the next watchdog; what may not change changes nothing."""

    def write(**values: object) -> None:
        file.write_text(FILE.format(**({"lr": 1.0, "keep": 3, "size": 8} | values)))

    file = cli.directory / f"{job_name}.toml"
    write()
    service = cli.serve(job_name, file.read_text())
    assert "nothing has changed" in cli("reload", file).out
    with Client(job_name) as client:

        def push() -> float:
            client.push({"w": np.ones(8, np.float32)})
            client.wait_applied()
            return float(client.pull()[0])

        assert push() == -1.0
        write(lr=0.5, keep=1)
        changed = cli("reload", file, "--json").json["changed"]
        assert changed == {"optimizer.lr": 0.5, "checkpoint.keep": 1}
        assert push() == -1.5
        cli("checkpoint", job_name)
        assert push() == -2.0
        cli("checkpoint", job_name)
        assert len(list((cli.directory / "state" / job_name).glob("checkpoint-*"))) == 1
        for text in ("", FILE.format(lr=0.5, keep=1, size=8).replace("[checkpoint]", "[other]")):
            file.write_text(text)
            assert cli("reload", file).error, "its last checkpoint would not be made"
        file.write_text(re.sub(r"\[checkpoint\][^[]*", "", FILE.format(lr=0.5, keep=1, size=8)))
        assert "has no [checkpoint] any more" in cli("reload", file).error
        write(lr=0.25, size=9)
        assert "tensors cannot change while job" in cli("reload", file).error
        assert push() == -2.5
        # The next watchdog has the file that was taken over, and no other.
        write(lr=0.5, keep=1)
        server = status(job_name)["server_pid"]
        service.signal(signal.SIGKILL)
        service = cli.serve(job_name, file.read_text())
        assert status(job_name)["server_pid"] == server
        assert [row["pid"] for row in status(job_name)["learners"]] == [os.getpid()]
        assert push() == -3.0
    service.process.terminate()
    assert service.wait().code == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [("sync = 'ssp:2'", "gadei-ps set changes it"), ("slots = 7", "restart the job for that")],
)
def test_what_takes_something_else(line: str, why: str, cli: Cli, job_name: str) -> None:
    cli.serve(job_name, "standby = false\n")
    file = cli.directory / f"{job_name}.toml"
    file.write_text(f"standby = false\n{line}\n")
    refused = cli("reload", file).error
    assert refused.startswith(line.split()[0] + " cannot change while")
    assert why in refused
    if "set" in why:
        cli("set", job_name, "sync=ssp:2")
        assert "nothing has changed" in cli("reload", file).out
