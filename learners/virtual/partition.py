"""Partitions a chain of layers into stages for unequal devices: the slowest as fast as can be.

After Park et al. 2020 (HetPipe), whose own solver is an integer program. The order of the devices
is chosen as well. A dynamic programme over (pieces that are placed, devices that are used, the last
of them) is exact: what the stages after a cut cost depends on nothing else. The device of the stage
before counts for what is brought from it, and the last stage has the activations of one mini-batch
only. Times are whole nanoseconds, so that equal plans are equal.

Of k devices and n pieces there are k^2 2^k steps of n^2 cells each, which NumPy computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gadei_ps.errors import UsageError

MOST_DEVICES = 8
WORTH = 0.99
"""A device is left out if the slowest stage then takes less than this share of its time."""
_NEVER = 1 << 60  # above every time and size; twice it is still a 64-bit number

Cells = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Piece:
    """Layers that stay together: one, or several where no cut may be."""

    first: int
    end: int
    weights: int
    """Bytes of the parameters that are trained."""
    fixed: int
    """Bytes of other parameters and of buffers."""
    state: int
    """Bytes that the optimizer keeps for its weights."""
    entering: int
    """Bytes of the tensor that enters it."""
    returns: bool
    """Whether the gradient of that tensor goes back."""


@dataclass(frozen=True)
class Activation:
    """Memory that a mini-batch holds from a forward pass to the backward pass."""

    size: int
    """Bytes."""
    pieces: frozenset[int]
    """Those that need it."""
    borders: frozenset[int]
    """Pieces that it enters; it is held on both sides of a cut there."""


@dataclass(frozen=True)
class Chain:
    """Facts about the layers that need no measurement of times."""

    pieces: tuple[Piece, ...]
    held: tuple[Activation, ...]
    leaving: int
    """Bytes of what the last layer returns."""

    def memory(self, in_flight: int) -> Cells:
        """Return bytes of each stage; [a, b] of one from piece a to before piece b, n + 1 by n + 1.

        The weights once, and a copy and a gradient for each mini-batch in flight; the optimizer's
        state; what is not trained; the gradients of activations that a backward pass holds,
        and those that wait for theirs; and the activations of all mini-batches in flight, or, of
        the last stage, of one.
        """
        count = len(self.pieces)
        cells = np.full((count + 1, count + 1), _NEVER, np.int64)
        sizes = [*(one.entering for one in self.pieces), self.leaving]
        needed = [
            {n for n, one in enumerate(self.held) if at in one.pieces} for at in range(count + 1)
        ]
        entering = [
            {n for n, one in enumerate(self.held) if at in one.borders} for at in range(count + 1)
        ]
        for a in range(count):
            known: set[int] = set()
            held = own = arriving = 0
            for b in range(a + 1, count + 1):
                piece = self.pieces[b - 1]
                own += piece.weights * (2 * in_flight + 1) + piece.state + piece.fixed
                arriving = max(arriving, sizes[b - 1] + sizes[b])
                held += sum(self.held[n].size for n in needed[b - 1] - known)
                known |= needed[b - 1]
                ends = sum(self.held[n].size for n in (entering[a] | entering[b]) - known)
                last = b == count
                waiting = 0 if last else sizes[b] * (in_flight - 1)
                cells[a, b] = own + arriving + waiting + (held + ends) * (1 if last else in_flight)
        return cells


@dataclass(frozen=True)
class Times:
    """Times of all pieces on one kind of device (ns)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    stage_forward: int
    """Time of a stage for a forward pass besides its layers (ns)."""
    stage_backward: int

    def stages(self) -> Cells:
        """Return forward and backward pass of each stage; [a, b] as in Chain.memory."""
        both = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        before = np.array([0, *itertools.accumulate(both)], np.int64)
        found = before[None, :] - before[:, None] + self.stage_forward + self.stage_backward
        below = np.tri(len(before), dtype=bool)  # no layer, or less than none
        return np.where(below, _NEVER, found)


@dataclass(frozen=True)
class Device:
    """Device that a stage may have."""

    name: str
    """Name as VirtualWorker takes it."""
    kind: str
    """Devices of one kind are equally fast."""
    memory: str
    """Devices with the same one hand tensors on without a copy."""
    limit: int
    """Bytes that a stage may have there."""


@dataclass(frozen=True)
class Link:
    """Transfers between two memories."""

    latency: int
    """Fixed time of a copy (ns)."""
    byte: float
    """ns of each byte."""


@dataclass(frozen=True)
class PlacedStage:
    """A stage of a plan. Times in ns, memory in bytes."""

    device: int
    first: int
    end: int
    """Facts about its pieces."""
    forward: int
    backward: int
    transfer: int
    """Cost of transfers of activations from the stage before, and of gradients back."""
    memory: int

    @property
    def total(self) -> int:
        return self.forward + self.backward + self.transfer


@dataclass(frozen=True)
class Profile:
    """All that a plan is made of."""

    chain: Chain
    times: Mapping[str, Times]
    """Times by the kind of device."""
    links: Mapping[tuple[str, str], Link]
    """Transfers by memories: from and to."""


