"""The control socket under misuse: whatever one client does, the others are answered."""

from __future__ import annotations

import array
import json
import math
import os
import resource
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import PATIENCE_S, Child, daemon, eventually, status

from gadei_ps.commands.daemon import Daemon
from gadei_ps.errors import ControlError, UsageError
from gadei_ps.job import paths
from gadei_ps.job.control import MAX_REQUEST, Connection, Status
from gadei_ps.learners.client import Client
from gadei_ps.watchdog.sockets import MAX_CLIENTS, MAX_CLIENTS_OF_ONE, OPERATORS, RESERVED

TENSORS = [{"name": "w", "shape": [16]}]


@pytest.fixture
def job(job_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr("gadei_ps.watchdog.sockets.MAX_UNSENT", 1 << 20)  # reached soon
    # On a busy machine a message of the largest size takes seconds.
    monkeypatch.setattr("gadei_ps.watchdog.sockets.MESSAGE_TIMEOUT_S", PATIENCE_S)
    with daemon(job_name, tensors=TENSORS) as one:
        yield one


def descriptors(job: Daemon) -> int:
    """Return how many descriptors the watchdog has open."""
    pid = job.request(Status())["watchdog_pid"]
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def unharmed(job: Daemon) -> Iterator[None]:
    """The watchdog answers at the end, and holds no descriptor that it did not before."""
    before = descriptors(job)
    with Connection(
        str(job.socket), PATIENCE_S
    ) as bystander:  # there already, and asks again at the end
        bystander.request(Status())
        yield
        bystander.request(Status())
    job.check()
    eventually(lambda: descriptors(job) == before, what=lambda: (descriptors(job), before))
    assert not job.request(Status())["learners"]


def connect(job: str, timeout_s: float = PATIENCE_S) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(str(paths.socket_path(job)))  # blocking: it waits while the queue is full
    raw.settimeout(timeout_s)
    return raw


def framed(message: object) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack("!I", len(data)) + data


def receive(raw: socket.socket) -> dict[str, object] | None:
    """The next reply; None if the connection is closed."""
    data = b""
    wanted = 4
    while len(data) < wanted:
        try:
            part = raw.recv(wanted - len(data))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
        if len(data) == 4:
            wanted += struct.unpack("!I", data)[0]
    reply: dict[str, object] = json.loads(data[4:])
    return reply


def refusal(job: str, message: object) -> dict[str, object]:
    """The reply to one message, which refuses it in one line."""
    with connect(job) as raw:
        raw.sendall(framed(message))
        reply = receive(raw)
    assert reply is not None
    assert reply["ok"] is False
    assert "\n" not in str(reply["error"])
    return reply


def in_a_child(function: Callable[..., None], *args: object) -> None:
    """Run it in a child: its changes of the roster end with it."""

    def run(pipe: Pipe) -> None:
        function(*args)
        pipe.send("done")

    child = Child(run)
    try:
        assert child.receive() == "done"
        assert child.join() == 0
    finally:
        child.kill()


# -- rubbish --------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=40)
    | st.just(2**64)
    | st.just(-1),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)
fields = ["v", "op", "name", "row", "generation", "tensors", "batches", "epochs", "seed", "drain"]
tensor = st.fixed_dictionaries(
    {"name": st.text(max_size=5), "shape": st.lists(st.integers(-1, 2**40), max_size=9)},
    optional={"role": st.integers(0, 3)},
)
# Near to what is right. Never a right `stop`, which would be obeyed, nor `work`, set once only.
requests = st.one_of(
    st.dictionaries(st.sampled_from(fields), values, max_size=6),
    st.fixed_dictionaries(
        {"v": st.just(1), "op": st.sampled_from(["attach", "detach", "offer", "status", "x"])},
        optional={
            "name": st.text(max_size=40) | values,
            "row": st.integers() | values,
            "generation": st.integers() | values,
            "tensors": st.lists(tensor, max_size=3) | values,
        },
    ),
    st.fixed_dictionaries(
        {"v": st.just(1), "op": st.sampled_from(["work", "stop"]), "extra": values}
    ),
)


