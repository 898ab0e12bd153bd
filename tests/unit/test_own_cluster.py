"""The end of a cluster of this host's own, even while Ray is starting."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
from support import PATIENCE_S

SLOW = """
    import subprocess, time

    class Cluster:
        def __init__(self, **_):
            subprocess.Popen(["sleep", "1000"])
            open({begun!r}, "w").close()
            time.sleep(1000)
"""


def test_it_ends_with_its_input_while_ray_is_starting(tmp_path: Path) -> None:
    begun, ray = tmp_path / "begun", tmp_path / "modules" / "ray"
    ray.mkdir(parents=True)
    (ray / "__init__.py").touch()
    (ray / "cluster_utils.py").write_text(textwrap.dedent(SLOW.format(begun=str(begun))))
    directory = tmp_path / "files"
    directory.mkdir()
    words = [sys.executable, "-m", "gadei_ps.replicas.own_cluster", "2", str(directory)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ray.parent)}
    ) as process:
        end = time.monotonic() + PATIENCE_S
        while not begun.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        (child,) = psutil.Process(process.pid).children()
        process.communicate(timeout=PATIENCE_S)
        assert not child.is_running() and not directory.exists()
