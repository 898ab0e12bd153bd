"""A convolutional network on gadei-ps beside plain torch SGD, and a learner on each GPU.

VGG trains on images of CIFAR-10, and a network of AlexNet's size on images of noise (paper, section
6.2, Figure 8). Mini-batches are cut from images that lie in the GPU's memory, so that only training
is measured. The data set is a JPEG copy (`cifar10-jpeg`), not the pixels of CIFAR-10; without it,
VGG's images are noise as well.

One learner is compared with torch's SGD in one process; the two take turns. With several GPUs,
learners have one each, from one GPU to all of them.
"""

from __future__ import annotations

import functools
import importlib
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gadei_ps.benchmarks.common import Report, alternate, ratios_of, summary
from gadei_ps.benchmarks.gang import Gang
from gadei_ps.benchmarks.gpu import step_profile
from gadei_ps.benchmarks.gpu.target import Target, job, noted, started
from gadei_ps.benchmarks.nlc_texts import VARIABLE, data_directory
from gadei_ps.machine import gpus, process

OURS, TORCH = "gadei-ps", "torch SGD"
LEARNER = "gadei_ps.benchmarks.gpu.vision_learner"
START_S = 60.0
STEPS_S = 40.0
PROFILED = 10
"""Steps for the profile of each contender."""
SIDE = 32
LINEAR = 0.9
"""The goal for a learner on each GPU: this share of as many times one learner's speed."""

Pixels = NDArray[np.uint8]


def images(count: int) -> tuple[Pixels, list[str]]:
    """Load at most `count` images, uint8 (n, 3, 32, 32), and notes on their source."""
    directory = data_directory() / "cifar10-jpeg"
    decode = _decoder()
    paths = [directory / f"{part}.tar.xz" for part in ("train", "test")]
    path = next((one for one in paths if one.exists()), None)
    if path is None or decode is None:
        why = f"no {directory} (${VARIABLE})" if path is None else "nothing here decodes JPEG"
        noise = np.random.default_rng(0).integers(0, 256, (min(count, 10_000), 3, SIDE, SIDE))
        return noise.astype(np.uint8), [f"VGG's images are noise: {why}"]
    found = []
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".jpg") else None
            if file is not None:
                found.append(decode(file.read()))
            if len(found) == count:
                break
    note = f"VGG's images are {len(found)} of a JPEG copy of CIFAR-10 ({path.parent.name})"
    return np.ascontiguousarray(np.stack(found).transpose(0, 3, 1, 2)), [note]


def _decoder() -> Callable[[bytes], Pixels] | None:
    """Return a decoder of JPEG files to (height, width, 3); None if none is installed."""
    try:
        from PIL import Image

        return lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    except ImportError:
        pass
    try:
        cv2 = importlib.import_module("cv2")
        return lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
    except ImportError:
        return None


def measure(target: Target) -> Iterator[Report]:
    """Measure each network on one GPU, then on several if there are."""
    size = target.sizes("vision")
    report = Report(["network", "mini-batch", "GPUs", OURS, TORCH, "ratio"])
    pixels, notes = images(size["images"])
    report.notes += [*notes, "precision is torch's default, in both", f"{shards()} shards"]
    entries = gpus.visible() if target.on_gpu else ("",)
    taken = 0.0  # by the network before
    with tempfile.TemporaryDirectory(prefix="gadei-ps-images-") as scratch, ExitStack() as stack:
        path = Path(scratch) / "images.npy"
        np.save(path, pixels)
        gangs: dict[str, Gang] = {}
        for one in size["models"]:
            what = f"{one['model']} with {one['mini_batch']}"
            if target.left() < taken:
                report.notes.append(f"{what}: not measured: no time")
                continue
            begin = time.monotonic()
            setup = {**one, "images": str(path), "device": target.device, "quick": target.quick}
            if not gangs:
                makers = {who: functools.partial(_gang, entries[:1]) for who in (OURS, TORCH)}
                gangs = started(report, stack, makers)
                if len(gangs) < len(makers):
                    break
            compared = len(report.ratios)
            with noted(report, what):
                _beside_torch(report, setup, gangs, size)
            if len(report.ratios) == compared:  # a process has failed
                for gang in gangs.values():
                    gang.close()
                gangs.clear()
            yield report
            for count in range(2, len(entries) + 1):
                with noted(report, f"{what} on {count} GPUs"):
                    _on_several(report, setup, entries[:count], size)
                yield report
            taken = time.monotonic() - begin


