"""Placement of the replicas of a run on nodes of Ray's cluster, and where they are already."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

import gadei_ps
from gadei_ps.errors import ClusterError
from gadei_ps.replicas import rays, sockets
from gadei_ps.replicas.actor import CALLS, NAMESPACE, ReplicaActor, actor_name, look
from gadei_ps.replicas.config import Run, job_name
from gadei_ps.show.counts import counted

PLACE_S = 30.0
ANSWER_S = 60.0
"""Time limit of the first answer of a new actor, whose process has to start first (s)."""
NODE = "node:"
"""Prefix of the name of a resource that Ray has at one address alone."""

Actors = dict[int, Any]


def group_name(run: str) -> str:
    """Return the name of the run's placement group."""
    return f"gadei-ps-{run}"


def nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that live."""
    return [one for one in ray.nodes() if one["Alive"]]


@dataclass(frozen=True)
class Seat:
    """Requirements of a replica. bundle: resources that Ray reserves for it."""

    number: int
    group: int
    bundle: Mapping[str, float]


def living(run: str) -> dict[int, tuple[str, int]]:
    """Return host and group of each living replica of the run, even if Ray has lost it.

    Of two processes of a replica, which a network partition has left, the one with the older state
    of the group ends. Raises ClusterError for a host whose gadei-ps is another one, or none, or
    that has the run in a cluster of its own.
    """
    by_host = {one["NodeManagerAddress"]: one["NodeID"] for one in nodes()}
    if len(by_host) == 1:  # a driver is on a node, which may be of a cluster of this host's own
        looks = {host: look(run) for host in by_host}
    else:
        asked = {host: _on(node, look, run) for host, node in by_host.items()}
        looks = {host: _look_at(host, one, run) for host, one in asked.items()}
    there = sorted(
        (number, settings.get("version", ()), host, settings.get("group", 0))
        for host, found in looks.items()
        for number, settings in found["living"].items()
    )
    newest = {number: (host, group) for number, _, host, group in there}
    for number, _, host, _ in there:
        if newest[number][0] != host:
            _on(by_host[host], sockets.ask, run, number, "stop")
    return newest


def _on(node: str, work: Callable[..., Any], *given: Any) -> Any:
    """Call a function on a node of the cluster; return a reference to its result."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(work)
    return task.options(scheduling_strategy=strategy).remote(*given)


def seats(run: Run, there: Mapping[int, tuple[str, int]]) -> list[Seat]:
    """Return seats: living replicas stay where they are, others fill the groups to their sizes."""
    found = []
    numbers = run.numbers()
    for place, group in enumerate(run.groups):
        bundles = list(group.bundles())
        for number in sorted(one for one, (_, ours) in there.items() if ours == place):
            node = f"{NODE}{there[number][0]}"
            fitting = [one for one in bundles if node in one] or [
                one for one in bundles if not any(name.startswith(NODE) for name in one)
            ]
            if fitting:
                bundles.remove(fitting[0])
            found.append(Seat(number, place, {"CPU": 1, **group.resources, node: 0.001}))
        free = (n for n, ours in enumerate(numbers) if ours == place and n not in there)
        found += [Seat(number, place, one) for number, one in zip(free, bundles, strict=False)]
    return found


