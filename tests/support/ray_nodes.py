"""A cluster of Ray on this host, as a process of its own: `python ray_nodes.py COUNT`.

It prints its address. All its processes are killed once its standard input ends; machines that it
has started are in sessions of their own, and stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

SMALL = {
    "object_store_memory": 80_000_000,
    "num_cpus": 1,
    "include_dashboard": False,
    "no_monitor": True,
    "include_log_monitor": False,
}


def main(count: int) -> None:
    directory = tempfile.mkdtemp(prefix="gps-ray-", dir="/tmp")
    (Path(directory) / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = directory
    from ray.cluster_utils import Cluster

    try:
        made = Cluster(shutdown_at_exit=False)
        for _ in range(count):
            made.add_node(wait=False, node_ip_address="127.0.0.2", **SMALL)
        made.wait_for_nodes()
        print(made.address, flush=True)
        sys.stdin.read()
    finally:
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
