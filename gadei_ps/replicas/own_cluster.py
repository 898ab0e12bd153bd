"""`python -m gadei_ps.replicas.own_cluster COUNT DIRECTORY`: a cluster of Ray on this host alone.

It prints its address, or why it cannot start. All its processes end once its standard input ends,
even if the command that has started it was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil

TRIES, END_S = 3, 1.0
NODE: dict[str, Any] = {
    "node_ip_address": "127.0.0.2",  # nobody outside reaches it; 127.0.0.1 Ray takes for another
    "include_dashboard": False,
    "no_monitor": True,  # its size stays
    "include_log_monitor": False,
}
EACH_BYTES = 80_000_000
"""Object store for each replica (bytes); what does not fit goes through the disk."""


def main(count: int, directory: Path) -> None:
    """Run the cluster: one node, with a CPU for each of so many replicas."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    (directory / "ray").mkdir(exist_ok=True)
    os.environ["RAY_TMPDIR"] = str(directory)  # other programs do not take it for theirs
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_input, args=(directory,), daemon=True).start()
    try:
        from ray.cluster_utils import Cluster

        made = Cluster(shutdown_at_exit=False)
        made.add_node(num_cpus=count, object_store_memory=count * EACH_BYTES, **NODE)
        print(made.address, file=out, flush=True)
        threading.Event().wait()
    except Exception as error:  # of Ray; its messages have many lines
        with contextlib.suppress(OSError):
            print(" ".join(str(error).split())[:300] or type(error).__name__, file=out, flush=True)
    _end(directory)


def _end_with_input(directory: Path) -> None:
    """End everything with the input, even while Ray is starting."""
    sys.stdin.read()
    _end(directory)


def _end(directory: Path) -> None:
    for _ in range(TRIES):  # another one may just begin
        for one in (children := psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(children, END_S)
    shutil.rmtree(directory, ignore_errors=True)  # the command may have been killed
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
