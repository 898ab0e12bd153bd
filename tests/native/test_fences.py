"""Each fence of the ring is executed where it is needed: seen instruction by instruction."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest
from clients.drivers import CC, SANITIZERS
from support import PATIENCE_S

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FENCED = (
    *("ps_release", "ps_hand_out", "ps_publish", "ps_publish_frame", "ps_wait_applied"),
    *("ps_wait_grant", "ps_shard_sleep", "ps_full_fence"),
)
pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="reads instructions of x86-64"),
    pytest.mark.skipif(bool(SANITIZERS), reason="sanitizers have instructions of their own"),
]


@pytest.mark.parametrize(("weak", "verdict"), [(False, "fenced"), (True, "not fenced")])
def test_between_a_store_and_a_look(programs: Any, weak: bool, verdict: str) -> None:
    """Also as it is without any fence, which shows that this can be seen."""
    without = ["-include", ROOT / "tests/stress/weaken.h", "-DWEAK_FENCE"] if weak else []
    program = programs.build(
        *(HERE / "fences.c", ROOT / "native/ps_ring.c", "-Wl,--wrap=syscall"),
        compiler=[*CC, "-D_GNU_SOURCE", *without],
        name=f"fences-{weak}",
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines() == [f"{name} {verdict}" for name in FENCED]
    assert done.returncode == (len(FENCED) if weak else 0)
