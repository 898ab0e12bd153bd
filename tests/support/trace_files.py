"""Traces of run times as files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from gadei_ps.run_times import traces
from gadei_ps.run_times.traces import Trace


def write(path: Path, trace: Trace) -> None:
    """Write a trace in our own form; a missing run time has no row."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(traces.HEADER)
        for row, column in np.argwhere(~np.isnan(trace.times)).tolist():
            seconds, name = float(trace.times[row, column]), trace.learners[column]
            rows.writerow([row, name, seconds, seconds, int(trace.censored[row, column])])
