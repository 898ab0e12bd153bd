"""Wave synchronous parallel (WSP): SSP for virtual workers, which push a wave at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from gadei_ps.sync.parameters import Parameter, whole_number
from gadei_ps.sync.ssp import SSP

_distance = whole_number(0, 2**31 - 1)
_wave = whole_number(0, 2**16 - 1)


class WSP(SSP):
    """Waves are applied on arrival; grant = slowest wave + D + 1 (Park et al. 2020, HetPipe).

    From the thesis's chapter 'Data parallelism with multiple VWs'. A wave is s_local + 1
    mini-batches whose updates a learner aggregates and pushes as one gradient. So the clocks of SSP
    count waves here: `clock` is the learner's local clock, and the slowest clock is the global
    clock. A wave c >= D + 1 starts after every learner has pushed wave c - D - 1. A grant is
    published after the gradients on which it depends were applied, so the weights pulled for wave c
    contain all of these.

    A virtual worker that runs its mini-batches in a pipeline may start s_local mini-batches of the
    next wave before its grant: see `mini_batches`. It pulls before the last mini-batch of a wave. A
    learner without a pipeline, which accumulates the updates of a wave, may use this model too.
    """

    name: ClassVar[str] = "wsp"
    forms: ClassVar[tuple[str, ...]] = ("wsp:D=0,s_local=3", "wsp:0")
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"D": Parameter(_distance), "s_local": Parameter(_wave, required=False)}
    )

    def __init__(self, D: int, s_local: int = 0) -> None:
        """D: clock distance, in waves, 0 to 2**31 - 1. s_local: 0 to 65,535 mini-batches.

        Raises ValueError if a value is out of range.
        """
        super().__init__(_distance(D))
        self.D = self.s
        self.s_local = _wave(s_local)

    @property
    def wave(self) -> int:
        """Mini-batches that a learner pushes at once."""
        return self.s_local + 1

    @property
    def s_global(self) -> int:
        """The most mini-batches of others whose updates the weights of a mini-batch may lack."""
        return (self.D + 1) * self.wave + self.s_local - 1
