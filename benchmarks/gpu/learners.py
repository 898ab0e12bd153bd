"""Samples per second of learners on one GPU, beside torch's own ways to train there.

Networks are the sentence classifier and an LSTM, with mini-batches from 1 to 128. Contenders are
those of `bench nlc`: gadei-ps with one, two, four and eight learners; torch in one process; Hogwild
on parameters in the GPU's memory that processes share; DistributedDataParallel, by gloo if
processes share a GPU, by NCCL if each has its own. Gradients of the contenders named sparse have
only the words of a batch.

A block is measured in a process of its own, within a time. The first block has no NVIDIA
Multi-Process Service; the second has it, and only the contenders with several processes. If there
are several GPUs, a third block gives each learner one of its own.

ratio: gadei-ps over the contender with as many learners, or over gadei-ps with one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from gadei_ps.benchmarks.common import Report, ratios_of, summary
from gadei_ps.benchmarks.gpu import mps
from gadei_ps.benchmarks.gpu.target import Target
from gadei_ps.benchmarks.nlc_member import OURS
from gadei_ps.errors import DeviceError
from gadei_ps.machine import process

WITHOUT, WITH, SPREAD = "without MPS", "with MPS", "a GPU each"
GRACE_S = 40.0
"""Seconds that a block may take beyond its time, to start and to end its processes."""
LSTM, CLASSIFIER = "LSTM", "sentence classifier"
LSTM_REACH = 1.7
LSTM_LEARNERS = 4
LARGEST_SMALL = 32
"""Mini-batches up to this are to be faster than each peer's."""

Figures = list[dict[str, Any]]
"""Rows of contenders: who, learners, network, set, mini_batch, values (samples/s)."""


def measure(target: Target) -> Report:
    """Run the blocks, each in a process of its own."""
    size = target.sizes("learners")
    report = Report(["block", "network", "set", "batch", "contender", "learners", "samples/s",
                     "ours/it"])  # fmt: skip
    report.notes.append(f"{mps.CONTROL} of others runs: {'yes' if mps.running() else 'no'}")
    for block in (WITHOUT, WITH, SPREAD):
        if block == SPREAD and target.count() < 2:
            continue
        budget_s = size["budget_s"].get(block, size["budget_s"][WITH])
        try:
            if block == WITH and target.on_gpu:
                with mps.started() as env:
                    found, notes = _in_process(target, block, budget_s, env)
            elif block == WITH:
                raise DeviceError("only for GPUs")
            else:
                found, notes = _in_process(target, block, budget_s, {})
        except DeviceError as error:
            report.notes.append(f"{block}: not measured: {error}")
            continue
        report.notes += [f"{block}: {note}" for note in notes]
        _tell(report, block, found)
    return report


def _in_process(
    target: Target, block: str, budget_s: float, env: dict[str, str]
) -> tuple[Figures, list[str]]:
    """Return the figures and notes of learners_block. Raises DeviceError if it fails."""
    order = json.dumps([target.device, target.quick, block, budget_s])
    child = process.spawn(
        process.module_command("gadei_ps.benchmarks.gpu.learners_block", order),
        env=os.environ | env,
        stdout=subprocess.PIPE,
        how=signal.SIGTERM,
    )
    try:
        out, _ = child.communicate(timeout=budget_s + GRACE_S)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"takes longer than {budget_s + GRACE_S:.0f} s") from None
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
    try:
        found = json.loads(out.decode().strip().rpartition("\n")[2])
    except ValueError:
        raise DeviceError(f"the process ends with exit code {child.returncode}") from None
    return found["figures"], found["notes"]


def _tell(report: Report, block: str, figures: Figures) -> None:
    """Report the rows of a block, and the ratio of gadei-ps to each."""
    ours = {_key(one): one for one in figures if one["contender"] == OURS}
    for one in figures:
        facts = {key: one[key] for key in ("contender", "learners", "network", "set", "mini_batch")}
        facts["block"] = block
        row = facts | summary(one["values"], "samples/s", larger=True)
        report.rows.append(row)
        shown = ""
        for ratio in _ratios(one, facts, ours):
            report.ratios.append(ratio)
            shown = f"{ratio['ratio']:.2f}"
        report.lines.append(
            [block, one["network"], one["set"], str(one["mini_batch"]), one["contender"],
             str(one["learners"]), f"{row['median']:.0f}", shown]
        )  # fmt: skip


def _key(one: dict[str, Any], learners: int | None = None) -> tuple[Any, ...]:
    count = one["learners"] if learners is None else learners
    return one["network"], one["set"], one["mini_batch"], count


def _ratios(
    one: dict[str, Any], facts: dict[str, Any], ours: dict[tuple[Any, ...], dict[str, Any]]
) -> Figures:
    """gadei-ps against the peer of a row; in a row of gadei-ps, against one learner."""
    if one["contender"] != OURS:
        mine = ours.get(_key(one))
        reach = 1.0 if one["mini_batch"] <= LARGEST_SMALL else None
        return [] if mine is None else [_ratio(facts, mine["values"], one["values"], reach)]
    alone = ours.get(_key(one, 1))
    if alone is None or one["learners"] == 1:
        return []
    reach = None
    if one["network"] == LSTM and one["learners"] == LSTM_LEARNERS:
        reach = LSTM_REACH
    elif one["network"] == CLASSIFIER and one["mini_batch"] == 1:
        reach = 1.0  # Table 8
    facts = facts | {"contender": f"{OURS}, one learner"}
    return [_ratio(facts, one["values"], alone["values"], reach)]


def _ratio(
    facts: dict[str, Any], mine: list[float], theirs: list[float], reach: float | None
) -> dict[str, Any]:
    found = ratios_of(mine, theirs, larger=True)
    reached = None if reach is None else found["ratio"] >= reach
    return {**facts, **found, "reach": reach, "reached": reached}
