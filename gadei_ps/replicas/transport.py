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
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from gadei_ps.errors import ExchangeFailed
from gadei_ps.groups import parts
from gadei_ps.groups.parts import Floats

Array = npt.NDArray[Any]

PIECE = 1 << 20
"""Values of a piece: 4 MB."""
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_STATE, _PART, _SUM = 1, 2, 3
_HEADER = 3


class Transport:
    """The members of one generation. A failure ends it."""

    def __init__(
        self, store: Store, prefix: str, place: int, members: int, host: str, timeout_s: float
    ) -> None:
        """Connect the members of a generation.

        place: of this replica among the members. host: address at which it listens.
        Raises ExchangeFailed. All members make theirs at about the same time.
        """
        self.place, self.members, self.sent = place, members, 0
        """sent: bytes so far."""
        self._limit = timedelta(seconds=timeout_s)
        try:
            with _listening(host):
                group: Any = ProcessGroupGloo(
                    PrefixStore(prefix, store), place, members, timeout=self._limit
                )
            self._group = group
        except RuntimeError as error:
            raise ExchangeFailed(_line(error)) from None

    def aggregate(self, model: Floats, weights: Sequence[float], out: Floats) -> None:
        """Write the weighted mean of all members' models to `out`. Raises ExchangeFailed."""
        cuts = parts.cut(len(model), self.members)
        mine, others = cuts[self.place], [one for one in range(self.members) if one != self.place]
        scales = np.array(weights, np.float32)
        try:
            pending = [
                self._collect(begin, min(begin + PIECE, mine.stop), others)
                for begin in range(mine.start, mine.stop, PIECE)
            ]
            sends = [
                self._send(model[begin : min(begin + PIECE, cuts[other].stop)], other, _PART)
                for other in others
                for begin in range(cuts[other].start, cuts[other].stop, PIECE)
            ]
            results = [
                self._receive(out[begin : min(begin + PIECE, cuts[other].stop)], other, _SUM)
                for other in others
                for begin in range(cuts[other].start, cuts[other].stop, PIECE)
            ]
            for piece in pending:
                self._wait(piece.works)
                here = slice(piece.begin, piece.end)
                models = [piece.scratch.get(one, model[here]) for one in range(self.members)]
                parts.aggregate(models, scales, out[here])
                sends += [self._send(out[here], other, _SUM) for other in others]
            self._wait(results)
            self._wait(sends)
        except RuntimeError as error:
            raise ExchangeFailed(_line(error)) from None

    def _collect(self, begin: int, end: int, others: Sequence[int]) -> _Pieces:
        scratch = {one: np.empty(end - begin, np.float32) for one in others}
        works = [self._receive(scratch[one], one, _PART) for one in others]
        return _Pieces(begin, end, scratch, works)

    def send_state(self, text: bytes, arrays: Sequence[Floats], receivers: Sequence[int]) -> None:
        """Send a state to these members, which receive it. Raises ExchangeFailed."""
        sizes = np.array([len(text), len(arrays), len(arrays[0])], np.int64)
        values: list[Array] = [sizes, np.frombuffer(text, np.uint8), *arrays]
        try:
            works = [
                self._send(one[begin : begin + PIECE], receiver, _STATE)
                for receiver in receivers
                for one in values
                for begin in range(0, len(one), PIECE)
            ]
            self._wait(works)
        except RuntimeError as error:
            raise ExchangeFailed(_line(error)) from None

    def receive_state(self, sender: int) -> tuple[bytes, list[Floats]]:
        """Receive a state. Raises ExchangeFailed."""
        try:
            sizes = np.empty(_HEADER, np.int64)
            self._wait([self._receive(sizes, sender, _STATE)])
            text = np.empty(int(sizes[0]), np.uint8)
            arrays = [np.empty(int(sizes[2]), np.float32) for _ in range(int(sizes[1]))]
            values: list[Array] = [text, *arrays]
            for one in values:
                works = [
                    self._receive(one[begin : begin + PIECE], sender, _STATE)
                    for begin in range(0, len(one), PIECE)
                ]
                self._wait(works)
        except RuntimeError as error:
            raise ExchangeFailed(_line(error)) from None
        return text.tobytes(), arrays

    def _send(self, values: Array, receiver: int, tag: int) -> _Work:
        tensor = _tensor(values)
        self.sent += values.nbytes
        return _Work(self._group.send([tensor], receiver, tag), tensor)

    def _receive(self, values: Array, sender: int, tag: int) -> _Work:
        tensor = _tensor(values)
        return _Work(self._group.recv([tensor], sender, tag), tensor)

    def _wait(self, works: Sequence[_Work]) -> None:
        for one in works:
            if one.work.wait(self._limit) is False:
                raise RuntimeError("aborted")


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


class _Work:
    """An operation, and its memory, which must outlive it."""

    def __init__(self, work: torch.distributed.Work, tensor: torch.Tensor) -> None:
        self.work, self._tensor = work, tensor


class _Pieces:
    """The same piece of all other members' models."""

    def __init__(
        self, begin: int, end: int, scratch: Mapping[int, Floats], works: Sequence[_Work]
    ) -> None:
        self.begin, self.end, self.scratch, self.works = begin, end, scratch, works


def _tensor(values: Array) -> torch.Tensor:
    """Return a tensor of the same memory, which is never written if it is sent."""
    if values.flags.writeable:
        return torch.from_numpy(values)
    return torch.from_numpy(values.copy())


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.rpartition("] ")[2][:200] or type(error).__name__
