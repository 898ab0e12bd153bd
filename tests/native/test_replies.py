"""A C learner believes neither the watchdog's replies nor the headers of segments."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from clients.drivers import ERROR, FAILED
from support.memory import create_model, create_ring

from gadei_ps import sync
from gadei_ps.memory import layout, shm
from gadei_ps.memory.layout import CONTROL, RING, TENSOR, WEIGHTS
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Tensor, place
from gadei_ps.watchdog.job_memory import JobMemory

ROW, GENERATION = 4, 11


class Watchdog:
    """Answers every request with the same bytes; None closes the connection instead."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.raw: bytes | None = b""
        self._whole: bytes | None = None
        self.asked: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as stream:
                while head := stream.read(4):
                    if head == b"quit":
                        return
                    self.asked.append(json.loads(stream.read(struct.unpack("!I", head)[0])))
                    raw = self.raw
                    if raw is None:
                        break
                    connection.sendall(raw)
                    if raw is not self._whole:
                        break  # the learner waits for more, or has hung up

    def says(self, *texts: str | bytes) -> None:
        """Return messages, one after the other."""
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        self.raw = self._whole = b"".join(struct.pack("!I", len(one)) + one for one in raw)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))
            last.sendall(b"quit")
            self._thread.join()
        self._listener.close()


@pytest.fixture
def watchdog(runtime_dir: Path) -> Iterator[Watchdog]:
    made = Watchdog(runtime_dir / "fake.sock")
    yield made
    made.close()
    made.path.unlink()


@pytest.fixture
def memory(job_name: str) -> Iterator[JobMemory]:
    """Make segments as the watchdog does."""
    made = JobMemory(support.config(job_name, shards=2))
    made.create_control(sync.parse("asp"))
    try:
        model = place([Tensor("w", (40, 50)), Tensor("b", (7,))])
        create_model(made, model, np.arange(model.elements, dtype=np.float32))
        create_ring(made, ROW, GENERATION)
        made.control.view(CONTROL)["roster"]["wanted"][ROW] = GENERATION
        yield made
    finally:
        made.remove()


def attach_reply(memory: JobMemory, **other: Any) -> dict[str, Any]:
    assert memory.weights
    return {
        "v": 1,
        "ok": True,
        "job": memory.config.name,
        "job_id": memory.job_id.hex(),
        "row": ROW,
        "generation": GENERATION,
        "control": memory.control.name,
        "weights": memory.weights.name,
        "ring": memory.rings[ROW].name,
    } | other


@pytest.mark.parametrize(("given", "number"), [("7", 7), ("x", -1)])
def test_requests_and_replies(
    watchdog: Watchdog,
    memory: JobMemory,
    learner: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    number: int,
) -> None:
    """Unknown members are skipped, also nested ones, wherever blanks stand."""
    monkeypatch.setenv("GADEI_PS_LEARNER", given)
    mine = learner()
    extra = {"later": {"a": [1, -2.5e3, None, {"b": [[], {}]}], "c": '"}'}, "x": [True, False]}
    watchdog.says(json.dumps(extra | attach_reply(memory), indent="\t") + " \r\n")
    name = 'a "b" \\ \x01 ' + "é" * 40
    mine.do("attach", watchdog.path, name)
    kept = name.encode()[:31].decode(errors="ignore")
    assert watchdog.asked == [{"v": 1, "op": "attach", "name": kept, "number": number}]
    assert mine.values("live") == (0.0, 2006.0)
    watchdog.says('{"ok":true,"set":true}')
    mine.do("work", 5, 6, 2**62)
    mine.do("detach")
    assert watchdog.asked[1:] == [
        {"v": 1, "op": "work", "batches": 5, "epochs": 6, "seed": 2**62},
        {"v": 1, "op": "detach", "row": ROW, "generation": GENERATION},
    ]
    # If this watchdog dies before it reads that, the next one reads the word.
    assert memory.rings[ROW].view(RING)["detached"] == 1


NOTE = '{"v":1,"ok":true,"note":"making","what":"the ring of learner 4","done":1,"total":2}'


def test_notes_come_before_the_reply(
    watchdog: Watchdog, memory: JobMemory, learner: Callable[[], Any]
) -> None:
    mine = learner()
    watchdog.says(NOTE, NOTE, json.dumps(attach_reply(memory)))
    mine.do("attach", watchdog.path, "")
    assert mine.values("live") == (0.0, 2006.0)
    watchdog.says(NOTE, '{"ok":false,"error":"no","kind":"JobStopped"}')
    assert mine.ask("work", 5, 6, 7) == (-2, "no")
    watchdog.says('{"ok":true,"set":true}')
    mine.do("work", 5, 6, 7)  # over the same connection
    mine.do("detach")


