"""Samples per second of learners on one GPU, beside torch's own ways to train there.

Networks are the sentence classifier and an LSTM, with mini-batches from 1 to 128. Contenders are
those of `bench nlc`: gadei-ps with one, four and eight learners; torch in one process; Hogwild
on parameters in the GPU's memory that four or eight processes share; DistributedDataParallel, by
gloo if processes share a GPU, by NCCL if each has its own. Gradients of the contenders named sparse
have only the words of a batch.

A block is measured in a process of its own, within a time. The first block has no NVIDIA
Multi-Process Service; the second has it, and only the contenders with several processes. If there
are several GPUs, a third block gives each learner one of its own. Rows with a part have the host's
time of a part of the step, in one process of each contender.

The processes of a block are started once: they train both networks, and with fewer learners than
there are processes, the others sleep, as all do while another contender is measured.

ratio: gadei-ps over the contender with as many learners, or over gadei-ps with one; at the fastest
number of learners, over the fastest peer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from gadei_ps.benchmarks.common import Report, end, ratios_of, summary
from gadei_ps.benchmarks.gpu import mps, step_profile, texts
from gadei_ps.benchmarks.gpu.sizes import CLASSIFIER, LSTM
from gadei_ps.benchmarks.gpu.target import Target, noted
from gadei_ps.benchmarks.nlc_member import OURS
from gadei_ps.errors import DeviceError
from gadei_ps.machine import process

WITHOUT, WITH, SPREAD = "without MPS", "with MPS", "a GPU each"
SHARES = {WITHOUT: 5, WITH: 4, SPREAD: 4}
"""Shares of the time; the first block has more contenders."""
GRACE_S = 20.0
"""Seconds that a block may take beyond its time, to end its processes."""
END_S = 10.0
FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Environment in which torch can look for GPUs and then be forked."""
FASTEST = "the fastest peer"
LSTM_REACH = 1.7
LSTM_LEARNERS = 4
LARGEST_SMALL = 32
"""Mini-batches up to this are to be faster than each peer's."""

Figures = list[dict[str, Any]]
"""Rows of contenders: who, learners, network, set, mini_batch, values (samples/s)."""


def measure(target: Target) -> Iterator[Report]:
    """Run the blocks, each in a process of its own."""
    texts.first(target)  # raises UsageError before the blocks start
    report = Report(["block", "network", "set", "batch", "contender", "learners", "samples/s",
                     "ours/it"])  # fmt: skip
    report.notes.append(f"{mps.CONTROL} of others runs: {'yes' if mps.running() else 'no'}")
    blocks = [WITHOUT, WITH, SPREAD]
    if target.count() < 2:
        blocks.remove(SPREAD)
    if why := mps.missing() if target.on_gpu else "only for GPUs":
        report.notes.append(f"{WITH}: not measured: {why}")
        blocks.remove(WITH)
    with ExitStack() as stack:
        service = stack.enter_context(mps.directories())
        # At once, because it takes seconds until they have imported torch.
        started = {
            block: stack.enter_context(_process(target, block, service if block == WITH else {}))
            for block in blocks
        }
        for number, block in enumerate(blocks):
            share = SHARES[block] / sum(SHARES[one] for one in blocks[number:])
            budget_s = (target.left() - END_S) * share
            with noted(report, block), mps.started(service) if block == WITH else nullcontext():
                for one in _measured(started[block], budget_s):
                    if "note" in one:
                        report.notes.append(f"{block}: {one['note']}")
                    elif "profile" in one:
                        _profile(report, block, one)
                    else:
                        _tell(report, block, one["figures"])
                    yield report
            yield report


def _profile(report: Report, block: str, found: dict[str, Any]) -> None:
    """Report where the host's time of a step goes."""
    facts = {key: value for key, value in found.items() if key != "profile"} | {"block": block}
    report.rows += [{**facts, **row} for row in found["profile"]]
    title = f"{block}, {found['network']}, {found['contender']} with {found['learners']}"
    step_profile.show(title, found["profile"])


@contextmanager
def _process(target: Target, block: str, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process of a block, which waits for its time."""
    order = json.dumps([target.device, target.quick, block])
    child = process.spawn(
        process.module_command("gadei_ps.benchmarks.gpu.learners_process", order),
        env=os.environ | FORKS | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        how=signal.SIGTERM,
    )
    try:
        yield child
    finally:
        end(child, END_S)


def _measured(child: subprocess.Popen[bytes], budget_s: float) -> Iterator[dict[str, Any]]:
    """Yield what a block measures in its time, as it does. Raises DeviceError if it fails."""
    assert child.stdin is not None
    try:
        child.stdin.write(f"{budget_s}\n".encode())
        child.stdin.flush()
        yield from _lines(child, time.monotonic() + budget_s + GRACE_S)
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
    finally:
        end(child, END_S)


def _lines(child: subprocess.Popen[bytes], until: float) -> Iterator[dict[str, Any]]:
    """Yield the objects that a process writes as lines, up to {"end"}. Raises DeviceError."""
    assert child.stdout is not None
    rest = b""
    while True:
        wait_s = max(0.0, until - time.monotonic())
        if not select.select([child.stdout], [], [], wait_s)[0]:
            raise DeviceError("it takes too long")
        part = os.read(child.stdout.fileno(), 65536)
        if not part:
            raise DeviceError(f"the process ends with exit code {child.wait()}")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):  # a library's
                continue
            found = json.loads(line)
            if "end" in found:
                return
            yield found


def _tell(report: Report, block: str, figures: Figures) -> None:
    """Report the rows of a mini-batch, and the ratio of gadei-ps to each."""
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
    report.ratios += _fastest(block, figures)


def _fastest(block: str, figures: Figures) -> Figures:
    """The sentence classifier's fastest number of learners against the fastest of all peers."""
    found = [one for one in figures if one["network"] == CLASSIFIER]
    mine = [one for one in found if one["contender"] == OURS]
    peers = [one for one in found if one["contender"] != OURS]
    if not mine or not peers:
        return []
    best, peer = (max(each, key=lambda one: statistics.median(one["values"]))
                  for each in (mine, peers))  # fmt: skip
    facts = {key: best[key] for key in ("learners", "network", "set", "mini_batch")}
    facts |= {"contender": FASTEST, "peer": f"{peer['contender']} with {peer['learners']}"}
    reach = 1.0 if best["mini_batch"] <= LARGEST_SMALL else None
    return [_ratio(facts | {"block": block}, best["values"], peer["values"], reach)]


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
