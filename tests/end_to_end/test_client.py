"""A learner's view of a job: what it can read, what it cannot write, what is reported to it."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import math
import pickle
import re
import signal
from array import array
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from support import PATIENCE_S, Stopped, daemon, eventually, fork, learner, status
from support import kernel_reference as reference

from gadei_ps import _native
from gadei_ps.errors import (
    JobNotFound,
    JobStopped,
    ModelMismatch,
    PushTimeout,
    UsageError,
)
from gadei_ps.job.control import StopJob
from gadei_ps.job.in_process import JOB_VARIABLE
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, slots
from gadei_ps.learners.client import (
    NONE,
    Client,
    Rows,
    epoch_order,
    whole_at,
)
from gadei_ps.memory import layout
from gadei_ps.memory.layout import FrameKind, Role

VALUES = 100_000


def _write_to(pipe: Connection, job: str, part: str) -> None:
    client = Client(job)
    pipe.send(client.row)
    memory = {"weights": client.place.weights, "control": client.place.control}[part]
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no traceback in the test's output
    ctypes.memset(memory.address + memory.size - 64, 0xFF, 1)
    pipe.send("written")


def test_stray_writes_end_the_learner_and_nothing_else(job_name: str) -> None:
    tensors = {"w": np.zeros(1000, np.float32)}
    with daemon(job_name) as job, Client(job_name, tensors=tensors) as other:
        for part in ("weights", "control"):
            with fork(1, _write_to, job_name, part) as (child,):
                child.receive()
                assert child.join() == -signal.SIGSEGV
        with pytest.raises(ValueError, match="read-only"):
            other.flat[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            other.weights["w"][0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            other.flat.flags.writeable = True
        other.push({"w": np.ones(1000)})
        other.wait_applied()
        np.testing.assert_array_equal(other.weights["w"], -1.0)
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        job.check()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_rows(wire: str, job_name: str) -> None:
    """Pushed in any order and repeated, with others whole and others not at all."""
    tensors = {
        "table": np.zeros((1000, 20), np.float32),
        "flat": np.zeros(1000, np.float32),
        "left": np.ones(5, np.float32),
        "whole": np.zeros(3, np.float32),
    }
    optimizer = {"kind": "sgd", "lr": 1.0, "weight_decay": 0.5}
    with (
        daemon(job_name, optimizer=optimizer),
        Client(job_name, tensors=tensors, wire=wire) as client,
    ):
        some = Rows(np.array([7, 999, 7, 0]), np.ones((4, 20), np.float32))
        few = Rows(np.array([3]), np.ones(1, np.float32))
        client.push({"whole": np.ones(3), "flat": few, "table": some})
        client.wait_applied()
        table = np.zeros((1000, 20))
        table[[0, 7, 999]] = [[-1], [-2], [-1]]
        np.testing.assert_array_equal(client.weights["table"], table)
        np.testing.assert_array_equal(np.flatnonzero(client.weights["flat"]), [3])
        np.testing.assert_array_equal(client.weights["left"], 1, "not even decayed")
        np.testing.assert_array_equal(client.weights["whole"], -1)
        np.testing.assert_array_equal(client.pull_rows("table", [999, 7])[:, 0], [-1, -2])
        assert not np.shares_memory(client.pull_rows("table", [1]), client.flat)

        bad = {
            "no row 1000 of 1000": Rows(np.array([1000]), np.ones((1, 20))),
            "no row -1 of 1000": Rows(np.array([2, -1]), np.ones((2, 20))),
            "values of shape [1, 19]": Rows(np.array([1]), np.ones((1, 19))),
            "[2] indices": Rows(np.array([1, 2]), np.ones((1, 20))),
        }
        for message, rows in bad.items():
            with pytest.raises(ModelMismatch, match=re.escape(message)):
                client.push({"table": rows})
        with pytest.raises(ModelMismatch, match="no row 5 of 5"):
            client.pull_rows("left", [5])
        with pytest.raises(ModelMismatch, match="indices of float64, not integers"):
            client.pull_rows("table", [1.5])
        with pytest.raises(ModelMismatch, match="indices of float64, not integers"):
            client.push({"table": Rows(np.array([1.5]), np.ones((1, 20)))})
        # A slot that was abandoned, with rows in it, may be filled again.
        payload = client.claim() + layout.PAYLOAD_AT
        client.write_named(payload, {"table": some})
        client.write_named(payload, {"flat": np.zeros(1000)})
        client.publish()
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["left"], 0.5)
        assert status(job_name)["gradients_refused"] == 0


def _push_ones(pipe: Connection, job: str) -> None:
    client = Client(job)
    pipe.send(client.row)
    ones = np.ones(client.model.elements, np.float32)
    while True:
        client.push(ones)


def test_consistent_pull(job_name: str) -> None:
    tensors = [{"name": "w", "shape": [VALUES]}]
    with (
        daemon(job_name, tensors=tensors, shards=2),
        Client(job_name) as client,
        fork(2, _push_ones, job_name) as children,
    ):
        for child in children:
            child.receive()
        ranges = [layout.shard_range(client.model.elements, 2, index) for index in range(2)]
        eventually(lambda: client.current_version > 100)
        copy = np.empty(client.model.elements, np.float32)
        whole = 0
        seen = set()
        while whole < 100 or len(seen) < 10:  # the weights move meanwhile
            assert client.pull(copy, consistent=True, timeout_s=PATIENCE_S) is copy
            whole += 1
            for low, high in ranges:
                assert copy[low] == copy[high - 1]
                assert (copy[low:high] == copy[low]).all()
                seen.add(float(copy[low]))
        assert client.pull(consistent=False).shape == copy.shape


def test_consistent_pull_wants_room_of_the_right_kind(job_name: str) -> None:
    with daemon(job_name), Client(job_name, tensors={"w": np.zeros(10)}) as client:
        for out in (np.empty(10, np.float32), np.empty(16), np.empty(32, np.float32)[::2]):
            with pytest.raises(UsageError, match="contiguous float32"):
                client.pull(out, consistent=True)
        assert not client.place.ring.view(layout.RING)["hold"]


def test_push_by_name_and_flat(job_name: str) -> None:
    tensors = {"a": np.full((3, 5), 4.0), "s": np.float64(2.0)}
    buffers = {"m": np.arange(7.0)}
    with (
        daemon(job_name, shards=2),
        Client(job_name, tensors=tensors, buffers=buffers, wire="bfloat16") as client,
    ):
        np.testing.assert_array_equal(client.weights["a"], 4.0)
        assert client.weights["s"].shape == ()
        role = {one.name: one.role for one in client.model.tensors}
        assert role == {"a": Role.PARAMETER, "s": Role.PARAMETER, "m": Role.BUFFER}
        client.push({"a": np.full((3, 5), 0.5), "s": None, "m": None}, loss=1.5, samples=3)
        client.push({})
        flat = client.model.flatten({"a": np.ones((3, 5)), "s": np.ones(()), "m": np.ones(7)})
        client.push(flat, rate_scale=2.0)
        client.wait_applied()
        np.testing.assert_array_equal(client.weights["a"], 4.0 - 0.5 - 2.0)
        assert client.weights["s"] == 0.0
        np.testing.assert_array_equal(client.weights["m"], np.arange(7.0))
        assert client.current_version == 3
        with pytest.raises(ModelMismatch, match=r"'m' is a buffer.*write it with assign\(\)"):
            client.push({"m": np.ones(7)})
        with pytest.raises(ModelMismatch, match="'m' is F64: assign"):
            client.add({"m": np.ones(7)})
        with pytest.raises(ModelMismatch, match="'x'"):
            client.push({"x": np.ones(1)})
        with pytest.raises(ModelMismatch, match=r"'a' has shape \[5, 3\]"):
            client.push({"a": np.ones((5, 3))})
        with pytest.raises(ModelMismatch, match="gradient has shape"):
            client.push(np.ones(3, np.float32))
        client.push({"a": np.ones((3, 5))})  # the claimed slot was not published
        client.wait_applied()
        assert client.current_version == 4


def test_another_model_is_refused(job_name: str) -> None:
    with daemon(job_name):
        with pytest.raises(ModelMismatch, match="no model yet"):
            Client(job_name)
        with Client(job_name, tensors={"a": np.ones(3), "b": np.ones((2, 2))}) as first:
            for tensors, named in [
                ({"a": np.ones(3)}, "lacks the job's tensor 'b'"),
                ({"a": np.ones(4), "b": np.ones((2, 2))}, "'a' has shape [4], the job's has [3]"),
                ({"a": np.ones(3), "c": np.ones((2, 2))}, "no tensor 'c'"),
            ]:
                with pytest.raises(ModelMismatch) as info:
                    Client(job_name, tensors=tensors)
                assert named in str(info.value)
                message = f"job {job_name!r} already has a model, of 2 tensors ('a', 'b'), and this"
                assert message in str(info.value)
            assert "one is of 2 tensors ('a', 'c'): give another" in str(info.value)
            # Others of the same shape do not overwrite what the first has made.
            again = {"b": np.zeros((2, 2)), "a": np.zeros(3)}
            with Client(job_name, tensors=again) as second:
                np.testing.assert_array_equal(second.flat, first.flat)
                np.testing.assert_array_equal(second.weights["a"], 1.0)
            assert learner(job_name, -1) is None


def test_a_client_stays_where_it_was_made(job_name: str) -> None:
    """Pickle it for a spawned child. After its end, a client says that it has left."""
    with daemon(job_name, sync="bsp"), Client(job_name, tensors={"a": np.ones(3)}) as other:
        client = Client(job_name)
        for carry in (pickle.dumps, copy.deepcopy):
            with pytest.raises(UsageError, match="this Client stays in the process that made it"):
                carry(client)
        for one in (other, client):
            one.wait_turn()
        client.push({})
        client.detach()
        other.push({})
        eventually(lambda: len(status(job_name)["learners"]) == 1)
        for use in (client.wait_turn, client.claim, client.abandon):
            with pytest.raises(UsageError, match="this learner has detached from its job"):
                use()


def test_which_job(runtime_dir: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=JOB_VARIABLE):
        Client()
    with pytest.raises(JobNotFound, match="nobody"):
        Client("nobody")
    monkeypatch.setenv(JOB_VARIABLE, "nobody-else")
    with pytest.raises(JobNotFound, match="nobody-else"):
        Client()
    with pytest.raises(UsageError, match="float8"):
        Client("nobody", wire="float8")


def test_after_the_end(job_name: str) -> None:
    with daemon(job_name) as job:
        client = Client(job_name, tensors={"w": np.zeros(10)})
        client.detach()
        client.detach()
        with pytest.raises(UsageError, match="detached"):
            client.push({})
        late = Client(job_name)
        job.request(StopJob(drain=False))
        with pytest.raises(JobStopped):
            late.push({})
        assert late.take_batch() is None
        np.testing.assert_array_equal(late.weights["w"], 0.0)
        late.detach()


def test_time_outs(job_name: str) -> None:
    with daemon(job_name, slots=1) as job, Client(job_name, tensors={"w": np.zeros(8)}) as client:
        with pytest.raises(PushTimeout, match="no batch"):
            client.take_batch(timeout_s=0.01)
        client.push({})
        client.wait_applied()
        with Stopped(status(job_name)["server_pid"]):
            client.push({})
            with pytest.raises(PushTimeout, match="no slot"):
                client.push({}, timeout_s=0.01)
            with pytest.raises(PushTimeout, match="not applied within"):
                client.wait_applied(timeout_s=0.01)
        client.wait_applied()
        assert client.published == client.current_version == 2
        job.check()


def test_numbers_out_of_range_are_refused(job_name: str) -> None:
    tensors = {"w": np.zeros(4, np.float32)}
    with (
        daemon(job_name, optimizer={"lr": 10.0}),
        Client(job_name, tensors=tensors) as client,
    ):
        ones = np.ones(client.model.elements, np.float32)
        facts: list[dict[str, Any]] = [
            {name: value}
            for name in ("version", "batch", "samples")
            for value in (-1, 2**63, 2**64 - 1, 2**64, 10**30, 0.5)
        ]
        for fact in facts:
            (name,) = fact
            with pytest.raises(
                UsageError, match=rf"^{name}=\S+: use a whole number from 0 to \d+$"
            ):
                client.push(ones, **fact)
            with pytest.raises(UsageError, match=f"^{name}="):
                client.check_facts(**{"version": 0} | fact)
        with pytest.raises(UsageError, match="rate_scale is negative or not finite"):
            client.push(ones, rate_scale=10**400)
        with pytest.raises(UsageError, match="rate_scale times the job's learning rate is more"):
            client.push(ones, rate_scale=3e38)
        for number in (-1, 2**64, 0.5):
            with pytest.raises(UsageError, match=r"^number="):
                client.wait_mini_batch(number)  # type: ignore[arg-type]
        for steps in (-1, 2**63):
            with pytest.raises(UsageError, match=r"^steps="):
                client.load_optimizer_state([], steps)
        for sequence in (0, 2**64):
            with pytest.raises(UsageError, match="this learner has published 0 gradients"):
                client.wait_applied(sequence)
        assert client.published == 0
        last = client.push(ones, version=2**63 - 1, batch=2**63 - 1, timeout_s=math.inf)
        client.wait_applied(last, timeout_s=math.inf)
        assert status(job_name)["learners"][0]["refused"] == 0


def test_epochs_are_orders_of_all_samples() -> None:
    orders = [epoch_order(100, 3, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(100))
    assert (orders[0] != orders[1]).any()
    np.testing.assert_array_equal(orders[1], epoch_order(100, 3, 1))


def _scribble(pipe: Connection, job: str, field: str) -> None:
    """Write over a field of its own ring, then publish."""
    client = Client(job)
    client.wait_turn()
    memory = client.place.ring
    header = layout.HEADER.fields
    assert header
    if field == "all":
        ctypes.memset(memory.address, 0xFF, memory.size)
    else:
        within = layout.offset(layout.HEADER if field in header else layout.RING, field)
        ctypes.memset(memory.address + within, 0xFF, 8)
    head = memory.word(layout.RING, "head")
    if field != "head":
        _native.store(head, (_native.load(head) + 1) % 2**64)
    _native.futex_wake(head)
    pipe.send("done")
    pipe.recv()


SCRIBBLED = ["generation", "slots", "slot_bytes", "slots_at", "head", "tail", "work_head", "all"]


@pytest.mark.parametrize("model", ["asp", "ssp:1", "bsp"])
def test_rubbish_in_its_own_ring_harms_no_other(model: str, job_name: str) -> None:
    tensors = {"w": np.zeros(2000, np.float32)}
    with (
        daemon(job_name, sync=model, shards=2) as job,
        Client(job_name, tensors=tensors) as other,
    ):
        for field in SCRIBBLED:
            with fork(1, _scribble, job_name, field) as (child,):
                while not child.has_sent:  # it may wait for the end of a superstep
                    with contextlib.suppress(PushTimeout):
                        other.push({}, timeout_s=0.01)
                assert child.receive() == "done", field
                for _ in range(20):
                    assert status(job_name)["learners"], field
            for _ in range(3):
                other.push({}, timeout_s=PATIENCE_S)
            other.wait_applied(timeout_s=PATIENCE_S)
            job.check()
        eventually(lambda: len(status(job_name)["learners"]) == 1, what=lambda: status(job_name))


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "momentum", "adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_rows_of_zeros_travel_only_where_they_matter(
    kind: str, weight_decay: float, job_name: str
) -> None:
    """The weights are as if all had been sent."""
    gradient = np.zeros((100, 20), np.float32)
    gradient[[3, 50, 99]] = np.arange(20)
    spec = OptimizerSpec(Kind[kind.upper()], lr=0.1, weight_decay=weight_decay)
    expected = np.ones((100, 20), np.float32)
    state = [np.zeros_like(expected) for _ in range(slots(spec.kind))]
    optimizer = {"kind": kind, "lr": 0.1, "weight_decay": weight_decay}
    tensors = {"table": expected, "rest": np.zeros(64, np.float32)}
    with daemon(job_name, optimizer=optimizer), Client(job_name, tensors=tensors) as client:
        skips_zeros = kind in ("sgd", "adagrad") and not weight_decay
        for t in range(3):
            whole = {"table": gradient, "rest": np.zeros(64)}
            client.push(client.model.flatten(whole) if t == 1 else whole)
            frame = client.last_frame
            assert frame["kind"] == (FrameKind.ROWS if skips_zeros else FrameKind.DENSE)
            assert (frame["payload_bytes"] < 1000) == skips_zeros
            reference.step(spec, expected, state, gradient, t + 1, 0.1)
            client.wait_applied()  # so that no gradient is stale
        np.testing.assert_allclose(client.weights["table"], expected, rtol=1e-5, atol=1e-7)


def test_error_feedback_sends_what_is_too_small(job_name: str) -> None:
    tensors = {"w": np.zeros(100, np.float32), "table": np.zeros((50, 4), np.float32)}
    tiny = np.float32(1e-9)  # a fiftieth of float16's smallest value
    row = Rows(np.array([7]), np.full((1, 4), tiny))
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        for feedback, moves in ((False, False), (True, True)):
            with Client(
                job_name, tensors=tensors, wire="float16", error_feedback=feedback
            ) as client:
                for _ in range(300):
                    client.push({"w": np.full(100, tiny), "table": row})
                client.wait_applied()
                for moved in (client.weights["w"], client.weights["table"][7]):
                    assert moved.any() == moves
                    if moves:
                        np.testing.assert_allclose(moved, -300 * tiny, atol=6e-8)
                assert not client.weights["table"][8:].any()


def test_clipped_to_a_norm(job_name: str) -> None:
    optimizer = {"kind": "sgd", "lr": 1.0, "clip_norm": 2.0}
    tensors = {"w": np.zeros((10, 10), np.float32)}
    with daemon(job_name, optimizer=optimizer), Client(job_name, tensors=tensors) as client:
        client.push({"w": np.full((10, 10), 0.1)})  # norm 1
        client.wait_applied()
        np.testing.assert_allclose(client.weights["w"], -0.1)
        client.push({"w": np.full((10, 10), 10.0)})  # norm 100
        client.wait_applied()
        np.testing.assert_allclose(client.weights["w"], -0.3, rtol=1e-5)
        (mine,) = status(job_name)["learners"]
        assert mine["gradient_norm"] == pytest.approx(100.0)


def test_a_slot_is_filled_piece_by_piece(job_name: str) -> None:
    tensors = {"a": np.zeros((4, 16), np.float32), "b": np.zeros(5, np.float32)}
    ones = {name: np.ones_like(array) for name, array in tensors.items()}
    with daemon(job_name, optimizer={"kind": "sgd", "lr": 1.0}):
        with Client(job_name, tensors=tensors) as client:
            where = {name: whole_at(_native.address(array)) for name, array in ones.items()}
            payload = client.claim() + layout.PAYLOAD_AT
            with pytest.raises(UsageError, match="nothing is written"):
                client.publish()
            client.append(payload, 1, where["b"])  # not in the model's order
            client.append(payload, 0, list(NONE))
            client.append(payload, 0, array("Q", where["a"]))
            for number in (0, 1):
                with pytest.raises(UsageError, match="is written already"):
                    client.append(payload, number, where["a"])
            client.publish()
            client.wait_applied()
            for name in tensors:
                np.testing.assert_array_equal(client.weights[name], -1.0)
            payload = client.claim() + layout.PAYLOAD_AT
            client.write_named(payload, ones)
            with pytest.raises(UsageError, match=r"append\(\) needs an empty slot"):
                client.append(payload, 0, where["a"])
            client.publish()
            client.wait_applied()
            np.testing.assert_array_equal(client.weights["b"], -2.0)
            client.push_from(array("Q", [*where["a"], *where["b"]]))
            client.wait_applied()
            np.testing.assert_array_equal(client.weights["b"], -3.0)
        assert status(job_name)["gradients_refused"] == 0


def test_a_push_that_fails_keeps_what_is_left_over(job_name: str) -> None:
    tensors = {"a": np.zeros(40, np.float32), "t": np.zeros((9, 4), np.float32)}
    with (
        daemon(job_name),
        Client(job_name, tensors=tensors, wire="bfloat16", error_feedback=True) as client,
    ):
        client.push({"a": np.full(40, 1.001, np.float32)})
        left = client.residue.copy()
        assert left.any()
        bad = Rows(np.array([9]), np.ones((1, 4)))
        with pytest.raises(ModelMismatch, match="no row 9 of 9"):
            client.push({"a": np.full(40, 1.001, np.float32), "t": bad})
        np.testing.assert_array_equal(client.residue, left)
        with pytest.raises(AttributeError):  # pushes write into this very memory
            client.residue = left  # type: ignore[misc]
