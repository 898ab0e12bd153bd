"""Errors about a cluster that cannot have the replicas of a run."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import gadei_ps
from gadei_ps.errors import ClusterError
from gadei_ps.replicas import config, rays, sockets

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

import ray

from gadei_ps.replicas import actor, placing

RUN = {"name": "a", "every": 1, "groups": [{"machines": 2}, {"nodes": ["x", "y"]}]}


def cluster(*addresses: str) -> list[dict[str, Any]]:
    """Return nodes at these addresses, as Ray reports them."""
    head = {"node:__internal_head__": 1.0}
    return [
        {"NodeManagerAddress": one, "Resources": {"CPU": 1.0, f"node:{one}": 1.0} | head}
        for one in addresses
    ]


@pytest.mark.parametrize(
    ("addresses", "there", "why"),
    [
        ("xyzw", {}, ""),
        ("xyzw", {7: ("z", 0)}, ""),
        ("xzzw", {}, "a: y is not a node of the cluster; its nodes are w, x, z: start Ray there "),
        # The same if there are too few: which are missing says more than how many.
        ("zw", {}, "a: x, y are not nodes of the cluster; its nodes are w, z: start Ray"),
        ("xyw", {}, "a: 4 replicas are wanted, and the cluster has 3: start Ray on more"),
        # Ray would never place them: each has a node of its own.
        (
            "xyzw",
            {0: ("z", 0), 1: ("z", 0)},
            "a: replicas 0, 1 are to be at z, or train there already, and the cluster has 1 node "
            "there: correct `nodes`, or end a replica there (gadei-ps stop a-1)",
        ),
        ("xyzz", {0: ("z", 0), 1: ("z", 0)}, ""),
        ("xyzw", {0: ("x", 0)}, "a: replicas 0, 2 are to be at x, or train there already"),
    ],
)
def test_a_cluster_that_cannot_have_all_machines(
    addresses: str, there: dict[int, tuple[str, int]], why: str
) -> None:
    """It is said at once: Ray itself would wait."""
    wanted = placing.seats(config.from_mapping(RUN, "test"), there)
    with pytest.raises(ClusterError) if why else contextlib.nullcontext() as caught:
        placing._check_nodes("a", wanted, cluster(*addresses))
    assert not why or str(caught.value).startswith(why)  # type: ignore[union-attr]


def test_a_machine_joins_on_no_node_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [one | {"NodeID": one["NodeManagerAddress"]} for one in cluster("x", "y")]
    monkeypatch.setattr(placing, "nodes", lambda: known)
    with pytest.raises(
        ClusterError, match=r"^run a: z is not a node of the cluster; its nodes are x"
    ):
        placing.beside("a", 0, 0, ["x"], "z")
    with pytest.raises(ClusterError, match=r"^node x has a replica of a already: start Ray on ano"):
        placing.beside("a", 0, 0, ["x"], "x")


def test_of_two_processes_of_a_replica_the_one_with_the_older_state_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray has started it again elsewhere while its host was cut off, and has been lost itself."""
    facts = {"gadei_ps": gadei_ps.__version__, "ray": ray.__version__, "own": False}
    living = {
        "x": {0: {"group": 0, "version": (1, 9)}, 1: {}, 2: {"group": 1, "version": (1, 7)}},
        "y": {0: {"group": 0, "version": (2, 3)}, 1: {"group": 1, "version": ()}},
        "z": {2: {"group": 1, "version": (1, 5)}},
    }
    known = [one | {"NodeID": f"node {one['NodeManagerAddress']}"} for one in cluster(*living)]
    ended: list[tuple[Any, ...]] = []

    def on(node: str, work: Any, *given: Any) -> Any:
        if work is actor.look:
            return facts | {"living": living[node.removeprefix("node ")]}
        assert work is sockets.ask
        return ended.append((node, *given))

    monkeypatch.setattr(placing, "nodes", lambda: known)
    monkeypatch.setattr(placing, "_on", on)
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    assert placing.living("a") == {0: ("y", 0), 1: ("y", 1), 2: ("x", 1)}
    wanted = [("node x", "a", 0), ("node x", "a", 1), ("node z", "a", 2)]
    assert ended == [(*one, "stop") for one in wanted]


def test_machines_of_another_cluster_are_not_taken(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a host's own cluster train for another `group run`, where no other host reaches
    them."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "h")
    monkeypatch.setattr(actor.sockets, "here", lambda _: [0])
    monkeypatch.setattr(actor, "_settings", lambda *_: {"group": 0})
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    rays.note("a", "127.0.0.2:1", "a token")
    rays.note("b", "h:1", None)
    with pytest.raises(ClusterError, match="run a is on host h already, in a Ray cluster of its "):
        placing._look_at("h", actor.look("a"), "a")
    assert placing._look_at("h", actor.look("b"), "b")["living"] == {0: {"group": 0}}
