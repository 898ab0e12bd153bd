"""Scenes of global pauses, in which one learner copies and assigns."""

from __future__ import annotations

from collections.abc import Callable

from lines import Tracer
from scenes import Dying, Scene, all_rest
from served import Job


def _stood(model: str) -> Callable[[Job, Tracer, Dying], None]:
    def play(job: Job, tracer: Tracer, dying: Dying) -> None:
        """Kill the requester in its second pause."""
        others, asks = list(job.learners), job.hire()
        for one in others:
            one.go()

        def push() -> None:
            wanted = {one: one.published + 2 for one in others}
            job.until(lambda: all(one.published >= wanted[one] for one in others), "others push")

        if model != "asp":
            job.change(model)
        push()
        with dying():
            asks.stand()
            asks.go_on()
            push()
            asks.stand()
            job.remove(asks, asks.kill)
            push()
            job.until(lambda: job.retired(asks), "its row is free")
        if model != "asp":
            job.change("asp")
        all_rest(job)

    return play


STANDS = [
    Scene("stand", _stood("asp")),
    Scene("stand of ssp", _stood("ssp:s=1")),
    Scene("stand of bsp", _stood("bsp")),
]