REFUSALS = {
    '{"ok":false,"error":"plain","kind":"ControlError"}': (ERROR, "plain"),
    '{"kind":"JobStopped","error":"at end","ok":false}': (-2, "at end"),
    '{"ok":false,"error":"broken","kind":"JobFailed"}': (FAILED, "broken"),
    '{"ok":false}': (ERROR, "refused without a reason"),
    json.dumps({"ok": False, "error": 'é€😀 "q" \\ /'}): (ERROR, 'é€😀 "q" \\ /'),
    '{"ok":false,"error":"two\\nlines\\u000a\\u0000\\tand \\ud83d half"}': (
        ERROR,
        "two lines   and � half",
    ),
    json.dumps({"ok": False, "error": "x" * 2000}): (ERROR, "x" * 510),
    json.dumps({"ok": False, "error": "no", "kind": "k" * 400}): (ERROR, "no"),
    json.dumps({"ok": False, "error": "no", "row": "not a number"}): (ERROR, "no"),
}


def test_refusals(watchdog: Watchdog, learner: Callable[[], Any]) -> None:
    mine = learner()
    for reply, expected in REFUSALS.items():
        watchdog.says(reply)
        assert mine.ask("attach", watchdog.path) == expected, reply


def malformed(good: dict[str, Any]) -> list[str | bytes]:
    text = json.dumps(good)
    return [
        *(text[:length] for length in range(0, len(text), 7)),
        b"\0" * 40,
        b"\xff" * 40,
        "null",
        "[]",
        "{}",
        "{} {}",
        text + "x",
        text[:-1] + ",}",
        text.replace(":", "", 1),
        text.replace(",", "", 1),
        text.replace('"ok": true', '"ok": 1'),
        text.replace('"ok": true', '"ok": "true"'),
        text.replace('"v": 1', '"v": ' + "[" * 5000 + "]" * 5000),
        text.replace('"v": 1', '"v": ' + "{" * 60000),
        text.replace('"v": 1', '"v": tru'),
        text.replace('"v": 1', '"v": "\\q"'),
        text.replace('"v": 1', '"v": "\\u12g4"'),
        text.replace('"v": 1', '"v": "a\nb"'),
        text.replace('"v": 1', '"v": "' + "\\"),
        json.dumps(good | {"row": -1}),
        json.dumps(good | {"row": 1.5}),
        json.dumps(good | {"row": 256}),
        json.dumps(good | {"row": 2**32 + ROW}),
        json.dumps(good | {"row": 2**64 + ROW}),
        json.dumps(good | {"row": str(ROW)}),
        json.dumps(good | {"row": None}),
        json.dumps(good | {"generation": 10**30}),
        json.dumps(good | {"job": "x" * 64}),
        json.dumps(good | {"job_id": good["job_id"][:-1]}),
        json.dumps(good | {"job_id": good["job_id"] + "0"}),
        json.dumps(good | {"job_id": "z" * 32}),
        json.dumps(good | {"control": "x" * 300}),
        json.dumps(good | {"control": good["control"][1:]}),
        json.dumps(good | {"control": "/../" + good["control"][1:]}),
        *(
            json.dumps({key: good[key] for key in good if key != left})
            for left in good
            if left != "v"
        ),
    ]


def test_malformed_replies(
    watchdog: Watchdog, memory: JobMemory, hurried: Callable[[], Any]
) -> None:
    mine = hurried()  # where the connection is lost, it waits for another watchdog
    for reply in malformed(attach_reply(memory)):
        watchdog.says(reply)
        code, text = mine.ask("attach", watchdog.path)
        assert code == ERROR and text, reply
    for raw, message in (
        (None, "the watchdog has closed the connection"),
        (b"\0\0", "the watchdog has closed the connection"),
        (b"\0\0\0\x10{", "the watchdog has closed the connection"),
        (b"\xff\xff\xff\xff", "the reply is too long"),
    ):
        watchdog.raw = raw
        assert mine.ask("attach", watchdog.path) == (ERROR, f"{watchdog.path}: {message}")
    watchdog.says(json.dumps(attach_reply(memory)))
    mine.do("attach", watchdog.path)
    watchdog.says("{}")
    assert mine.ask("work", 1, 1, 0)[0] == ERROR
    assert mine.ask("work", 1, 1, 0)[0] == ERROR
    mine.do("detach")  # whatever is said to it


