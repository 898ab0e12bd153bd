"""A plan of a virtual worker's stages: made from measured layers, kept in a file, read by a worker.

made = plan.make(layers, Sample(inputs, targets, criterion), ["host:1", "host:1"], in_flight=4)
worker = VirtualWorker(layers, plan=made, optimizer=...)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, Self

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gadei_ps.errors import UsageError, invalid
from gadei_ps.learners.torch.model import Make, Trained
from gadei_ps.learners.virtual import cutting, partition, profiler, schedule, stage_devices
from gadei_ps.learners.virtual.activations import analyze
from gadei_ps.learners.virtual.partition import Device, PlacedStage, Profile
from gadei_ps.learners.virtual.profiler import Sample
from gadei_ps.learners.virtual.stage_devices import StageDevice
from gadei_ps.machine import cgroups, user_files
from gadei_ps.show.counts import counted

MOST_BYTES = 16 << 20  # of a plan's file
REPEATS = 20
FULL = 0.99  # share of the time that a slowest stage is busy which waits for nothing


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PassTimes(_Part):
    """Seconds of a forward and of a backward pass."""

    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)


class PlannedPiece(_Part):
    """Layers that stay together, mostly one, as they were measured."""

    first_layer: int = Field(ge=0)
    end_layer: int
    trained_bytes: int = Field(ge=0)
    frozen_bytes: int = Field(ge=0)
    optimizer_bytes: int = Field(ge=0)
    entering_bytes: int = Field(ge=0)
    times: dict[str, PassTimes]
    """Times by kind of device."""


class PlannedStage(_Part):
    """One stage, with its predicted times for a mini-batch and its memory."""

    device: str
    first_layer: int = Field(ge=0)
    end_layer: int
    parameters: int = Field(ge=0)
    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    transfer_s: float = Field(ge=0)
    total_s: float = Field(ge=0)
    idle_share: float
    memory_bytes: int = Field(ge=0)
    memory_limit_bytes: int = Field(ge=0)


class Plan(_Part):
    """Stages for a model, and what is predicted of them."""

    format: Literal[1] = 1
    layers: list[int]
    """Parameters of each layer, frozen ones included."""
    in_flight: int = Field(ge=1)
    stages: list[PlannedStage] = Field(min_length=1)
    left_out: list[str]
    """Devices that would make it slower, or on which nothing fits."""
    pieces: list[PlannedPiece]
    copy_s: float = Field(ge=0)
    step_s: float = Field(ge=0)
    learner_bytes: int = Field(ge=0)
    mini_batches_per_s: float = Field(ge=0)
    bubble_share: float
    full_in_flight: int | None
    """Fewest mini-batches in flight with which the slowest stage waits for nothing."""

    @model_validator(mode="after")
    def _stages_follow(self) -> Self:
        ends = [0, *(one.end_layer for one in self.stages)]
        firsts = [*(one.first_layer for one in self.stages), len(self.layers)]
        if ends != firsts or any(one.end_layer <= one.first_layer for one in self.stages):
            raise ValueError("the stages do not have each layer once, in order")
        return self

    @property
    def devices(self) -> list[str]:
        """Devices of the stages, as VirtualWorker takes them."""
        return [one.device for one in self.stages]

    @property
    def cuts(self) -> list[int]:
        """The first layer of each stage but the first."""
        return [one.first_layer for one in self.stages[1:]]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of `gadei-ps partition --out`. Raises UsageError."""
        again = "make it with gadei-ps partition --out"
        try:
            return cls.model_validate_json(user_files.read(path, MOST_BYTES))
        except OSError as error:
            raise UsageError(f"plan {os.fspath(path)}: {error.strerror}; {again}") from None
        except ValidationError as error:
            raise UsageError(f"plan {os.fspath(path)}: {invalid(error)}; {again}") from None

    def check(self, layers: Sequence[torch.nn.Module]) -> None:
        """Raise UsageError if it was made for other layers."""
        sizes = cutting.sizes(layers)
        again = "make it again with gadei-ps partition"
        if len(sizes) != len(self.layers):
            raise UsageError(
                f"the plan is for {len(self.layers)} layers and the model has {len(sizes)}: {again}"
            )
        for number, (planned, size) in enumerate(zip(self.layers, sizes, strict=True)):
            if planned != size:
                raise UsageError(
                    f"layer {number} ({type(layers[number]).__name__}) has {size:,} parameters, "
                    f"and {planned:,} in the plan: {again}"
                )

    def check_in_flight(self, most: int) -> None:
        """Raise UsageError if the job has more mini-batches in flight than memory was planned for.

        most: s_local + 1 of the job.
        """
        if most > self.in_flight:
            raise UsageError(
                f"the plan is for {self.in_flight} in flight and the job has {most}: make it "
                "again with gadei-ps partition --sync, or lower the job's s_local"
            )

    def passes(self, mini_batches: int) -> list[schedule.Pass]:
        """Return the passes of the stages for the first mini-batches, with their times."""
        passes = [
            _halves(one.forward_s * 1e9, one.backward_s * 1e9, one.transfer_s * 1e9)
            for one in self.stages
        ]
        own = round(self.copy_s * 1e9), round(self.step_s * 1e9)
        return schedule.run(passes, self.in_flight, *own, mini_batches)


