"""A group of real processes: equal results, and deaths, hangs and damage in every phase."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import agents
from support.agents import HANDSHAKE_BYTES, IDENTITY, Proxy, digest, join, machines, together

from gadei_ps.agents import mesh as meshes
from gadei_ps.agents import round_state
from gadei_ps.agents.listener import Listener
from gadei_ps.agents.mesh import Mesh
from gadei_ps.errors import AgentError, UsageError
from gadei_ps.groups import parts

VALUES = 400_000
PART_BYTES = 4 * VALUES // 3


def mean(numbers: list[int], samples: list[int], values: int) -> np.ndarray:
    """The reference: products and sums rounded to float32, in the members' order."""
    result = np.empty(values, np.float32)
    models = [agents.model(number, values) for number in numbers]
    parts.aggregate(models, parts.shares(samples), result)
    return result


def test_all_members_hold_the_same_bits_and_send_what_the_paper_says() -> None:
    """Also when a member weighs nothing, when nobody has samples, and of one value."""
    with machines(3) as group:
        for generation, (values, samples) in enumerate(
            [(1, [1, 1, 1]), (200, [1, 0, 5]), (VALUES, [0, 0, 0]), (VALUES, [3, 1, 2])], 1
        ):
            join(group, generation, values)
            for round_number in range(2):
                for one, count in zip(group, samples, strict=True):
                    one.begin("aggregate", round_number, count)
                wanted = digest(mean([0, 1, 2], samples, values))
                for one in group:
                    result, unchanged, sent = one.end()
                    assert result == wanted
                    assert unchanged == digest(agents.model(one.number, values))
                    if values == VALUES:
                        assert sent == pytest.approx(2 * 2 / 3 * 4 * VALUES, rel=0.01)


# Bytes of the stream of member 2 to 0: what it says, the sums' pieces, its part, the last header.
PHASES = {
    "before": 1,
    "reduce": PART_BYTES // 2,
    "gather": PART_BYTES + PART_BYTES // 2,
    "done": 2 * PART_BYTES + 56 * 9 + 20 + agents.SAID_BYTES,
}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_of_a_death_end_the_round_alike(phase: str, how: signal.Signals) -> None:
    with machines(3, silence_s=0.5, piece_s=1000) as group:  # silence alone ends a hang
        victim = group[2]

        def change(at: int, data: bytes) -> bytes | None:
            if at + len(data) < HANDSHAKE_BYTES + PHASES[phase]:
                return data
            victim.child.signal(how)
            # The victim may have sent more before it died: that never arrives, unless all shall.
            return data if phase == "done" else None

        with Proxy(group[0].address, change) as proxy:
            join(group, 1, VALUES, {2: {0: proxy.address}})
            for one in group:
                one.begin("aggregate", 5, one.number)
            survivors = group[:2]
            answers = [one.end() for one in survivors]
            lost = [one for one in answers if one[0] == "lost"]
            assert all(one[1] == 2 for one in lost)
            if phase != "done":
                assert len(lost) == 2
            join(survivors, 2, VALUES)
            # A survivor that has the result may have gone on; it then begins the next round.
            for one, answer in zip(survivors, answers, strict=True):
                one.begin("settle", 5 if answer[0] == "lost" else 6)
            settled = [one.end() for one in survivors]
            whole = digest(mean([0, 1, 2], [0, 1, 2], VALUES))
            took = [answer[0] for answer in answers if answer[0] != "lost"]
            took += [
                result
                for answer, (done, result) in zip(answers, settled, strict=True)
                if answer[0] == "lost" and done
            ]
            assert took in ([], [whole, whole])
            if not took:
                again = together(survivors, "aggregate", 5, 4)
                wanted = digest(mean([0, 1], [4, 4], VALUES))
                assert [one[0] for one in again] == [wanted, wanted]


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 4]) + data[1:]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (flip, "damaged"),
        (lambda data: data + data, "damaged|nobody awaits"),
        (lambda data: data[1:], "damaged|nobody awaits"),
        (lambda data: None, "not sent in time"),
    ],
    ids=["flipped", "doubled", "cut", "held back"],
)
def test_a_harmed_stream_is_named_and_changes_nothing(harm, why: str) -> None:  # type: ignore[no-untyped-def]
    harmed: list[int] = []

    def change(at: int, data: bytes) -> bytes | None:
        if at < HANDSHAKE_BYTES + PHASES["reduce"] or (harmed and why != "not sent in time"):
            return data
        harmed.append(at)
        return harm(data)  # type: ignore[no-any-return]

    with machines(3, piece_s=0.5) as group:
        with Proxy(group[0].address, change) as proxy:
            join(group, 1, VALUES, {2: {0: proxy.address}})
            answers = together(group, "aggregate", 1, 1)
        assert harmed
        assert {one[0] for one in answers} == {"lost"}
        # While a piece is held back both ends wait for each other; either may say so first.
        ends = (0, 2) if why == "not sent in time" else (0,)
        named = [end for end in ends if re.search(why, answers[end][2])]
        assert named
        assert all(answers[end][1] == 2 - end for end in named)
        # Both ends may have named each other at the same time, the second for another reason.
        assert answers[1][1] in (ends if len(ends) > 1 else [2])
        assert answers[1][2] == "is lost, says another member"
        join(group, 2, VALUES)
        assert [one[0] for one in together(group, "settle", 1)] == [False] * 3
        results = together(group, "aggregate", 1, 1)
        assert {one[0] for one in results} == {digest(mean([0, 1, 2], [1, 1, 1], VALUES))}


