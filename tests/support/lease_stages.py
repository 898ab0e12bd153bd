"""Return stages that a living server can have, by the leases that it has taken."""

from __future__ import annotations

from typing import Final

from gadei_ps.memory.lifecycle import Leases, Stage

STAGES: Final = {
    Leases.NONE: {Stage.STARTING, Stage.STANDBY},
    Leases.HEIR: {Stage.STARTING, Stage.STANDBY},
    Leases.MANAGERS: {Stage.BEGINNING, Stage.RECOVERING},
    Leases.ALL: {Stage.SERVING, Stage.COMPILING},
}
