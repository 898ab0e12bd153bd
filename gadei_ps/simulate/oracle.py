"""The oracle: the best cutoff of every superstep, with the run times known beforehand.

Teng and Wood 2018 (Cutoff SGD), section 3, whose figure 2 has it as 'ground truth maximum
achievable'. All n learners begin superstep i together, with the run times of their i-th iterations;
in ascending order these are x_(1) to x_(n). The superstep ends after x_(c) seconds with the c
gradients that have arrived, c being the number that makes c / x_(c) largest (the largest of
several), and all begin the next one. If the server needs s seconds a gradient, the superstep takes
x_(c) + c s; the same c is the best one then. The oracle's throughput is all its gradients over all
its time, in as many supersteps as the run asks for: its iterations, or until its gradients or its
time are reached. Learners do not die under the oracle.

It chooses for each superstep alone. That bounds no sum of gradients over a sum of times, so another
sequence of cutoffs may be a little better; and models without barriers do not begin together, so
they may be much better. Their share of the oracle says what barriers cost, above 1 where that much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gadei_ps.simulate.setting import Setting
from gadei_ps.sync.order_statistics import best_cutoff


@dataclass(frozen=True)
class Oracle:
    """What it came to."""

    supersteps: int
    gradients: int
    seconds: float

    @property
    def throughput(self) -> float:
        """Gradients per second."""
        return self.gradients / self.seconds

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "supersteps": self.supersteps,
            "gradients": self.gradients,
            "seconds": self.seconds,
            "gradients_per_s": self.throughput,
            "mean_cutoff": self.gradients / self.supersteps,
        }


def run(setting: Setting) -> Oracle:
    """The oracle's run on the setting's run times."""
    learners = np.arange(setting.learners)
    supersteps = gradients = 0
    seconds = 0.0
    while True:
        times = np.sort(setting.times.draw(learners, np.full_like(learners, supersteps)))
        c = best_cutoff(times)
        supersteps += 1
        gradients += c
        seconds += float(times[c - 1]) + c * setting.server_s
        if setting.iterations is not None and supersteps >= setting.iterations:
            break
        if setting.gradients is not None and gradients >= setting.gradients:
            break
        if setting.seconds is not None and seconds >= setting.seconds:
            break
    return Oracle(supersteps, gradients, seconds)