def _fuzz(job: str) -> None:
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(requests.map(framed) | st.binary(max_size=60), min_size=1, max_size=5))
    def rubbish(messages: list[bytes]) -> None:
        with connect(job) as raw:
            try:
                raw.sendall(b"".join(messages))
                raw.shutdown(socket.SHUT_WR)
                while (reply := receive(raw)) is not None:
                    assert reply["ok"] or "\n" not in str(reply["error"])
            except BrokenPipeError:
                pass  # it has had enough of us
        with Connection(job) as other:
            other.request(Status())

    rubbish()


@pytest.mark.usefixtures("unharmed")
def test_rubbish(job: Daemon, job_name: str) -> None:
    in_a_child(_fuzz, job_name)
    eventually(lambda: not job.request(Status())["learners"])


RUBBISH: list[object] = [
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"[" * 100_000,
    b'{"v":1,"op":"status"',
    b'{"v":1,"op":"detach","row":' + b"9" * 10_000 + b',"generation":1}',
    b'{"v":1,"op":"attach","name":"\\ud800"}',
    {"op": "status", "v": 2},
    {"v": 1},
    {"v": 1, "op": "detach", "row": -1, "generation": 0},
    {"v": 1, "op": "detach", "row": 0, "generation": 0},
    {"v": 1, "op": "detach", "row": 2**70, "generation": 1},
    {"v": 1, "op": "work", "batches": 0, "epochs": 1},
    {"v": 1, "op": "work", "batches": 2**31, "epochs": 1},
    {"v": 1, "op": "stop", "timeout_s": 0},
    {"v": 1, "op": "stop", "timeout_s": 1e9},
    {"v": 1, "op": "offer", "tensors": []},
    {"v": 1, "op": "offer", "tensors": [{"name": "x", "shape": [1]}]},
]


@pytest.mark.usefixtures("unharmed")
def test_each_kind_of_rubbish_is_told_so(job: Daemon, job_name: str) -> None:
    for message in RUBBISH:
        kind = refusal(job_name, message)["kind"]
        assert kind in ("ControlError", "ModelMismatch", "Evicted"), message


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("name", ["replica", "replica\0"])
def test_the_name_of_replicas_is_not_for_learners(job: Daemon, job_name: str, name: str) -> None:
    """The status would not list them as learners."""
    with pytest.raises(UsageError, match="the name 'replica' is reserved"):
        Client(job_name, name=name)


@pytest.mark.usefixtures("unharmed")
def test_a_message_that_is_too_long(job: Daemon, job_name: str) -> None:
    with connect(job_name) as raw:
        raw.sendall(struct.pack("!I", MAX_REQUEST + 1))
        reply = receive(raw)
        assert reply is None or reply["ok"] is False
        assert receive(raw) is None, "what follows cannot be distinguished from payload"
    # The longest that is allowed is read to its end.
    assert "bad request" in str(refusal(job_name, b" " * MAX_REQUEST)["error"])


# -- offers ---------------------------------------------------------------------------------------


def _offer(job: str, shapes: list[list[int]], fd: int | None) -> dict[str, object] | None:
    tensors = [{"name": f"t{at}", "shape": shape} for at, shape in enumerate(shapes)]
    message = framed({"v": 1, "op": "offer", "tensors": tensors})
    with connect(job) as raw:
        rights = []
        if fd is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        raw.sendmsg([message], rights)
        return receive(raw)