def make(
    layers: Sequence[torch.nn.Module],
    sample: Sample,
    devices: Sequence[str | torch.device],
    *,
    in_flight: int,
    limits: Sequence[int] | None = None,
    optimizer: Make | None = None,
    repeats: int = REPEATS,
) -> Plan:
    """Measure layers and devices, and plan the stages.

    layers, devices, optimizer: as VirtualWorker takes them. in_flight: mini-batches, s_local + 1.
    limits: bytes that a stage may have on each device; by default what is free there now, without
    what the learner needs beside its stages, an equal share for each. repeats: passes of each layer
    that are measured. Raises UsageError for a model that cannot be a pipeline, for what layers
    raise, and if no plan fits.
    """
    layers = cutting.modules(layers)
    where = stage_devices.parse(devices)
    check(layers, where, limits)
    if in_flight < 1 or repeats < 1:
        raise UsageError(f"in_flight={in_flight}, repeats={repeats}: give numbers from 1 on")
    trained = Trained.of(torch.nn.Sequential(*layers))
    cutting.check_model(trained)
    own = profiler.learner(trained, optimizer, stage_devices.remaining_threads(where))
    chain = analyze(trained, sample.inputs, sample.targets, sample.loss_function, own.state)
    weights = sum(one.weights for one in chain.pieces)
    most = free(where, own.on_host * weights) if limits is None else limits
    there = [
        Device(one.name, one.kind, one.memory, limit)
        for one, limit in zip(where, most, strict=True)
    ]
    partition.check_fits(chain.memory(in_flight), there)
    by_kind = {one.kind: one for one in reversed(where)}
    times = {
        kind: profiler.times(layers, chain, sample, place, in_flight, repeats)
        for kind, place in by_kind.items()
    }
    profile = Profile(chain, times, profiler.links(where))
    placed = partition.plan(profile, there, in_flight)
    return _plan_of(layers, profile, there, placed, own, in_flight)


def check(
    layers: Sequence[torch.nn.Module], where: Sequence[StageDevice], limits: Sequence[int] | None
) -> None:
    """Raise UsageError for numbers that do not go together."""
    if len(where) > partition.MOST_DEVICES:
        raise UsageError(
            f"devices: {len(where)}, and a plan is for at most {partition.MOST_DEVICES}: "
            "name the best ones"
        )
    cutting.check_count(layers, where)
    if limits is not None and len(limits) != len(where):
        raise UsageError(
            f"memory: {counted(len(limits), 'size')} for {counted(len(where), 'device')}: give one "
            "for each"
        )
    if limits is not None and min(limits) < 1:
        raise UsageError(f"memory: {min(limits)} bytes: give sizes above 0")


def free(where: Sequence[StageDevice], besides: int) -> list[int]:
    """Return bytes of memory that are free at each place, shared by those that have the same.

    On the host without `besides`, and within the memory limits of control groups, beyond which the
    kernel would kill the worker. At least 1.
    """
    limit = cgroups.tightest()
    host = psutil.virtual_memory().available
    host = (host if limit is None else min(host, limit.free)) - besides
    shared = [one.memory for one in where]
    found = {
        name: torch.cuda.mem_get_info(one.device)[0] if one.has_own_memory else host
        for name, one in zip(shared, where, strict=True)
    }
    return [max(1, found[name] // shared.count(name)) for name in shared]


def _plan_of(
    layers: Sequence[torch.nn.Module],
    profile: Profile,
    devices: Sequence[Device],
    placed: Sequence[PlacedStage],
    own: profiler.LearnerTimes,
    in_flight: int,
) -> Plan:
    pieces = profile.chain.pieces
    weights = sum(one.weights for one in pieces)
    on_host = sum(
        sum(piece.weights for piece in pieces[one.first : one.end])
        for one in placed
        if devices[one.device].memory == "host"
    )
    copy, step = (round(ns * on_host / weights) for ns in (own.copy, own.step))
    passes = [_halves(one.forward, one.backward, one.transfer) for one in placed]
    pace = schedule.pace(passes, in_flight, copy, step)
    slowest = max(one.total for one in placed)
    sizes = cutting.sizes(layers)
    return Plan(
        layers=sizes,
        in_flight=in_flight,
        stages=[
            PlannedStage(
                device=devices[one.device].name,
                first_layer=(first := pieces[one.first].first),
                end_layer=(end := pieces[one.end - 1].end),
                parameters=sum(sizes[first:end]),
                forward_s=one.forward / 1e9,
                backward_s=one.backward / 1e9,
                transfer_s=one.transfer / 1e9,
                total_s=one.total / 1e9,
                idle_share=max(0.0, 1 - one.total / pace),
                memory_bytes=one.memory,
                memory_limit_bytes=devices[one.device].limit,
            )
            for one in placed
        ],
        left_out=[
            one.name
            for number, one in enumerate(devices)
            if number not in {stage.device for stage in placed}
        ],
        pieces=[
            PlannedPiece(
                first_layer=one.first,
                end_layer=one.end,
                trained_bytes=one.weights,
                frozen_bytes=one.fixed,
                optimizer_bytes=one.state,
                entering_bytes=one.entering,
                times={
                    kind: PassTimes(
                        forward_s=its.forward[number] / 1e9, backward_s=its.backward[number] / 1e9
                    )
                    for kind, its in profile.times.items()
                },
            )
            for number, one in enumerate(pieces)
        ],
        copy_s=copy / 1e9,
        step_s=step / 1e9,
        learner_bytes=own.on_host * weights - own.in_stages * on_host,
        mini_batches_per_s=1e9 / pace,
        bubble_share=max(0.0, 1 - slowest / pace),
        full_in_flight=schedule.filling(passes, copy, step, FULL),
    )


def _halves(forward: float, backward: float, transfer: float) -> tuple[int, int]:
    """Return a stage's forward and backward pass, with its transfers (ns)."""
    return round(forward + transfer / 2), round(backward + transfer / 2)
