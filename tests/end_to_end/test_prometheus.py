"""A real Prometheus scrapes a job, with the alert rules and the dashboard of the documentation."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import numpy as np
import pytest
from shell import Cli
from support import eventually, status
from support.ports import free_port

from gadei_ps.learners.client import Client

DOCS = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = DOCS / "alerts.yml"
ABSENT = {"gadei_scalar", "gadei_checkpoint_timestamp_seconds"}  # without reports and checkpoints
FILE = """\
standby = true
[metrics]
listen = "127.0.0.1:{port}"
[[tensors]]
name = "w"
shape = [96]
"""
CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: gadei-ps
    static_configs: [targets: ["127.0.0.1:{port}"]]
"""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus",
)


def queries(job: str) -> list[str]:
    """Return the queries of the dashboard for Grafana."""
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    found = [one["expr"] for panel in dashboard["panels"] for one in panel["targets"]]
    found += [one["expr"] for one in dashboard["annotations"]["list"]]
    for name, value in {"__rate_interval": "1m", "gadei_job": job, "user": ".*"}.items():
        found = [one.replace(f"${name}", value) for one in found]
    return found


def test_the_alert_rules_are_valid() -> None:
    found = subprocess.run(["promtool", "check", "rules", RULES], capture_output=True, text=True)
    assert found.returncode == 0, found


def push(client: Client) -> None:
    client.push({"w": np.ones(96, np.float32)}, loss=2.0, samples=3)
    client.wait_applied()


def test_it_scrapes_a_job(cli: Cli, job_name: str, tmp_path: Path) -> None:
    port, web = free_port(), free_port()
    service = cli.serve(job_name, FILE.format(port=port))
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(port=port, rules=RULES))
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{web}",
    ]

    def ask(what: str) -> Any:
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{web}/api/v1/{what}") as raw:
            return json.loads(raw.read())["data"]
        return None

    def value(query: str) -> float | None:
        found = ask(f"query?query={quote(query)}")
        return float(found["result"][0]["value"][1]) if found and found["result"] else None

    def shows(query: str, wanted: float) -> None:
        """Wait for the value: a scrape that the machine was too busy for has none."""
        eventually(lambda: value(query) == wanted, what=lambda: f"{query}: {value(query)}")

    def health() -> set[str]:
        return {one["health"] for one in ask("rules")["groups"][0]["rules"]}

    with (tmp_path / "log").open("wb") as log:
        prometheus = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with Client(job_name) as client:
            for _ in range(5):
                push(client)
            labels = f'{{gadei_job="{job_name}"}}'
            eventually(
                lambda: value(f"gadei_samples_total{labels}") == 15,
                what=lambda: (tmp_path / "log").read_text(),
            )
            shows(f'gadei_learner_samples_total{{learner="0",gadei_job="{job_name}"}}', 15)
            shows("up", 1)
            shows(f"gadei_loss_sum{labels} / gadei_loss_count_total{labels}", 2.0)
            eventually(lambda: status(job_name)["standby_pid"])
            shows(f"gadei_standby_up{labels}", 1)
            assert health() <= {"ok", "unknown"}
            eventually(lambda: health() == {"ok"})
            assert not [one for one in ask("alerts")["alerts"] if one["state"] == "firing"]
            os.kill(status(job_name)["server_pid"], signal.SIGKILL)
            for _ in range(5):
                push(client)
            shows(f"gadei_samples_total{labels}", 30)
            shows(f"gadei_failovers_total{labels}", 1)
            for name in ("samples_total", "gradients_applied_total", "loss_count_total"):
                shows(f"resets(gadei_{name}{labels}[1h])", 0)
            for query in queries(job_name):
                if not any(name in query for name in ABSENT):
                    eventually(lambda query=query: value(query) is not None, what=query)
    finally:
        prometheus.kill()
        prometheus.wait()
    cli("stop", job_name)
    service.wait()
