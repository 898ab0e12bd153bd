"""The setting of a simulation of worker groups: replicas, links, neighbours, rounds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from gadei_ps.errors import UsageError
from gadei_ps.groups.compress import Wire
from gadei_ps.simulate.run_times import RunTimes

MOST_MACHINES = 100_000
MOST_LINKS = 1_000_000
MOST_BATCHES = 10_000_000


@dataclass(frozen=True)
class Links:
    """The network. bandwidths: bytes a second that a replica sends, and receives at the same time;
    replica n has the n-th of them, from the first again after the last. latency_s: of a message."""

    bandwidths: tuple[float, ...] = (125e6,)
    latency_s: float = 0.0


@dataclass(frozen=True)
class GroupSetting:
    """One experiment, the same for every rule. Raises UsageError.

    sizes: number of replicas of each group; replicas count through the groups. neighbours: for each
    group the groups to which it broadcasts. values: of the model that is exchanged. k: mini-batches
    of `batch` samples that each replica trains in a round. rounds: the run ends when the groups
    have ended this many rounds on average. whole: see groups_traffic.broadcast.
    """

    sizes: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    times: RunTimes
    values: int = 25_000_000
    k: int = 10
    batch: int = 32
    rounds: int = 100
    seed: int = 0
    wire: Wire = Wire.FLOAT32
    whole: bool = True
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        machines = sum(self.sizes)
        _check(bool(self.sizes) and min(self.sizes) > 0, "each group needs at least 1 replica")
        _check(machines <= MOST_MACHINES, f"at most {MOST_MACHINES:,} replicas, not {machines:,}")
        links = sum(map(len, self.neighbours))
        _check(
            links <= MOST_LINKS,
            f"at most {MOST_LINKS:,} pairs of neighbouring groups, not {links:,}",
        )
        for name in ("values", "k", "batch", "rounds"):
            _check(getattr(self, name) >= 1, f"{name} must be at least 1")
        _check(self.k <= MOST_BATCHES, f"k must be at most {MOST_BATCHES:,} mini-batches")
        speeds = self.links.bandwidths
        _check(
            bool(speeds) and all(0 < one < math.inf for one in speeds), "bandwidths must be above 0"
        )
        _check(0 <= self.links.latency_s < math.inf, "the latency must be at least 0")

    @property
    def machines(self) -> int:
        """Number of replicas in all groups."""
        return sum(self.sizes)


def sizes(text: str, machines: int | None) -> tuple[int, ...]:
    """Parse groups given as `4`, over which the replicas are divided, or as sizes, `3,5,2`.

    machines: None: two in each group. Raises UsageError.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word, re.ASCII) for word in words):
        raise UsageError(f"--groups {text!r}: write numbers like 4 or 3,5,2")
    numbers = tuple(map(int, words))
    if len(numbers) > 1:
        if machines is not None and machines != sum(numbers):
            raise UsageError(
                f"--groups {text!r} has {sum(numbers)} replicas; leave out --machines {machines}"
            )
        return numbers
    count = numbers[0]
    if not count:
        raise UsageError("--groups 0: use 1 or more")
    machines = 2 * count if machines is None else machines
    if not 1 <= count <= machines:
        raise UsageError(f"{machines} replicas cannot be divided into {count} groups")
    whole, more = divmod(machines, count)
    return tuple(whole + (place < more) for place in range(count))


def neighbours(text: str, groups: int) -> tuple[tuple[int, ...], ...]:
    """`ring`, `all`, `none`, or pairs as `0-1,1-2`. Raises UsageError."""
    word = text.strip()
    if word == "none":
        return ((),) * groups
    if word == "all":
        if groups * (groups - 1) > MOST_LINKS:
            raise UsageError(f"--neighbours all: {groups:,} groups have too many pairs; use a ring")
        return tuple(
            tuple((place + step) % groups for step in range(1, groups)) for place in range(groups)
        )
    if word == "ring":
        return tuple(
            tuple(dict.fromkeys(((place + 1) % groups, (place - 1) % groups))) if groups > 1 else ()
            for place in range(groups)
        )
    found: list[list[int]] = [[] for _ in range(groups)]
    for pair in word.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", pair, re.ASCII)
        if not match:
            raise UsageError(f"--neighbours {text!r}: write ring, all, none, or pairs like 0-1,1-2")
        one, other = int(match[1]), int(match[2])
        if one == other or max(one, other) >= groups:
            raise UsageError(
                f"--neighbours {pair.strip()}: groups are numbered from 0 to {groups - 1}, and a "
                "pair has two of them"
            )
        for start, end in ((one, other), (other, one)):
            if end not in found[start]:
                found[start].append(end)
    return tuple(map(tuple, found))


def batches(text: str, samples: int | None, machines: int, batch: int) -> int:
    """k as mini-batches, `100`, or as epochs of a replica's subset, `2epochs`.

    samples: those of the training set, None if unknown. Raises UsageError.
    """
    match = re.fullmatch(r"(\d{1,9})\s*(epochs?)?", text.strip())
    if not match or not int(match[1]):
        raise UsageError(f"--k {text!r}: write mini-batches like 100, or epochs like 2epochs")
    if not match[2]:
        return int(match[1])
    if samples is None:
        raise UsageError(f"--k {text!r}: give --samples of the training set, or --train")
    return int(match[1]) * max(1, math.ceil(samples / machines / batch))


def _check(holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"simulation of groups: {wanted}")
