"""The words of a row, as a death at any store would leave them while a learner is taken in."""

from __future__ import annotations

from unittest import mock

import pytest
from support import Rig

from gadei_ps import _native
from gadei_ps.machine import log
from gadei_ps.memory import layout
from gadei_ps.memory.weights import Tensor
from gadei_ps.server import driver
from gadei_ps.server.driver import Driver, Start
from gadei_ps.server.rings import Mapped


@pytest.mark.parametrize(("model", "grant"), [("asp", layout.UNBOUNDED), ("bsp", 0)])
def test_the_words_of_the_learner_before(job_name: str, model: str, grant: int) -> None:
    with Rig(job_name, [Tensor("w", (5000,))], shards=2, collect=model == "bsp") as rig:
        state = rig.memory.state
        assert state is not None
        assert rig.shards == 2
        entry, applied = rig.roster[0], rig.state["applied"][:, 0]
        # Of the learner before, generation 1. The thread of another server may still know its ring.
        entry["member"] = entry["obsolete"] = entry["exclusive"] = entry["grant"] = 5
        applied[:] = 5
        entry["generation"] = entry["wanted"] = 2
        taking = Driver(rig.memory.control, state, rig.part(0), Start(0, 0.0, log.get()))
        served = []

        def look() -> None:
            served.append(int(entry["served"]))
            if served[-1] == 1:
                # Such a thread believes `applied`, and would begin the old ring again at 0.
                assert (applied == 5).all()
            if served[-1] == 2:  # The next server does none of it again.
                assert (applied == 0).all()
                assert (entry["member"], entry["obsolete"], entry["grant"]) == (0, 0, grant)

        def store(at: int, value: int) -> None:
            _native.store(at, value)
            look()

        with mock.patch.object(driver, "_native", mock.Mock(wraps=_native, store=store)):
            taking.take_in(Mapped(0, 2, rig.memory.rings[0], 0, 0))
        look()
        assert served[-1] == 2
