"""Placement of a server's shards on cores. All functions are pure except bind().

Shards stream weights through their core's memory controller. On a machine with several nodes (two
sockets, say) they are kept on the node whose memory holds the weights. On other
machines the scheduler decides: a bound shard would wait for a learner that runs on its core.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NODES = Path("/sys/devices/system/node")
CORE_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def parse(text: str) -> list[int]:
    """Return the cores of a list as the kernel writes them, '0-3,8'. Raises ValueError."""
    if not CORE_LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of cores: write it as 0-3,8")
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if int(high or low) < int(low):
            raise ValueError(f"{part!r}: the first core of a range is its lowest")
        found += range(int(low), int(high or low) + 1)
    return found


def nodes(root: Path = NODES) -> dict[int, set[int]]:
    """Return the cores by node of the machine; {} if the kernel does not list them."""
    found = {}
    for path in root.glob("node[0-9]*"):
        try:
            listed = (path / "cpulist").read_text().strip()
        except OSError:
            continue
        if listed:
            found[int(path.name.removeprefix("node"))] = set(parse(listed))
    return found


def home(address: int, maps: str) -> int | None:
    """The node that holds most pages of the mapping at this address, of /proc/self/numa_maps."""
    for line in maps.splitlines():
        first, _, rest = line.partition(" ")
        if int(first, 16) == address:
            pages = {int(n): int(count) for n, count in re.findall(r"\bN(\d+)=(\d+)", rest)}
            return max(pages, key=lambda node: pages[node]) if pages else None
    return None


def cores_of_shard(
    shard: int, wanted: list[int], allowed: set[int], by_node: dict[int, set[int]], node: int | None
) -> set[int]:
    """Return the cores for a shard: one of the requested cores, else those of the weights' node."""
    usable = [core for core in wanted if core in allowed]
    if usable:
        return {usable[shard % len(usable)]}
    if len(by_node) > 1 and node is not None:
        return (by_node.get(node, set()) & allowed) or allowed
    return allowed


def bind(shard: int, wanted: list[int], address: int) -> None:
    """Bind the calling thread, a shard's, to its cores. address: of the weights' mapping.

    Raises OSError or ValueError if the system does not show the cores, or does not allow it.
    """
    allowed, by_node = os.sched_getaffinity(0), nodes()
    node = None
    if len(by_node) > 1 and not wanted:
        node = home(address, Path("/proc/self/numa_maps").read_text())
    chosen = cores_of_shard(shard, wanted, allowed, by_node, node)
    if chosen != allowed:
        os.sched_setaffinity(0, chosen)
