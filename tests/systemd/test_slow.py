"""Starts and stops that take longer than the unit allows, and an end that does not end."""

from __future__ import annotations

import time

import pytest
from service import JOB, Service
from support import eventually

PATIENT = "[Service]\nRestartSec=1h\n"
SLOW = """\
[Service]
CPUQuota=40%
TimeoutStartSec=10
Environment=NUMBA_CACHE_DIR=/var/cache/gadei-ps/empty
"""


def test_an_end_that_is_killed(service: Service) -> None:
    """It is tried once more: no process is left, and nothing is lost."""
    service.drop_in(PATIENT)
    service.systemctl("start")
    service.learn()
    _, server, _ = service.pids()
    service.kill_the_watchdog()
    eventually(lambda: service.sub_state == "auto-restart", what=service.said)
    service.kill("STOP", server)  # the end waits for it
    service.systemctl("stop")
    eventually(lambda: "server adopted" in service.said(), what=service.said)
    service.kill("KILL", int(service.manager.show(service.end, "ControlPID")))
    service.kill("CONT", server)
    service.is_gone()
    assert service.learned() == service.saved()


@pytest.mark.timeout(900)
def test_a_first_start_with_little_of_a_core(service: Service) -> None:
    """It compiles for longer than TimeoutStartSec, and systemd waits."""
    service.drop_in(SLOW)
    service.manager.run("systemctl", "start", service.unit, timeout_s=800)
    assert service.state == "active", service.said()
    assert "still starting" in service.said(), "it has not compiled for longer than 10 s"


@pytest.mark.timeout(300)
def test_a_stop_of_a_busy_gigabyte(service: Service) -> None:
    """The last checkpoint takes longer than TimeoutStopSec, and systemd waits for it."""
    text = JOB.replace("shape = [1024]", f"shape = [{2**28}]").replace("true", "true\nslots = 1", 1)
    service.manager.write(f"/etc/gadei-ps/{service.name}.toml", text)
    service.drop_in("[Service]\nTimeoutStopSec=1\n")
    service.systemctl("start")
    service.learn()
    begin = time.monotonic()
    service.systemctl("stop")
    took_s = time.monotonic() - begin
    assert service.manager.show(service.unit, "Result") == "success", service.said()
    assert service.learned() == service.saved()
    service.is_gone()
    assert took_s > 1.0, "the test is too small"
    print(f"stopped in {took_s:.1f} s")
