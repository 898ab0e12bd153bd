"""Frames that a device writes are those that the host writes, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulator
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import daemon, eventually

from gadei_ps.errors import ModelMismatch
from gadei_ps.learners import devices
from gadei_ps.learners.client import NONE, Client, Rows, rows_at, whole_at
from gadei_ps.machine.cuda import missing as cuda_missing
from gadei_ps.memory import layout
from gadei_ps.memory.layout import FrameKind, WireType

ROOT = Path(__file__).parents[2]
KERNELS, NATIVE = ROOT / "learners" / "cuda" / "kernels.cu", ROOT / "native"
SHAPES = {"a": (3, 5), "long": (9_003,), "s": (), "table": (40, 6), "wide": (4, 700), "one": (50,)}


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def to_device(request: pytest.FixtureRequest) -> Iterator[Callable[[np.ndarray], Any]]:
    def given() -> Callable[[np.ndarray], Any]:
        if why := cuda_missing():
            pytest.skip(why)
        import cupy

        # CuPy fills an array without dimensions, and so loses the sign of a zero.
        return lambda array: cupy.asarray(array.reshape(-1)).reshape(array.shape)

    if request.param == "cuda":
        yield given()
        return
    with emulator.installed():
        yield given()


def to_host(array: Any) -> np.ndarray:
    import cupy

    return np.asarray(cupy.asnumpy(array))


@dataclass
class Frame:
    """A frame in the ring: of each tensor the rows given, as they are stored."""

    kind: int
    finite: bool
    squares: float
    rows: dict[str, dict[int, bytes]]


def frame_of(client: Client) -> Frame:
    ring = client.place.ring
    shape = ring.view(layout.RING)
    head = client.last_frame[0]
    slot = (client.published - 1) % int(shape["slots"])
    at = int(shape["slots_at"]) + slot * int(shape["slot_bytes"]) + layout.PAYLOAD_AT
    width = 4 if client.wire is WireType.FLOAT32 else 2
    rows: dict[str, dict[int, bytes]] = {}

    def cut(tensor: Any, begin: int, numbers: Any) -> dict[int, bytes]:
        size = width * (tensor.count // tensor.rows)
        raw = ring.array(np.uint8, size * len(numbers), at + begin).tobytes()
        return {int(row): raw[i * size : (i + 1) * size] for i, row in enumerate(numbers)}

    if head["kind"] == FrameKind.DENSE:
        assert head["payload_bytes"] == width * client.model.elements
        covered = np.zeros(client.model.elements, bool)
        for tensor in client.model.tensors:
            rows[tensor.name] = cut(tensor, width * tensor.start, range(tensor.rows))
            covered[tensor.start : tensor.start + tensor.count] = True
        raw = ring.array(np.uint8, width * client.model.elements, at).reshape(-1, width)
        assert not raw[~covered].any()
    else:
        for block in ring.array(layout.BLOCK, int(head["blocks"]), at):
            tensor = client.model.tensors[int(block["tensor"])]
            numbers: Any = range(tensor.rows)
            if block["form"] == FrameKind.ROWS:
                numbers = ring.array(np.int64, int(block["rows"]), at + int(block["indices_at"]))
            rows[tensor.name] = cut(tensor, int(block["values_at"]), numbers)
    finite = not head["flags"] & layout.NONFINITE
    return Frame(int(head["kind"]), bool(finite), float(head["squares"]), rows)


values = st.one_of(
    st.floats(-2, 2, width=32),
    st.floats(width=32, allow_nan=False),
    st.sampled_from([0.0, -0.0, 6e-8, 65504.0, 65519.9, 65520.0, 1e-40, 3e38, np.inf, -np.inf]),
)


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...]) -> np.ndarray:
    """Random values, and a few that are hard to convert."""
    seed = draw(st.integers(0, 2**32 - 1))
    made = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    flat = made.reshape(-1)
    for value in draw(st.lists(values, max_size=4 if flat.size else 0)):
        flat[draw(st.integers(0, flat.size - 1))] = value
    return made


@st.composite
def gradients(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        what = draw(st.sampled_from(["whole", "whole", "none", "rows" if shape else "none"]))
        if what == "whole":
            found[name] = draw(arrays(shape))
        elif what == "rows":
            last = min(shape[0] - 1, 60)
            named = draw(st.lists(st.integers(0, last), max_size=30))
            found[name] = Rows(np.array(named, np.int64), draw(arrays((len(named), *shape[1:]))))
    return found


def subnormal() -> dict[str, Any]:
    """Return values that a device flushes to zero unless its instructions keep them."""
    rows = Rows(np.array([3, 3], np.int64), np.full((2, 6), 3e-40, np.float32))
    return {"long": np.full(9_003, 1e-40, np.float32), "table": rows}


def repeated() -> dict[str, Any]:
    """Return a row that is named hundreds of times, as padding is, among others."""
    chance = np.random.default_rng(3)
    named = np.where(chance.random(700) < 0.5, 5, chance.integers(0, 40, 700))
    values = chance.standard_normal((700, 6), np.float32)
    wide = Rows(np.array([3, 1, 3]), chance.standard_normal((3, 700), np.float32))
    return {"table": Rows(named, values), "wide": wide, "s": np.float32(2).reshape(())}


@pytest.mark.parametrize("counts", [(1,), (5, 0, 4_099), (3, 15, 20_003)])
@pytest.mark.parametrize("pushes", [False, True])
def test_pulled_weights_are_copied_whole(
    to_device: Callable[[np.ndarray], Any], counts: tuple[int, ...], pushes: bool, job_name: str
) -> None:
    """pushes: beside gradients, which are zero."""
    chance = np.random.default_rng(2)
    tensors = {f"w{count}": chance.random(count, np.float32) for count in (*counts, 7)}
    with daemon(job_name), Client(job_name, tensors=tensors) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()

        def refreshed() -> bool:
            if pushes:
                where = NONE * len(tensors)
                link.push_from(where, version=0, refresh=(back, front))
            else:
                link.refresh(back, front)
            link.pull(back)
            return link.current >= 0

        for left_out in (["w5"], []):
            link.leave_out(left_out)
            link.current = -1
            eventually(refreshed)
            link.flush()
            for one, view in link.views(front).items():
                expected = tensors[one] * (one not in left_out)
                np.testing.assert_array_equal(to_host(view), expected)
        link.close()


@pytest.mark.parametrize("reads", ["values", "loss"])
def test_what_lies_where_pulled_weights_go(
    to_device: Callable[[np.ndarray], Any], reads: str, job_name: str
) -> None:
    """A script may give a parameter as a gradient: it leaves before newer weights come there."""
    start = np.random.default_rng(4).random(9_003, np.float32)
    with daemon(job_name), Client(job_name, tensors={"w": start}) as client:
        link = devices.choose("cuda").link(client)
        front, back = link.buffer(), link.buffer()
        link.fill(front)
        given = front if reads == "values" else to_device(np.ones_like(start))
        loss_at = front.data.ptr + 4 * 9_002 if reads == "loss" else 0
        versions = set()

        def step() -> bool:
            before = to_host(front)
            where, version = whole_at(given.data.ptr), link.current
            link.push_from(where, version=version, loss_at=loss_at, refresh=(back, front))
            link.flush()
            if reads == "loss":
                assert client.last_frame[0]["loss"] == before[9_002]
            else:
                found = b"".join(frame_of(client).rows["w"].values())
                assert found == before[:9_003].tobytes()
            link.pull(back)
            versions.add(link.current)
            return len(versions) > 4

        eventually(step)
        link.close()


def on_device(gradient: Any, to_device: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(gradient, Rows):
        return Rows(to_device(gradient.indices), to_device(gradient.values))
    return to_device(gradient)


@pytest.mark.parametrize(
    ("wire", "feedback"),
    [
        ("float32", False),
        ("bfloat16", False),
        ("float16", False),
        ("bfloat16", True),
        ("float16", True),
    ],
)
def test_as_the_host(
    to_device: Callable[[np.ndarray], Any], wire: str, feedback: bool, job_name: str
) -> None:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}

    @settings(
        max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @example([subnormal(), subnormal()])
    @example([repeated(), repeated()])
    @given(st.lists(gradients(), min_size=1, max_size=3))
    def check(given: list[dict[str, Any]]) -> None:
        for one in given:
            host.push(one)
            link.push({name: on_device(array, to_device) for name, array in one.items()}, 0)
            link.flush()
            expected, found = frame_of(host), frame_of(device)
            assert (found.kind, found.finite) == (expected.kind, expected.finite)
            if not (feedback and found.squares > 1e20):
                # The host does not add the residue of earlier rounding to huge sums.
                assert found.squares == pytest.approx(expected.squares, rel=1e-4)
            assert found.rows.keys() == expected.rows.keys()
            if not expected.finite:
                continue  # refused; the bits of a NaN depend on the processor
            for name, rows in expected.rows.items():
                more = found.rows[name].keys() - rows.keys()
                # Rows of one value: the device decides whether to list them before it counts them.
                assert not more or SHAPES[name] == (50,)
                assert {row: found.rows[name][row] for row in rows} == rows
                assert not any(any(found.rows[name][row]) for row in more)

    # With momentum the host also pushes rows of zeros.
    optimizer = {"kind": "momentum", "lr": 0.01}
    with (
        daemon(job_name, optimizer=optimizer),
        Client(job_name, tensors=tensors, wire=wire, error_feedback=feedback) as host,
        Client(job_name, wire=wire, error_feedback=feedback) as device,
    ):
        link = devices.choose("cuda").link(device)
        check()


def test_more_tensors_than_a_launch_takes(
    to_device: Callable[[np.ndarray], Any], job_name: str
) -> None:
    chance = np.random.default_rng(5)
    kinds = [(3, 5), (1,), (0, 3), (70,), (9, 2), (33, 1), (8_200,)]
    shapes = {f"t{number}": kinds[number % len(kinds)] for number in range(250)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    # With momentum the host also pushes rows of zeros.
    with (
        daemon(job_name, optimizer={"kind": "momentum", "lr": 0.01}),
        Client(job_name, tensors=tensors) as host,
        Client(job_name) as device,
    ):
        link = devices.choose("cuda").link(device)
        # Each of the two staging buffers has rows after whole tensors, and the other way round.
        for has_rows in (False, True, True, False):
            given: dict[str, Any] = {}
            for name, shape in shapes.items():
                count = int(chance.integers(3)) if has_rows else 0
                if count and shape[0]:
                    named = chance.integers(0, shape[0], count)
                    given[name] = Rows(named, chance.random((count, *shape[1:]), np.float32))
                elif chance.random() < 0.8:
                    given[name] = chance.random(shape, np.float32)
            host.push(given)
            link.push({name: on_device(one, to_device) for name, one in given.items()}, 0)
            link.flush()
            expected, found = frame_of(host), frame_of(device)
            # CuPy's arrays without values have no address, as if they were not given.
            for name in [name for name, shape in shapes.items() if 0 in shape]:
                expected.rows.pop(name, None)
                found.rows.pop(name, None)
            assert (found.kind, found.rows) == (expected.kind, expected.rows)
            assert found.squares == pytest.approx(expected.squares, rel=1e-6)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_gradients_at_any_address(
    to_device: Callable[[np.ndarray], Any], wire: str, job_name: str
) -> None:
    """A gradient may be a part of another array: a device reads four values at once elsewhere."""
    with (
        daemon(job_name),
        Client(job_name, tensors={"long": np.zeros(9_003, np.float32)}, wire=wire) as client,
    ):
        link = devices.choose("cuda").link(client)
        values = np.arange(9_010, dtype=np.float32) % 256
        kept = to_device(values)
        for shift in range(6):
            link.push_from([kept.data.ptr + 4 * shift, 0, 0, 0], version=0, kept=[kept])
            link.flush()
            stored = b"".join(frame_of(client).rows["long"].values())
            expected = values[shift : shift + 9_003]
            if wire == "float32":
                assert stored == expected.tobytes()
            else:
                assert stored == (expected.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@st.composite
def rows_named(draw: st.DrawFn, rows: int) -> tuple[np.ndarray, int | None]:
    """Draw rows that a mini-batch names, around the counts where kernels change, and a padding."""
    count = draw(st.sampled_from([1, 2, 3, 31, 32, 33, 255, 256, 257, 2047, 2048, 2049, 4097]))
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    few = draw(st.sampled_from([1, 2, rows]))
    named = chance.permutation(rows)[:few][chance.integers(0, few, count)]
    kind = draw(st.sampled_from([np.int64, np.int32]))
    return named.astype(kind), draw(st.sampled_from([None, int(named[0]), rows - 1]))


def expected_rows(
    named: np.ndarray, values: np.ndarray, padding: int | None, residue: np.ndarray, wire: str
) -> tuple[dict[int, bytes], float]:
    """Return each row as it is stored, and the sum of squares; adds to the residue."""
    sums: dict[int, np.ndarray] = {}
    for row, value in zip(named.tolist(), values, strict=True):
        if row != padding:
            sums[row] = sums[row] + value if row in sums else value
    squares = 0.0
    stored: dict[int, bytes] = {}
    for row, exact in sums.items():
        with_residue = exact + residue[row]
        squares += float(np.square(exact.astype(np.float64) + residue[row]).sum())
        if wire == "float16":
            half = with_residue.astype(np.float16)
            stored[row], back = half.tobytes(), half.astype(np.float32)
        elif wire == "bfloat16":
            bits = with_residue.view(np.uint32)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            stored[row] = bits.astype(np.uint16).tobytes()
            back = (bits << 16).astype(np.uint32).view(np.float32)
        else:
            stored[row], back = with_residue.tobytes(), with_residue
        residue[row] = with_residue - back
    return stored, squares


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_rows_as_numpy(to_device: Callable[[np.ndarray], Any], wire: str, job_name: str) -> None:
    """Check sums of repeated rows, padding, and rows of few values, which may become a whole."""
    shapes = {"table": (300, 3), "one": (50,), "wide": (4, 700), "none": (40, 0)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    residues = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    @settings(max_examples=15, deadline=None, database=None)
    @given(st.data(), st.integers(0, 2**32 - 1))
    def check(data: st.DataObject, seed: int) -> None:
        chance = np.random.default_rng(seed)
        where: list[int] = []
        kept, found, squares = [], {}, 0.0
        for name, shape in shapes.items():
            named, padding = data.draw(rows_named(shape[0]))
            values = chance.standard_normal((len(named), *shape[1:]), np.float32)
            found[name], more = expected_rows(named, values, padding, residues[name], wire)
            squares += more
            kept += [to_device(named), to_device(values)]
            count, skipped = len(named), 0 if padding is None else 1 + padding
            facts = 2 * skipped + (named.dtype == np.int32)
            where += [kept[-1].data.ptr, kept[-2].data.ptr, count, facts]
        link.push_from(where, version=0, kept=kept)
        link.flush()
        frame = frame_of(client)
        assert frame.finite
        assert frame.squares == pytest.approx(squares, rel=1e-5)
        for name, rows in found.items():
            there = frame.rows[name]
            assert list(there) == sorted(there)
            if len(there) == shapes[name][0] != len(rows):  # whole
                assert not any(any(there.pop(row)) for row in there.keys() - rows.keys())
            assert there == rows

    with (
        daemon(job_name, optimizer={"kind": "sgd", "lr": 0.01}),
        Client(job_name, tensors=tensors, wire=wire, error_feedback=True) as client,
    ):
        link = devices.choose("cuda").link(client)
        check()


@pytest.mark.parametrize("count", [40, 3000])
@pytest.mark.parametrize(
    "bad", [*map(np.int64, [-1, -(2**63), 300, 2**35 - 1, 2**62]), np.int32(-1), np.int32(300)]
)
def test_rows_that_do_not_exist(
    to_device: Callable[[np.ndarray], Any], count: int, bad: np.integer, job_name: str
) -> None:
    tensors = {"other": np.zeros((3, 2), np.float32), "table": np.zeros((300, 2), np.float32)}
    named = (np.arange(count) % 300).astype(bad.dtype)
    kept = [to_device(named), to_device(np.ones((count, 2), np.float32))]
    kept.append(to_device(np.where(named == 7, bad, named)))
    with daemon(job_name), Client(job_name, tensors=tensors) as client:
        link = devices.choose("cuda").link(client)
        for indices, padding in ((2, 0), (0, 0), (2, 8), (0, 8)):
            facts = 2 * padding + (bad.dtype == np.int32)
            where = (kept[1].data.ptr, kept[indices].data.ptr, count, facts)
            link.push_from([1, 1, 0, 0, *where], version=0, kept=kept)
            with pytest.raises(ModelMismatch, match="'table'") if indices else nullcontext():
                link.flush()
        expected = set(range(min(count, 300))) - {7}
        assert frame_of(client).rows == {
            "other": {},
            "table": {row: np.full(2, count // 300 or 1, np.float32).tobytes() for row in expected},
        }
        kept += [to_device(np.array([2])), to_device(np.ones((300, 2), np.float32))]
        for _ in range(2):  # with both staging buffers
            row = rows_at(kept[3].data.ptr, kept[1].data.ptr, 1)
            link.push_from([*row, *whole_at(kept[4].data.ptr)], version=0, kept=kept)
            link.flush()


def fields(text: str, struct: str) -> list[str]:
    """Return the names of a struct's fields."""
    (body,) = re.findall(rf"^struct {struct} {{(.*?)^}};", text, re.M | re.S)
    return re.findall(r"(\w+)(?:\[\w+\])?[,;]", re.sub(r"/\*.*?\*/", "", body, flags=re.S))