def plan(profile: Profile, devices: Sequence[Device], in_flight: int) -> list[PlacedStage]:
    """Return the stages, first to last, of the plan whose slowest stage is as fast as can be.

    It takes all devices, unless that is slower by more than a hundredth, or none fits then. Of
    plans whose slowest stages are equal, the one whose stages take the least time together; of
    these the one whose first stage has the device that `devices` names first, and most pieces
    there; then the second stage, and so on. Raises UsageError if no plan fits.
    """
    chain, times = profile.chain, profile.times
    needs = chain.memory(in_flight)
    check_fits(needs, devices)
    transfers = _transfers(profile, devices)
    costs = [np.where(needs <= one.limit, times[one.kind].stages(), _NEVER) for one in devices]
    search = _Search(costs, transfers, slowest=True)
    wanted = search.least()
    for count in range(min(len(devices), len(chain.pieces)), 0, -1):
        slowest = search.least(count)
        if slowest < _NEVER and wanted >= slowest * WORTH:
            break
    search = _Search(costs, transfers, slowest=False, cap=slowest)
    search.least(count)
    made: list[PlacedStage] = []
    for device, a, b in search.stages(count):
        its = times[devices[device].kind]
        made.append(
            PlacedStage(
                device=device,
                first=a,
                end=b,
                forward=sum(its.forward[a:b]) + its.stage_forward,
                backward=sum(its.backward[a:b]) + its.stage_backward,
                transfer=int(transfers[made[-1].device if made else -1][device][a]),
                memory=int(needs[a, b]),
            )
        )
    return made


def check_fits(needs: Cells, devices: Sequence[Device]) -> None:
    """Raise UsageError, with the memory that would do, if no plan fits. needs: Chain.memory()."""
    nothing = [np.zeros(len(needs), np.int64)] * len(devices)

    def least(costs: list[Cells]) -> int:
        return _Search(costs, [nothing] * (len(devices) + 1), slowest=True).least()

    fits = [np.where(needs <= one.limit, 0, _NEVER) for one in devices]
    if least(fits) < _NEVER:
        return
    more, number = min(
        (least([*fits[:number], needs, *fits[number + 1 :]]) - one.limit, number)
        for number, one in enumerate(devices)
    )
    # Or all of them some: the least factor, in hundredths.
    shares = [np.where(needs < _NEVER, -(-needs * 100 // one.limit), _NEVER) for one in devices]
    limit = devices[number].limit
    every = f", or all devices need {least(shares) / 100:.2f} times what they may have"
    raise UsageError(
        f"no plan fits into the memory: {_at(devices, number)} needs at least "
        f"{_mib(limit + more)} and may have {_mib(limit)}{every if len(devices) > 1 else ''}; "
        "lower s_local, take smaller mini-batches, or name more devices"
    )


def _transfers(profile: Profile, devices: Sequence[Device]) -> list[list[Cells]]:
    """Return the time of transfers by cut (ns), for the device of the stage before (the last entry:
    there is none) and its own."""
    pieces = profile.chain.pieces

    def cells(before: Device | None, own: Device) -> Cells:
        found = np.zeros(len(pieces) + 1, np.int64)
        if before is not None and before.memory != own.memory:
            there = profile.links[before.memory, own.memory]
            back = profile.links[own.memory, before.memory]
            for number, piece in enumerate(pieces):
                ways = (there, back) if piece.returns else (there,)
                found[number] = sum(way.latency + round(way.byte * piece.entering) for way in ways)
        return found

    return [[cells(before, one) for one in devices] for before in (*devices, None)]


class _Search:
    """The least cost of placing all pieces; of the slowest stage, or of all stages together."""

    def __init__(
        self,
        costs: Sequence[Cells],
        transfers: Sequence[Sequence[Cells]],
        *,
        slowest: bool,
        cap: int = _NEVER - 1,
    ) -> None:
        """costs: of each device. transfers: of the device before and its own. cap: of a stage."""
        self._devices = len(costs)
        self._count = len(costs[0]) - 1
        self._combined = np.maximum if slowest else np.add
        self._cells = [
            [
                np.where((whole := cost + bring[:, None]) <= cap, whole, _NEVER)
                for cost, bring in zip(costs, row, strict=True)
            ]
            for row in transfers
        ]
        self._best: dict[tuple[int, int], Cells] = {}

    def least(self, count: int | None = None) -> int:
        """Return the least cost with `count` stages, or any number; _NEVER if nothing fits."""
        everything = 1 << self._devices
        self._best = {}
        for used in sorted(range(everything), key=int.bit_count, reverse=True):
            placed = used.bit_count()
            if count is not None and placed > count:
                continue
            for last in range(self._devices) if used else (-1,):
                if used and not used >> last & 1:
                    continue
                best = np.full(self._count + 1, _NEVER, np.int64)
                if count is None or placed == count:
                    best[-1] = 0
                if count is None or placed < count:
                    for device in range(self._devices):
                        if not used >> device & 1:
                            after = self._best[used | 1 << device, device]
                            whole = self._combined(self._cells[last][device], after)
                            np.minimum(best, whole.min(axis=1), out=best)
                self._best[used, last] = best
        return int(self._best[0, -1][0])

    def stages(self, count: int) -> list[tuple[int, int, int]]:
        """Return device, first piece and end of each stage, after least(count)."""
        found: list[tuple[int, int, int]] = []
        used, last, at = 0, -1, 0
        while len(found) < count:
            device, end = next(
                (device, end)
                for device in range(self._devices)
                if not used >> device & 1
                for end in range(self._count, at, -1)
                if self._combined(
                    self._cells[last][device][at, end], self._best[used | 1 << device, device][end]
                )
                == self._best[used, last][at]
            )
            found.append((device, at, end))
            used, last, at = used | 1 << device, device, end
        return found


def _at(devices: Sequence[Device], number: int) -> str:
    same = sum(one.name == devices[number].name for one in devices) > 1
    return f"device {number} ({devices[number].name})" if same else devices[number].name


def _mib(size: int) -> str:
    """Return the size in MiB or KiB, rounded up."""
    if size < 2**20:
        return f"{math.ceil(size / 1024)} KiB"
    return f"{math.ceil(size / 2**20 * 10) / 10:,.1f} MiB"