def test_an_idle_group_sees_a_death_and_takes_in_a_newcomer() -> None:
    with machines(3) as group:
        join(group, 1, VALUES)
        assert len({one[0] for one in together(group, "aggregate", 1, 1)}) == 1
        group[1].child.kill()
        left = [group[0], group[2]]
        answers = together(left, "aggregate", 2, 1)
        assert [one[:2] for one in answers] == [("lost", 1)] * 2
        newcomer = agents.Machine(3, 1.0, 5.0)
        try:
            left.append(newcomer)
            join(left, 2, VALUES)
            # The last result that all had taken can still be had, from those who hold it.
            assert [one[0] for one in together(left, "settle", 2)] == [False] * 3
            assert len({one[0] for one in together(left, "aggregate", 2, 1)}) == 1
        finally:
            newcomer.child.kill()


def test_a_newcomer_gets_what_the_others_hold() -> None:
    """Members that lack a round's result, or have never seen it, fetch its parts."""
    with machines(2) as group:
        join(group, 1, VALUES)
        whole = together(group, "aggregate", 1, 1)[0][0]
        group[0].child.kill()
        newcomer = agents.Machine(2, 1.0, 5.0)
        try:
            left = [group[1], newcomer]
            join(left, 2, VALUES)
            assert together(left, "settle", 1) == [(True, whole)] * 2
        finally:
            newcomer.child.kill()


def test_members_say_more_than_connections_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large group. If all sent before they read, all would wait for one another."""
    for module, name in ((meshes, "MOST_SAID"), (round_state, "MOST_SAID")):
        monkeypatch.setattr(module, name, 1 << 20)
    monkeypatch.setattr(round_state, "MOST_BYTES", 1 << 22)
    said, values = [os.urandom(1 << 20) for _ in range(3)], np.ones(100, np.float32)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(3))
        doors = [Listener(("127.0.0.1", 0), IDENTITY) for _ in said]
        group = [Mesh(door, number) for number, door in enumerate(doors)]
        for one in (*doors, *group):
            stack.callback(one.close)
        addresses = {number: door.address for number, door in enumerate(doors)}
        outs = [np.zeros_like(values) for _ in said]

        def form(number: int, generation: int = 1) -> None:
            group[number].join(generation, addresses, values.size)

        def aggregate(number: int) -> None:
            group[number].aggregate(5, values, outs[number], said=said[number])

        def settle(number: int) -> None:
            assert group[number].settle(5, outs[number])

        for step in (form, aggregate, functools.partial(form, generation=2), settle):
            list(pool.map(step, range(3)))
            assert step is form or all(list(one.said) == said for one in group)


def test_a_group_of_one_and_wrong_uses() -> None:
    door = Listener(("127.0.0.1", 0), IDENTITY)
    mesh = Mesh(door, 4)
    values, out = np.ones(100, np.float32), np.zeros(100, np.float32)
    try:
        with pytest.raises(UsageError, match="0 values"):
            mesh.aggregate(1, values, out)
        with pytest.raises(UsageError, match="members"):
            mesh.join(1, {5: door.address}, 100)
        mesh.join(1, {4: door.address}, 100)
        mesh.aggregate(1, values, out)
        assert (out == 1).all()
        for wrong in (out[:50], out.astype(np.float64), np.ones(200, np.float32)[::2]):
            with pytest.raises(UsageError, match="contiguous"):
                mesh.aggregate(2, values, wrong)
        with pytest.raises(UsageError, match="same memory"):
            mesh.aggregate(2, out, out)
        with pytest.raises(UsageError, match="samples"):
            mesh.aggregate(2, values, out, samples=-1)
        with pytest.raises(UsageError, match="does not follow"):
            mesh.join(1, {4: door.address}, 100)
        with pytest.raises(AgentError, match="cannot be reached"):
            mesh.join(2, {4: door.address, 1: ("127.0.0.1", 1)}, 100, timeout_s=0.1)
        with pytest.raises(AgentError, match="no call from member 7"):
            mesh.join(3, {4: door.address, 7: ("127.0.0.1", 1)}, 100, timeout_s=0.1)
        with pytest.raises(AgentError, match="wait for join"):
            mesh.aggregate(2, values, out)
    finally:
        mesh.close()
        door.close()
