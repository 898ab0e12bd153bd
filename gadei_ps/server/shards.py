"""The shards of one server process: what each of them works with, and their threads."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

import numpy as np

from gadei_ps import _native
from gadei_ps.errors import in_words
from gadei_ps.machine import log, placement
from gadei_ps.memory import layout, weights
from gadei_ps.memory.layout import CONTROL, STATE
from gadei_ps.memory.segment import Segment
from gadei_ps.server import units
from gadei_ps.server.structs import BOARD, NOT_READING, PART

EXIT_S = 2.0
LINE = 64  # bytes of a cache line


def new_board() -> np.ndarray:
    """Make a board on which no shard reads yet: BOARD, shape (1,)."""
    board = np.zeros(1, BOARD)
    board["seen"] = NOT_READING
    return board


class Shards:
    """The shards of a job's model, as one process serves them."""

    def __init__(
        self, control: Segment, weights_: Segment, state: Segment, board: np.ndarray
    ) -> None:
        """board: BOARD of shape (1,)."""
        self.control = control
        self.weights = weights_
        self.state = state
        self.board = board
        self.count = int(control.view(CONTROL)["shards"])
        self.elements = int(weights_.view(layout.WEIGHTS)["elements"])
        self.model = weights.read_table(weights_)
        self.payload_bytes = weights.payload_bytes(self.model)
        self.crashed: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._log = log.get()

    def part(self, index: int) -> np.ndarray:
        """Return PART of a shard, shape (1,)."""
        # Its loops read and write whole vectors there.
        memory = np.zeros(PART.itemsize + LINE, np.uint8)
        begin = -memory.ctypes.data % LINE
        array: np.ndarray = memory[begin : begin + PART.itemsize].view(PART)
        one = array[0]
        one["index"] = index
        one["low"], one["high"] = layout.shard_range(self.elements, self.count, index)
        head, state = self.weights.view(layout.WEIGHTS), self.state.view(STATE)
        one["control"], one["state"] = self.control.address, self.state.address
        one["weights"] = self.weights.address + int(head["data_at"])
        for stream in range(int(state["streams"])):
            at = int(state["slots_at"]) + stream * int(state["slot_bytes"])
            one[f"slot{stream}"] = self.state.address + at
        one["undo"] = self.state.address + int(state["undo_at"]) + index * layout.UNDO_BYTES
        one["board"] = self.board.ctypes.data
        one["apply"] = units.APPLY.load()
        one["arrive"] = units.ARRIVE.load()
        one["move"] = units.loops(int(self.control.view(CONTROL)["optimizer"]))
        one["tensors_at"] = self.weights.address + int(head["table_at"])
        for field in ("tensors", "elements", "parameters"):
            one[field] = head[field]
        one["groups"] = groups = int(self.control.view(CONTROL)["groups"])
        one["group_end"][:groups] = self.model.group_ends(groups)
        one["capacity"] = self.payload_bytes
        return array

    @property
    def started(self) -> bool:
        """Whether the threads are started."""
        return bool(self._threads)

    def start(self, cores: list[int], at_crash: Callable[[], None]) -> None:
        """Start the threads, which take their leases or wait for them.

        cores: to bind the threads to. at_crash: called by a thread that fails, once `crashed` is
        set.
        """
        for index in range(self.count):
            thread = threading.Thread(
                target=self._run,
                args=(index, self.part(index), cores, at_crash),
                name=f"shard-{index}",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:
                raise OSError(errno.EAGAIN, "no more threads can be started") from None
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop the threads at the end of the current gradient."""
        self.board["quit"] = 1
        _native.bell(self.control.word(CONTROL, "shard_bell"))
        for thread in self._threads:
            thread.join(EXIT_S)

    def _run(
        self, index: int, part: np.ndarray, cores: list[int], at_crash: Callable[[], None]
    ) -> None:
        """Run the thread of a shard; its end releases the lease."""
        try:
            placement.bind(index, cores, self.weights.address)
        except (OSError, ValueError) as error:  # slower, perhaps, and no reason not to serve
            self._log.warning("shard not bound to cores", shard=index, reason=in_words(error))
        try:
            units.stand_by(part.ctypes.data)
        except BaseException as error:
            self.crashed = error
            at_crash()
            raise
