"""Placement of shards: pure decisions for invented machines, and binding of a real thread."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from gadei_ps.machine import placement

TWO_SOCKETS = {0: set(range(32)), 1: set(range(32, 64))}


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", [0]), ("0-3,8", [0, 1, 2, 3, 8]), ("5,1", [5, 1]), ("2-2", [2])],
)
def test_lists_of_cores(text: str, cores: list[int]) -> None:
    assert placement.parse(text) == cores


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "0-", "0 1", "1.5", "3-1"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"0-3,8|lowest"):
        placement.parse(text)


def test_nodes_as_the_kernel_tells_them(tmp_path: Path) -> None:
    for node, cores in ((0, "0-1,4"), (1, "2-3\n"), (2, "\n")):  # the last has memory only
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    (tmp_path / "node7").mkdir()
    assert placement.nodes(tmp_path) == {0: {0, 1, 4}, 1: {2, 3}}
    assert placement.nodes(tmp_path / "none") == {}


MAPS = """\
7f0000000000 default file=/dev/shm/a dirty=10 mapmax=3 N0=3 N1=7 kernelpagesize_kB=4
7f0000100000 default file=/dev/shm/b dirty=4 N0=4 kernelpagesize_kB=4
7f0000200000 default
"""


@pytest.mark.parametrize(
    ("address", "node"),
    [(0x7F0000000000, 1), (0x7F0000100000, 0), (0x7F0000200000, None), (0x1000, None)],
)
def test_home_of_the_weights(address: int, node: int | None) -> None:
    assert placement.home(address, MAPS) == node


def test_shards_stay_on_the_socket_of_the_weights() -> None:
    every = set(range(64))
    assert placement.cores_of_shard(3, [], every, TWO_SOCKETS, 1) == set(range(32, 64))
    assert placement.cores_of_shard(3, [], set(range(40)), TWO_SOCKETS, 1) == set(range(32, 40))
    # A container may not run where the weights lie.
    assert placement.cores_of_shard(3, [], {1, 2}, TWO_SOCKETS, 1) == {1, 2}
    assert placement.cores_of_shard(3, [], every, TWO_SOCKETS, None) == every


def test_one_socket_is_left_to_the_scheduler() -> None:
    assert placement.cores_of_shard(0, [], {0, 1}, {0: {0, 1}}, 0) == {0, 1}


def test_cores_asked_for_are_taken_in_turn() -> None:
    for shard, core in enumerate([4, 6, 5, 4]):
        assert placement.cores_of_shard(shard, [4, 6, 5], set(range(8)), {}, None) == {core}
    assert placement.cores_of_shard(0, [4, 6], {6}, {}, None) == {6}
    assert placement.cores_of_shard(0, [4], {6}, {}, None) == {6}  # none of them is to be had


def test_a_thread_is_bound_and_no_other() -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    seen = []

    def run() -> None:
        placement.bind(0, [core], 0)
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == allowed