def head(part: Segment, dtype: np.dtype[np.void], /, **fields: Any) -> Callable[[], None]:
    """Overwrite fields of a segment's head."""

    def change() -> None:
        view = part.view(dtype)
        for field, value in fields.items():
            place_ = view["header"] if field in layout.HEADER.names else view  # type: ignore[operator]
            place_[field] = value

    return change


def row(part: Segment, field: str, value: Any) -> Callable[[], None]:
    def change() -> None:
        part.array(TENSOR, 2, WEIGHTS.itemsize)[1][field] = value

    return change


def size(part: Segment, bytes_: int) -> Callable[[], None]:
    return lambda: os.truncate(f"/dev/shm{part.name}", bytes_)


def damages(memory: JobMemory) -> list[tuple[Callable[[], None], str]]:
    """Yield changes of the segments, each with a part of the learner's message about it."""
    assert memory.weights
    control, weights, ring = memory.control, memory.weights, memory.rings[ROW]
    kinds = ((control, CONTROL), (weights, WEIGHTS), (ring, RING))
    common: list[tuple[Callable[[], None], str]] = []
    for part, dtype in kinds:
        common += [
            (head(part, dtype, magic=0), "only half made"),
            (
                head(part, dtype, layout_version=99),
                f"layout version 99, this program speaks {layout.LAYOUT_VERSION}",
            ),
            (head(part, dtype, kind=layout.SegmentKind.STATE), "is of kind 3"),
            (head(part, dtype, bytes=part.size + 1), "truncated"),
            (head(part, dtype, job_id=np.zeros(16, np.uint8)), "another incarnation of the job"),
            (size(part, 100), "truncated (100 bytes)"),
            (size(part, 0), "truncated (0 bytes)"),
            (size(part, part.size + layout.PAGE), "truncated"),
        ]
    common.append((head(control, CONTROL, build=1), "made by build 0000000000000001 of gadei-ps"))
    table = [
        head(weights, WEIGHTS, tensors=2**62),
        head(weights, WEIGHTS, table_at=weights.size - 8),
        head(weights, WEIGHTS, table_at=2**64 - 256),
        head(weights, WEIGHTS, table_at=193),
        head(weights, WEIGHTS, data_at=weights.size),
        head(weights, WEIGHTS, data_at=2**64 - 4096),
        head(weights, WEIGHTS, elements=2**62),
        head(weights, WEIGHTS, elements=2**64 - 1),
        row(weights, "start", 2**64 - 1),
        row(weights, "count", 2**64 - 1),
        row(weights, "count", 2017),
        row(weights, "dims", 9),
        row(weights, "name", b"x" * 376),
    ]
    rings = [
        head(ring, RING, index=ROW + 1),
        head(ring, RING, generation=GENERATION + 1),
        head(ring, RING, slots=0),
        head(ring, RING, slots=3),
        head(ring, RING, slots=2**32 - 1),
        head(ring, RING, shards=0),
        head(ring, RING, shards=65),
        head(ring, RING, slot_bytes=0),
        head(ring, RING, slot_bytes=2**63),
        head(ring, RING, slot_bytes=2**64 - 64),
        head(ring, RING, slots_at=0),
        head(ring, RING, slots_at=ring.size),
        head(ring, RING, slots_at=2**64 - 4096),
        head(ring, RING, capacity=4096),
        head(ring, RING, capacity=2**64 - 4),
    ]
    return [
        *common,
        *((change, "weights segment") for change in table),
        *((change, "the ring segment is damaged") for change in rings),
    ]


def test_damaged_segments(
    watchdog: Watchdog, memory: JobMemory, learner: Callable[[], Any]
) -> None:
    assert memory.weights
    mine = learner()
    watchdog.says(json.dumps(attach_reply(memory)))
    parts = (memory.control, memory.weights, memory.rings[ROW])
    whole = [bytes(part.memory) for part in parts]
    for number, (change, message) in enumerate(damages(memory)):
        change()
        code, text = mine.ask("attach", watchdog.path)
        assert code == ERROR and message in text, (number, message, text)
        assert watchdog.asked[-1]["op"] == "detach"  # it gives back what it cannot use
        for part, content in zip(parts, whole, strict=True):
            os.truncate(f"/dev/shm{part.name}", part.size)
            part.memory[:] = content
    mine.do("attach", watchdog.path)
    mine.do("detach")
    other = attach_reply(memory, ring=shm.segment_name(memory.config.name, "ring.9"))
    watchdog.says(json.dumps(other))
    code, text = mine.ask("attach", watchdog.path)
    assert code == FAILED and "is gone; is /dev/shm shared with the watchdog" in text
