"""Commands that export what jobs do to other programs."""

from __future__ import annotations

import sys
from typing import Annotated

from gadei_ps.cli.options import option, switch
from gadei_ps.show.plain import print_text


def metrics(
    listen: Annotated[
        str, option("HOST:PORT", "Address for Prometheus; port 0 takes a free one.")
    ] = "127.0.0.1:9469",
    once: Annotated[bool, switch("--once", "Print the metrics once, and serve nothing.")] = False,
) -> int:
    """Export metrics of all jobs to Prometheus, at http://HOST:PORT/metrics.

    As root, of the jobs of all users. The metrics are read from shared memory: no job is asked.
    """
    from gadei_ps.monitoring import web
    from gadei_ps.monitoring.exporter import Exporter

    exporter = Exporter()
    if once:
        sys.stdout.buffer.write(exporter.text()[0])
        return 0
    host, port = web.address(listen)
    server = web.Server(exporter.text, host, port)
    shown = f"[{host}]" if ":" in host else host
    print_text(f"gadei-ps: metrics are at http://{shown}:{server.port}/metrics")
    web.run(server)
    return 0
