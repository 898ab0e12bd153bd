"""The command line of a server process, which the watchdog writes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from gadei_ps.machine import placement


@dataclass(frozen=True)
class Asked:
    """Settings of a server from the watchdog.

    number: its line in control, 0 or 1. cores: of the shards. learners, patience_s: see
    gadei_ps.server.start.Start. quiet, verbose, json: of its log.
    """

    job: str
    number: int
    orphan_s: float
    cores: list[int]
    learners: int = 0
    patience_s: float = 0.0
    core_dumps: bool = False
    verbose: bool = False
    quiet: bool = False
    json: bool = False


def parse() -> Asked:
    """`python -m gadei_ps.server.manager JOB NUMBER ORPHAN_S`, with options."""
    parser = argparse.ArgumentParser(prog="gadei-ps server", description=parse.__doc__)
    parser.add_argument("job")
    parser.add_argument("number", type=int)
    parser.add_argument("orphan_s", type=float)
    parser.add_argument("--cores", type=placement.parse, default=[])
    parser.add_argument("--learners", type=int, default=0)
    parser.add_argument("--patience", type=float, default=0.0, dest="patience_s")
    parser.add_argument("--core-dumps", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--json", action="store_true")
    return Asked(**vars(parser.parse_args()))
