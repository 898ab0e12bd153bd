"""The job's optimizer in `param_groups`, as it is and as `gadei-ps set` changes it."""

from __future__ import annotations

import math
from typing import Any

import torch

from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch.like import check_unchanged, shown


class JobSettings:
    """What a learner's parameter group shows of the job, and its rate relative to the job's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._changes = client.hyper_changes
        self.shown = shown(OptimizerSpec.unpack(client.hyper))
        """The settings as torch's class has them."""
        self.lr = float(self.shown["lr"])
        """The rate that rates of the group are compared with."""
        self._scaled = self.lr, 1.0  # a rate of the group, and what it is relative to the job's

    def look(self, group: dict[str, Any]) -> None:
        """Before a step. Raises UsageError where the script has changed what it may not change."""
        check_unchanged(group, self.shown)
        if self._client.hyper_changes != self._changes:
            self._follow(group)

    def _follow(self, group: dict[str, Any]) -> None:
        """Shows what has changed. The group's rate relative to the job's stays.

        A scheduler of torch goes on from the rate that it was made with. So that what it sets keeps
        its meaning, the rate is left to it.
        """
        scale = self.scale(group)
        self._changes = self._client.hyper_changes
        before, self.shown = self.shown, shown(OptimizerSpec.unpack(self._client.hyper))
        moved = {name: value for name, value in self.shown.items() if value != before[name]}
        rate = moved.pop("lr", None)
        group.update(moved)
        if rate is None or "initial_lr" in group:
            return
        self.lr, rate = rate, rate * scale
        self._scaled = rate, scale
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    def scale(self, group: dict[str, Any]) -> float:
        """The learner's learning rate relative to the job's. Raises UsageError."""
        rate = group["lr"]
        try:
            rate = float(rate)
            if rate == self._scaled[0]:
                return self._scaled[1]
            if rate >= 0 and self.lr and math.isfinite(scale := rate / self.lr):
                self._scaled = rate, scale
                return scale
        except (TypeError, ValueError, OverflowError):
            pass
        else:
            if rate > 0 and not self.lr:
                raise UsageError(
                    f"param_groups[0]['lr'] is {rate:g}, and the job's rate is 0: give Optimizer, "
                    "or the job file, a rate above 0"
                )
        raise UsageError(f"param_groups[0]['lr'] is {rate!r}: set a number from 0 on")