@pytest.mark.parametrize(
    "shapes", [[[2**39]], [[2**39] * 8], [[2**39] * 8] * 100, [[2**20]], [[0]], [[1] * 8]]
)
@pytest.mark.parametrize("file", ["none", "pipe", "directory", "sparse", "short", "write-only"])
def test_offers_that_cannot_be(
    offers: tuple[Daemon, str], shapes: list[list[int]], file: str
) -> None:
    job, name = offers
    elements = sum(-(-math.prod(shape) // 16) * 16 for shape in shapes)
    with ExitStack() as stack:
        fd: int | None = None
        if file == "pipe":
            read, write = os.pipe()
            stack.callback(os.close, write)
            fd = read
        elif file == "directory":
            fd = os.open("/", os.O_RDONLY)
        elif file in ("sparse", "short"):
            fd = os.memfd_create("test")
            size = min(elements * 4, 2**40) if file == "sparse" else 3
            if file == "sparse" and shapes in ([[2**20]], [[1] * 8]):
                os.close(fd)
                return  # that one would be right
            os.ftruncate(fd, size)
        elif file == "write-only":
            path = stack.enter_context(tempfile.NamedTemporaryFile()).name
            os.truncate(path, min(elements * 4, 2**40))
            fd = os.open(path, os.O_WRONLY)
        if fd is not None:
            stack.callback(os.close, fd)
        reply = _offer(name, shapes, fd)
    assert reply is not None
    assert reply["ok"] is False
    assert "\n" not in str(reply["error"])
    job.check()
    assert job.request(Status())["model"] is None


@pytest.fixture(scope="module")
def offers() -> Iterator[tuple[Daemon, str]]:
    """A job without a model, for all that is offered in vain."""
    name = f"offers-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as place:
        patch.setenv("GADEI_PS_RUNTIME_DIR", place)
        with daemon(name) as job:
            yield job, name


# -- clients that do not behave ------------------------------------------------------------------


@pytest.mark.usefixtures("unharmed")
def test_a_client_that_never_ends_its_message(job: Daemon, job_name: str) -> None:
    with connect(job_name) as slow:
        for byte in framed({"v": 1, "op": "status"})[:-1]:
            slow.sendall(bytes([byte]))
            assert job.request(Status())["phase"] == "serving"
        slow.sendall(b"}")
        reply = receive(slow)
        assert reply
        assert reply["ok"]
        slow.sendall(b"\0\0")


@pytest.mark.usefixtures("unharmed")
def test_a_client_that_never_reads(job: Daemon, job_name: str) -> None:
    """Check that its replies are kept up to a bound, and that it is dropped then."""
    question = framed({"v": 1, "op": "status"})
    with connect(job_name) as deaf, pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            deaf.sendall(question * 100)
            assert job.request(Status())["phase"] == "serving"


@pytest.mark.usefixtures("unharmed")
def test_a_client_that_asks_without_end(job: Daemon, job_name: str) -> None:
    """It reads its replies too, so it is not dropped; others have their turn."""
    question = framed({"v": 1, "op": "status"})
    over = threading.Event()
    with connect(job_name) as eager:
        eager.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 13)  # all is answered in the end

        def ask() -> None:
            while not over.is_set():
                eager.sendall(question * 200)

        def read() -> None:
            while eager.recv(1 << 16):
                pass

        asking, reading = threading.Thread(target=ask), threading.Thread(target=read)
        asking.start()
        reading.start()
        for _ in range(8):
            assert job.request(Status())["phase"] == "serving"
        over.set()
        asking.join()
        eager.shutdown(socket.SHUT_WR)
        reading.join()


@pytest.mark.usefixtures("unharmed")
def test_descriptors_that_nobody_wants(job: Daemon, job_name: str) -> None:
    files = array.array("i", [os.open(os.devnull, os.O_RDONLY) for _ in range(20)])
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files[:3])]
        with connect(job_name) as raw:
            for _ in range(50):
                raw.sendmsg([framed({"v": 1, "op": "status"})], rights)
                assert receive(raw)
        with connect(job_name) as raw:  # in the middle of a message, then silence
            raw.sendmsg([b"\0"], rights)
            job.request(Status())
        with connect(job_name) as raw:  # too many
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
            raw.sendmsg([framed({"v": 1, "op": "status"})], rights)
            receive(raw)
    finally:
        for fd in files:
            os.close(fd)