def _look_at(host: str, reference: Any, run: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = ray.get(reference, timeout=ANSWER_S)
    except Exception as error:
        raise ClusterError(f"node {host}: {line(error)}") from None
    check(host, found)
    if found["own"]:
        raise ClusterError(
            f"run {run} is on host {host} already, in a Ray cluster of its own: stop it there "
            f"first (gadei-ps group stop {run}), or give this one another name"
        )
    return found


def line(error: BaseException) -> str:
    """Describe why a node cannot carry out a request, in one line."""
    text = rays.described(error)
    if "No module named 'gadei_ps" in str(error):
        return "gadei-ps is not installed there: pip install 'gadei-ps[cluster]'"
    return text


def check(host: str, found: dict[str, Any]) -> None:
    """Raise ClusterError if a node's versions are not ours."""
    for name, ours in (("gadei_ps", gadei_ps.__version__), ("ray", ray.__version__)):
        if found[name] != ours:
            what = name.replace("_", "-")
            raise ClusterError(
                f"node {host} has {what} {found[name]}, this one {ours}: install the same on both"
            )


def place(run: Run) -> Actors:
    """Make actors for all replicas of the run, each on a node of its own.

    A cluster of this host's own has one node for all, even if others have joined. The actor of a
    replica whose process lives already is on that host. Raises ClusterError.
    """
    wanted = seats(run, living(run.name))
    if rays.own_address(run.name) is not None:
        return {one.number: actor(run.name, one.number, one.group, "DEFAULT") for one in wanted}
    _check_nodes(run.name, wanted, nodes())
    drop(run.name)
    bundles = [dict(one.bundle) for one in wanted]
    made = placement_group(
        bundles, strategy="STRICT_SPREAD", name=group_name(run.name), lifetime="detached"
    )
    if not made.wait(PLACE_S):
        drop(run.name)
        raise ClusterError(
            f"{run.name}: Ray has no place for {counted(len(wanted), 'replica')}, each on a node "
            "of its own with a free CPU and its `resources`: see `ray status`"
        )
    return {
        one.number: actor(
            run.name, one.number, one.group, PlacementGroupSchedulingStrategy(made, place)
        )
        for place, one in enumerate(wanted)
    }


def _check_nodes(run: str, wanted: Sequence[Seat], known: Sequence[Mapping[str, Any]]) -> None:
    """Raise ClusterError if a cluster of these nodes cannot have all seats: Ray would only wait.

    known: a result of `nodes()`.
    """
    have = Counter(name for one in known for name in one["Resources"] if name.startswith(NODE))
    asked = [(address, one.number) for one in wanted if (address := _address(one.bundle))]
    missing = [address for address, _ in asked if not have[NODE + address]]
    if missing:
        raise ClusterError(f"{run}: {_no_nodes(missing, known)}, or correct `nodes`")
    for address, _ in asked:
        ours, free = [number for at, number in asked if at == address], have[NODE + address]
        if len(ours) > free:
            raise ClusterError(
                f"{run}: replicas {', '.join(map(str, ours))} are to be at {address}, or train "
                f"there already, and the cluster has {counted(free, 'node')} there: correct "
                f"`nodes`, or end a replica there (gadei-ps stop {job_name(run, ours[-1])})"
            )
    if len(known) < len(wanted):
        raise ClusterError(
            f"{run}: {len(wanted)} replicas are wanted, and the cluster has {len(known)}: start "
            "Ray on more (ray start --address), or ask for fewer"
        )


def _no_nodes(missing: Sequence[str], known: Sequence[Mapping[str, Any]]) -> str:
    what = "is not a node" if len(missing) == 1 else "are not nodes"
    there = ", ".join(sorted({one["NodeManagerAddress"] for one in known}))
    return (
        f"{', '.join(missing)} {what} of the cluster; its nodes are {there}: start Ray there (ray "
        "start --address)"
    )


def _address(bundle: Mapping[str, float]) -> str:
    """Return the address of the node that a bundle requires; empty if any node will do."""
    return next((one.removeprefix(NODE) for one in bundle if one.startswith(NODE)), "")


def detached(kind: type, name: str, calls: int, strategy: Any, *given: Any, **options: Any) -> Any:
    """Make an actor, which outlives the program that has made it, and is started again."""
    made = ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=calls,
        num_cpus=0,
        scheduling_strategy=strategy,
        **options,
    )
    return made.remote(*given)


def actor(run: str, number: int, group: int, strategy: Any) -> Any:
    """Make the actor of a replica."""
    name = actor_name(run, number)
    return detached(ReplicaActor, name, CALLS, strategy, run, number, group)


def beside(
    run: str, number: int, group: int, used: Collection[str], host: str | None = None
) -> Any:
    """Make an actor on a node without a replica of the run. Raises ClusterError if there is none.

    used: nodes that have one. host: the node's address, if it must be a certain one.
    """
    known = nodes()
    if host is not None and host not in {one["NodeManagerAddress"] for one in known}:
        raise ClusterError(f"run {run}: {_no_nodes([host], known)}, or name another one")
    for one in known:
        if one["NodeID"] not in used and host in (None, one["NodeManagerAddress"]):
            strategy = NodeAffinitySchedulingStrategy(one["NodeID"], soft=False)
            return actor(run, number, group, strategy)
    where = f"node {host} has" if host else "all nodes have"
    raise ClusterError(
        f"{where} a replica of {run} already: start Ray on another one (ray start --address)"
    )


def drop(run: str) -> None:
    """Release what Ray has reserved for the run."""
    with contextlib.suppress(ValueError):  # there is nothing
        remove_placement_group(get_placement_group(group_name(run)))
