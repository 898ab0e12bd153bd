"""Scenes of global pauses, in which one learner copies and assigns."""

from __future__ import annotations

from collections.abc import Callable

from lines import Tracer
from scenes import Dying, Scene, all_rest
from served import Job


def _paused(model: str) -> Callable[[Job, Tracer, Dying], None]:
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
            asks.pause()
            asks.go_on()
            push()
            asks.pause()
            job.remove(asks, asks.kill)
            push()
            job.until(lambda: job.retired(asks), "its row is free")
        if model != "asp":
            job.change("asp")
        all_rest(job)

    return play


PAUSES = [
    Scene("pause", _paused("asp")),
    Scene("pause of ssp", _paused("ssp:s=1")),
    Scene("pause of bsp", _paused("bsp")),
]