def shards() -> int:
    """Return the cores but two: learners on GPUs leave them to the server, whose update of a large
    model takes as long as its shards are few."""
    return max(1, process.cores() - 2)


def _gang(entries: tuple[str, ...]) -> Gang:
    """A process for each of these GPUs."""
    return Gang([["-m", LEARNER, entry] for entry in entries], start_s=START_S)


def _rate(gang: Gang, setup: dict[str, Any], learners: int, window_s: float) -> Callable[[], float]:
    """Return the samples/s of all processes together, in windows of about this length."""
    gang.seconds({"steps": 3}, timeout_s=STEPS_S)
    few = 5
    once = gang.seconds({"steps": few}, timeout_s=STEPS_S) / few
    steps = max(few, round(window_s / once))
    samples = steps * setup["mini_batch"] * learners
    return lambda: samples / gang.seconds({"steps": steps}, timeout_s=STEPS_S)


def _beside_torch(
    report: Report, setup: dict[str, Any], gangs: dict[str, Gang], size: dict[str, Any]
) -> None:
    """Measure one learner and one process of torch, on the same GPU, in turns."""
    facts = {"model": setup["model"], "mini_batch": setup["mini_batch"], "gpus": 1}
    with job("vision", shards=shards()) as name:
        contenders = {}
        for who, of in ((OURS, name), (TORCH, None)):
            (answer,) = gangs[who].ask({**setup, "job": of}, timeout_s=STEPS_S)
            contenders[who] = _rate(gangs[who], setup, 1, size["window_s"])
        facts["bytes"] = answer["bytes"]
        figures = alternate(contenders, size["rounds"])
        profiles = {
            who: gangs[who].ask({"profiled": PROFILED}, timeout_s=STEPS_S)[0]["rows"]
            for who in contenders
        }
        for gang in gangs.values():
            gang.ask({"close": True}, timeout_s=STEPS_S)
    for who, values in figures.items():
        report.rows.append({"contender": who, **facts} | summary(values, "samples/s", larger=True))
    for who, rows in profiles.items():
        report.rows += [{"contender": who, **facts, **row} for row in rows]
        step_profile.show(f"{who}, {setup['model']}, mini-batch {setup['mini_batch']}", rows)
    found = ratios_of(figures[OURS], figures[TORCH], larger=True)
    reached = {"reach": 1.0, "reached": found["ratio"] >= 1.0}
    report.ratios.append({"contender": TORCH, **facts, **found, **reached})
    cells = [f"{summary(values)['median']:.0f}" for values in figures.values()]
    report.lines.append(
        [setup["model"], str(setup["mini_batch"]), "1", *cells, f"{found['ratio']:.2f}"]
    )


def _on_several(
    report: Report, setup: dict[str, Any], entries: tuple[str, ...], size: dict[str, Any]
) -> None:
    """Measure a learner on each of these GPUs, beside one on the first."""
    count = len(entries)
    with ExitStack() as stack:
        contenders = {}
        for learners in (1, count):
            name = stack.enter_context(job(f"vision{learners}", shards=shards()))
            gang = stack.enter_context(_gang(entries[:learners]))
            gang.ask({**setup, "job": name}, timeout_s=STEPS_S)
            contenders[str(learners)] = _rate(gang, setup, learners, size["window_s"])
        figures = alternate(contenders, size["rounds"])
    facts = {"model": setup["model"], "mini_batch": setup["mini_batch"], "gpus": count}
    row = {"contender": OURS, **facts} | summary(figures[str(count)], "samples/s", larger=True)
    report.rows.append(row)
    found = ratios_of(figures[str(count)], figures["1"], larger=True)
    reached = {"reach": LINEAR * count, "reached": found["ratio"] >= LINEAR * count}
    report.ratios.append({"contender": f"{OURS}, one GPU", **facts, **found, **reached})
    report.lines.append(
        [setup["model"], str(setup["mini_batch"]), str(count), f"{row['median']:.0f}", "",
         f"{found['ratio']:.2f}"]
    )  # fmt: skip
