"""Exchange of models within a group: a process group of torch.distributed for each generation.

Aggregation by linear partition (Yan and Shao, figure 2), as a reduce-scatter and an all-gather:
each of m members receives its part of all models, sums it, and sends the sum to all others. So each
sends 2(m - 1)/m models. The sum is `parts.aggregate`, as in the simulator. gloo has no
reduce-scatter with such sums, so both are made of its sends and receives, in pieces: a time limit
is for one piece, however large the model is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from gadei_ps.errors import ExchangeFailed
from gadei_ps.groups import parts
from gadei_ps.groups.parts import Floats
from gadei_ps.machine import process

Connected = TypeVar("Connected")
Array = npt.NDArray[Any]

PIECE = 1 << 20
"""Values of a piece: 4 MB."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
STEPS = 2
"""Steps of a connection, each of which may take the time limit."""
_STATE, _PART, _SUM = 1, 2, 3
_HEADER = 3


class _Piece(NamedTuple):
    """The same piece of all other members' models, by their places."""

    here: slice
    models: dict[int, Floats]
    works: list[Work]


class Transport:
    """The members of one generation. A failure ends it."""

    def __init__(self, store: Store, place: int, members: int, host: str, timeout_s: float) -> None:
        """Connect the members of a generation.

        store: of this generation alone. place: of this replica among the members. host: address at
        which it listens. Raises ExchangeFailed. All members make theirs at about the same time.
        """
        self.place, self.members, self.sent = place, members, 0
        """sent: bytes so far."""
        self._others = [one for one in range(members) if one != place]
        self._limit = timedelta(seconds=timeout_s)
        with _failing(), _listening(host):
            self._group: Any = _in_time(
                lambda: ProcessGroupGloo(store, place, members, timeout=self._limit), timeout_s
            )

    def aggregate(self, model: Floats, weights: Sequence[float], out: Floats) -> None:
        """Write the weighted mean of all members' models to `out`. Raises ExchangeFailed."""
        cuts = parts.cut(len(model), self.members)
        scales = np.array(weights, np.float32)
        with _failing():
            pending = [self._collect(here) for here in _pieces(cuts[self.place])]
            sends = [
                self._send(model[here], other, _PART)
                for other in self._others
                for here in _pieces(cuts[other])
            ]
            results = [
                self._receive(out[here], other, _SUM)
                for other in self._others
                for here in _pieces(cuts[other])
            ]
            for piece in pending:
                self._wait(piece.works)
                here = piece.here
                models = [piece.models.get(one, model[here]) for one in range(self.members)]
                parts.aggregate(models, scales, out[here])
                sends += [self._send(out[here], other, _SUM) for other in self._others]
            self._wait(results)
            self._wait(sends)

    def _collect(self, here: slice) -> _Piece:
        models = {one: np.empty(here.stop - here.start, np.float32) for one in self._others}
        works = [self._receive(model, one, _PART) for one, model in models.items()]
        return _Piece(here, models, works)

    def send_state(self, text: bytes, arrays: Sequence[Floats], receivers: Sequence[int]) -> None:
        """Send a state to these members, which receive it. Raises ExchangeFailed."""
        sizes = np.array([len(text), len(arrays), len(arrays[0])], np.int64)
        values: list[Array] = [sizes, np.frombuffer(text, np.uint8), *arrays]
        with _failing():
            works = [
                self._send(one[here], receiver, _STATE)
                for receiver in receivers
                for one in values
                for here in _pieces(slice(0, len(one)))
            ]
            self._wait(works)

    def receive_state(self, sender: int) -> tuple[bytes, list[Floats]]:
        """Receive a state. Raises ExchangeFailed."""

        def receive(values: Array) -> None:
            here = _pieces(slice(0, len(values)))
            self._wait([self._receive(values[one], sender, _STATE) for one in here])

        with _failing():
            receive(sizes := np.empty(_HEADER, np.int64))
            receive(text := np.empty(int(sizes[0]), np.uint8))
            arrays = [np.empty(int(sizes[2]), np.float32) for _ in range(int(sizes[1]))]
            for one in arrays:
                receive(one)
        return text.tobytes(), arrays

    def _send(self, values: Array, receiver: int, tag: int) -> Work:
        self.sent += values.nbytes
        work: Work = self._group.send([_tensor(values)], receiver, tag)
        return work

    def _receive(self, values: Array, sender: int, tag: int) -> Work:
        work: Work = self._group.recv([_tensor(values)], sender, tag)
        return work

    def _wait(self, works: Sequence[Work]) -> None:
        for one in works:
            if one.wait(self._limit) is False:
                raise RuntimeError("aborted")


def store_at(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store of another member; make one for port 0. Raises ExchangeFailed."""
    with _failing():
        limit = timedelta(seconds=timeout_s)
        return _in_time(
            lambda: TCPStore(host, port, None, not port, limit, wait_for_workers=False), timeout_s
        )


def _in_time(connect: Callable[[], Connected], timeout_s: float) -> Connected:
    """Return the result of `connect`. Raises ExchangeFailed after STEPS time limits.

    PyTorch waits without a limit for the store of a member that hangs or is cut off. The thread
    then waits on, until that member ends.
    """
    answer: Future[Connected] = Future()

    def run() -> None:
        try:
            answer.set_result(connect())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=process.FOREIGN, daemon=True).start()
    try:
        return answer.result(STEPS * timeout_s)
    except TimeoutError:
        raise ExchangeFailed("the first member does not answer") from None


def _pieces(part: slice) -> Iterator[slice]:
    """Cut a part of an array into pieces."""
    for begin in range(part.start, part.stop, PIECE):
        yield slice(begin, min(begin + PIECE, part.stop))


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Raise ExchangeFailed for an error of gloo."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise ExchangeFailed(text.rpartition("] ")[2][:200] or type(error).__name__) from None


@contextlib.contextmanager
def _listening(host: str) -> Iterator[None]:
    """Have gloo listen at this address, unless the user has chosen an interface.

    Its public names take no address, but the name of an interface, in the environment.
    """
    addresses = {host, "127.0.0.1"} if host.startswith("127.") else {host}
    names = [
        name
        for name, found in psutil.net_if_addrs().items()
        if not addresses.isdisjoint(one.address.partition("%")[0] for one in found)
    ]
    if INTERFACE_VARIABLE in os.environ or not names:
        yield
        return
    os.environ[INTERFACE_VARIABLE] = names[0]
    try:
        yield
    finally:
        del os.environ[INTERFACE_VARIABLE]


def _tensor(values: Array) -> torch.Tensor:
    """Return a tensor of the same memory, which is never written if it is sent."""
    if values.flags.writeable:
        return torch.from_numpy(values)
    return torch.from_numpy(values.copy())
