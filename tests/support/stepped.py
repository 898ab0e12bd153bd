"""A server's manager over a job's segments, whose steps a test calls one by one."""

from __future__ import annotations

import os
import selectors
from types import TracebackType

from gadei_ps import _native
from gadei_ps.job import sync_change
from gadei_ps.machine import log, process
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Action, ServerState
from gadei_ps.sync import SyncModel
from gadei_ps.watchdog.servers import Servers
from support.rig import Rig


def make_leases(rig: Rig) -> None:
    """Make them as the watchdog does while no server lives."""
    logger, selector = log.get(), selectors.DefaultSelector()
    Servers(rig.memory, selector, logger, logger.error)._make_leases()
    selector.close()


def begin(rig: Rig, model: SyncModel) -> None:
    """The job's first model, before any server has come."""
    sync_change.initialize(rig.memory.control, model)


def attach(rig: Rig, row: int, generation: int) -> None:
    """A learner that no server serves yet."""
    rig.add(row, generation)
    rig.roster[row]["served"] = rig.roster[row]["grant"] = 0


class Stepped:
    """The manager of a server, in this process and thread. It starts no shards: the test is they.

    number: its line in control.
    """

    def __init__(self, rig: Rig, number: int = 0) -> None:
        # Here: the tests that need no server are spared Numba.
        from gadei_ps.server.manager import Asked, Server

        self._rig = rig
        self.line = rig.control["server"][number]
        self.line["start"], self.line["pid"] = process.start_ticks(os.getpid()), os.getpid()
        self.line["state"], self.line["confirmed"] = ServerState.STARTING, 0
        self.server = Server(Asked(rig.memory.config.name, number, 10.0, []))

    def __enter__(self) -> Stepped:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.die()

    def die(self) -> None:
        """Release its leases; report those that it has not as the kernel does."""
        for lease in ("standby_lease", "lease"):
            _native.lease_release(self.server.control_segment.word(layout.CONTROL, lease))
        if self.server._hold is not None:
            self.server._hold.release()

    def lead(self) -> None:
        """It gets the managers' lease, and its shards theirs."""
        self.server._try_leases()
        assert self.server.active
        self.stand_by()
        self.serve()

    def stand_by(self) -> None:
        """It maps the model."""
        self.server._map_model()
        rings = self.server.rings
        assert rings is not None
        self.rings = rings
        self.board = rings.board[0]
        self.shown = self.board["ring"]

    def serve(self) -> None:
        """Give its shards their leases and the newest table of rings."""
        self.board["seen"][: self._rig.shards] = self.board["table_version"]
        self.board["holds"][: self._rig.shards] = 1

    def turn(self) -> None:
        """A pass of the main loop, from the look at the roster on; it starts no shards."""
        self.server._follow()
        self.server._drive()

    def turns(self) -> None:
        """Make passes in which the shards see everything."""
        for _ in range(3):
            self.turn()
            self.serve()

    def consume(self, row: int, upto: int) -> None:
        """All shards are done with the frames below."""
        self._rig.state["applied"][: self._rig.shards, row] = upto

    def finish_superstep(self) -> None:
        """The shards do what the manager has published."""
        control, state = self._rig.control, self._rig.state
        for row, action in enumerate(control["superstep_action"].tolist()):
            if action != Action.SKIP:
                self.consume(row, int(control["superstep_upto"][row]))
        state["record"]["supersteps"][: self._rig.shards] = control["superstep"]

    def obey(self) -> None:
        """All shards do as the mode says."""
        self._rig.control["shard"]["mode"][: self._rig.shards] = self._rig.control["mode"]