@pytest.mark.usefixtures("unharmed")
def test_one_process_may_not_take_all_places(job: Daemon, job_name: str) -> None:
    with ExitStack() as stack:
        mine = [stack.enter_context(connect(job_name)) for _ in range(600)]

        def ask_from_another() -> None:
            for _ in range(3):
                with Connection(job_name) as one:
                    one.request(Status())
            Client(job_name).detach()

        in_a_child(ask_from_another)
        eventually(lambda: descriptors_at_most(job_name, MAX_CLIENTS_OF_ONE))
        answered = 0
        for raw in mine:
            try:
                raw.sendall(framed({"v": 1, "op": "status"}))
            except BrokenPipeError:
                continue
            answered += bool((receive(raw) or {"ok": False})["ok"])
        assert answered <= MAX_CLIENTS_OF_ONE < MAX_CLIENTS
        assert answered > MAX_CLIENTS_OF_ONE // 2


def descriptors_at_most(job: str, count: int) -> bool:
    """Asked from a process of its own, because this one has used its places up."""

    def look(pipe: Pipe) -> None:
        pid = status(job)["watchdog_pid"]
        pipe.send(len(list(Path(f"/proc/{pid}/fd").iterdir())))

    child = Child(look)
    found: int = child.receive()
    child.join()
    return found <= count + 40


def limit_files(pid: int, soft: int) -> int:
    """Change how many descriptors the process may have; return how many it could have before."""
    before, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    return before


def sleeps(pid: int) -> int:
    """Return how often the process has slept: one that spins does not."""
    status_ = Path(f"/proc/{pid}/status").read_text()
    return int(status_.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.usefixtures("unharmed")
def test_few_descriptors(job: Daemon, job_name: str) -> None:
    """Check the error if none is free, and that the watchdog keeps some for itself."""
    pid = job.request(Status())["watchdog_pid"]
    with ExitStack() as stack:
        before = limit_files(pid, descriptors(job) + RESERVED + OPERATORS // 2)
        stack.callback(limit_files, pid, before)
        # A learner is refused first: a status and a stop are still accepted.
        with pytest.raises(ControlError, match=f"no more are free.*kill -TERM {pid} stops it"):
            Client(job_name)
        assert not status(job_name)["learners"]
        limit_files(pid, descriptors(job) + RESERVED + 8)
        mine = [stack.enter_context(connect(job_name)) for _ in range(20)]
        replies = [receive(raw) for raw in mine[10:]]
        assert all(
            "raise the limit (ulimit -n" in str(reply["error"]) for reply in replies if reply
        )
        assert all(reply and not reply["ok"] for reply in replies)
        with pytest.raises(ControlError, match="no more are free"):
            Client(job_name)
        mine[0].sendall(framed({"v": 1, "op": "status"}))
        assert (receive(mine[0]) or {})["ok"]


@pytest.mark.usefixtures("unharmed")
def test_no_descriptor_at_all(job: Daemon, job_name: str) -> None:
    """A client that cannot be accepted waits, and the watchdog sleeps meanwhile."""
    pid = job.request(Status())["watchdog_pid"]
    before = limit_files(pid, 3)
    try:
        with connect(job_name) as waits:
            waits.sendall(framed({"v": 1, "op": "status"}))
            slept = sleeps(pid)
            eventually(lambda: sleeps(pid) > slept + 10)
            limit_files(pid, before)
            assert (receive(waits) or {})["ok"]
    finally:
        limit_files(pid, before)


def test_socket_is_the_users_alone(job: Daemon) -> None:
    assert job.socket.stat().st_mode & 0o777 == 0o600
    assert job.socket.parent.stat().st_mode & 0o77 == 0
