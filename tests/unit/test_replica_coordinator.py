"""A run's coordinator decides only while it reaches Ray's head."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support import PATIENCE_S

from gadei_ps.errors import ControlError
from gadei_ps.groups.coordinator import Report
from gadei_ps.groups.shares import Member

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'gadei-ps[cluster]'", allow_module_level=True)

import ray
from ray.exceptions import RayActorError, RayTaskError

from gadei_ps.replicas import actor, coordinator, rays

RUN = {"name": "a", "every": 1, "groups": [{"machines": 2}]}


class Head:
    """Ray's head, as the coordinator sees it."""

    is_there = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(gcs_address="h:1", was_current_actor_reconstructed=False)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "h")
        monkeypatch.setattr(rays, "answers", lambda _: self.is_there)
        monkeypatch.setattr(coordinator, "TICK_S", 0.001)


def report(number: int) -> Report:
    return Report(Member(str(number), 1), 1, facts={"values": 64})


async def until(is_so: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.001)


def test_nothing_is_decided_without_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(monkeypatch)

    async def decide() -> None:
        made = coordinator.Coordinator({"run": RUN})
        group = made._groups[0]
        for number in (0, 1):
            await made.report(0, report(number), None)
        assert len(group.state.members) == 2
        generation = group.state.generation
        head.is_there = False
        await until(lambda: not made._reached)
        with pytest.raises(ControlError, match="does not reach Ray's head"):
            await made.report(0, report(2), None)
        await made.lost(0, 1)
        await made.publish(0, [])
        assert (len(group.state.members), group.state.generation) == (2, generation)
        head.is_there = True
        await until(lambda: len(group.state.members) == 1)
        answer = await made.report(0, report(0), None)
        assert answer["reply"].state.generation > generation

    asyncio.run(decide())


def test_a_second_command_is_refused_where_the_first_one_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Head(monkeypatch)

    async def follow() -> None:
        made = coordinator.Coordinator({"run": RUN})
        assert await made.follow("one", "a") is None
        second = asyncio.create_task(made.follow("two", "b"))
        await asyncio.sleep(0)
        assert not second.done(), "the first one may have been killed"
        assert await made.follow("one", "a") is None
        assert await second == "one"
        monkeypatch.setattr(coordinator, "FOLLOWED_S", 0.0)
        assert await made.follow("two", "b") is None

    asyncio.run(follow())


def test_versions_of_models_need_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another coordinator publishes what groups have not taken yet, whatever its clock shows."""
    Head(monkeypatch)
    monkeypatch.setattr(coordinator.time, "time_ns", lambda: 0)

    async def publish() -> None:
        two = RUN | {"groups": [{"machines": 1}, {"machines": 1}]}
        made = coordinator.Coordinator({"run": two})
        group = made._groups[1]
        group.state = replace(group.state, taken={0: 500})
        for _ in range(2):
            await made.publish(0, [])
        assert made._published[0] == 502

    asyncio.run(publish())


def test_the_coordinator_is_not_looked_for_while_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wait: without its head, Ray answers that only after a minute."""

    def get(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", get)
    made = actor.ReplicaActor.__new__(actor.ReplicaActor)
    made._coordinator = one = SimpleNamespace(state=SimpleNamespace(remote=lambda: None))
    refused = ControlError("no head")
    error: Exception = RayTaskError("state", "Traceback", refused).as_instanceof_cause()
    with pytest.raises(ControlError, match=r"^the coordinator does not answer: "):
        made._call("state", 1.0)
    assert made._coordinator is one
    error = RayActorError()
    with pytest.raises(ControlError, match=r"^the coordinator does not answer: "):
        made._call("state", 1.0)
    assert made._coordinator is None