def test_kernels_are_those_of_c() -> None:
    """Compare names here; wrong types would show in the kernels' results."""
    with emulator.installed():
        from gadei_ps.learners.cuda import kernels, link

        names, most_rows, line_bytes = kernels.KERNELS, link.MOST_ROWS, link.LINE
        chunk = kernels.CHUNK
    text, caller = KERNELS.read_text(), (NATIVE / "ps_cuda.c").read_text()
    for struct in ("item", "rows_args", "whole_args", "copy_args", "stage_args", "gather_args"):
        assert fields(text, struct) == fields(caller, struct) != []
    for number in ("THREADS", "ITEMS", "AHEAD", "FEW", "MANY_THREADS"):
        found = re.compile(rf"\b{number} = (\d+)").findall
        assert found(text) == found(caller) != []
    (bits,) = re.findall(r"PLACE_BITS = (\d+)", text)
    assert most_rows == 1 << int(bits)
    assert re.findall(r"LINE = (\d+)", text) == [str(line_bytes)]
    assert fields(text, "chunk") == list(chunk.names or ())
    assert re.findall(r"CHUNK_BYTES = (\d+)", caller) == [str(chunk.itemsize)]
    assert set(names) == set(re.findall(r"__global__ void (\w+)", text))
    (line,) = re.findall(r"void \*(stage\b.*);", (NATIVE / "ps_cuda.h").read_text())
    assert line.split(", *") == list(names)
