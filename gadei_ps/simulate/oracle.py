"""The oracle: it knows all run times in advance and chooses the best cutoff of every superstep.

Teng and Wood 2018 (Cutoff SGD), section 3; their figure 2 calls it 'ground truth maximum
achievable'. All n learners begin superstep i together, with the run times of their i-th iterations.
In ascending order these are x_(1) to x_(n). The superstep ends after x_(c) seconds with the c
gradients that have arrived. c is the number for which c / x_(c) is largest, and the largest such
number if there are several. Then all learners begin the next superstep. If the server needs s
seconds for a gradient, the superstep takes x_(c) + c s, and the same c is the best.

The oracle's throughput is the sum of its gradients over the sum of its times. It runs as many
supersteps as the setting has iterations, or until it reaches the setting's gradients or time.
Learners do not die under the oracle.

The oracle chooses for each superstep alone. This does not maximise the ratio of the sums, so
another sequence of cutoffs may be a little better. Models without barriers may be much better,
because their learners do not begin together. If their throughput is above the oracle's, the ratio
shows the cost of barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gadei_ps.simulate.setting import Setting
from gadei_ps.sync.order_statistics import best_cutoff


@dataclass(frozen=True)
class Oracle:
    """The result of the oracle's run."""

    supersteps: int
    gradients: int
    seconds: float

    @property
    def throughput(self) -> float:
        """Gradients a second."""
        return self.gradients / self.seconds

    def as_dict(self) -> dict[str, float]:
        """Return JSON values."""
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
