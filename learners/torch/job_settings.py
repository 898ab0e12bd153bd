"""The job's optimizer in `param_groups`, as it is and as `gadei-ps set` changes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gadei_ps import _native
from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.learners.client import Client
from gadei_ps.learners.optimizer_settings import OptimizerSettings
from gadei_ps.learners.torch.convert_settings import check_unchanged, moved, torch_settings
from gadei_ps.learners.torch.model import Trained

MOST_SCALE = float(np.finfo(np.float32).max)  # a rate travels relative to the job's, in float32
Group = dict[str, Any]
"""One of torch's `param_groups`."""


class _GroupSettings:
    """Settings of the job in one of a learner's groups, and its learning rate relative to the
    job's.

    packed: as Client.hyper has it.
    """

    def __init__(self, number: int, packed: Any) -> None:
        self._number = number
        self._show(packed)
        self.lr = float(self.shown["lr"])
        """The rate that rates of the group are compared with."""
        self._scaled = self.lr, 1.0  # a rate of the group, and what it is relative to the job's

    def _show(self, packed: Any) -> None:
        spec = OptimizerSpec.unpack(packed)
        self.shown = torch_settings(spec)
        """The settings as torch's class has them."""
        self.own_momentum = self.momentum(self.shown)
        """The job's momentum of the group; see momentum()."""
        self._most_lr = spec.most_lr

    def check(self, group: Group) -> None:
        check_unchanged(group, self.shown, self._number)

    def follow(self, group: Group, packed: Any) -> None:
        """Show what has changed. The group's rate relative to the job's stays.

        A scheduler of torch continues from the rate that it was made with. So that what it sets
        keeps its meaning, the rate is left to it.
        """
        scale = self.scale(group)
        before = self.shown
        self._show(packed)
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

    def momentum(self, group: Group) -> float | None:
        """Return the group's momentum or first beta; None where the job's optimizer has none."""
        for name in ("momentum", "betas"):
            if has := self.shown.get(name):
                return moved(name, group.get(name, has))
        return None

    def scale(self, group: Group) -> float:
        """Return the learner's learning rate relative to the job's. Raises UsageError."""
        given: Any = group["lr"]
        try:
            rate = given = float(given)
        except (TypeError, ValueError, OverflowError):
            rate = -1.0
        if rate == self._scaled[0]:
            return self._scaled[1]
        what = f"param_groups[{self._number}]['lr'] is"
        if not rate >= 0:
            raise UsageError(f"{what} {given!r}: set a number from 0 on")
        most = min(self._most_lr, self.lr * MOST_SCALE) if self.lr else self._most_lr
        if rate > most:
            raise UsageError(
                f"{what} {rate:g}: set a number from 0 to {most:.3g}; float32 holds no larger one, "
                f"beside the job's rate of {self.lr:g}"
            )
        if not self.lr:
            raise UsageError(
                f"{what} {rate:g}, and the job's rate is 0: give Optimizer, or the job file, a "
                "rate above 0"
            )
        self._scaled = rate, rate / self.lr
        return rate / self.lr


class JobSettings:
    """The same for all groups of a learner, which are the job's."""

    def __init__(
        self,
        client: Client,
        trained: Trained,
        settings: OptimizerSettings,
        from_zero: Sequence[bool],
    ) -> None:
        """Read the job's groups. The last one, of parameters that no other one names, is left out
        if it has none.

        settings: of the script. The parameters of a group are in the order in which it names them.
        from_zero: groups whose rate is 0 in the script, and 1 in the job if that has no other.
        """
        self._client = client
        self._changes = client.hyper_changes
        rows = client.hyper
        group_of = {one.name: one.group for one in client.model.tensors}
        members: list[list[torch.nn.Parameter]] = [[] for _ in rows]
        for name, parameter in trained.parameters.items():
            members[group_of[name]].append(parameter)
        if settings.groups and len(settings.groups) + 1 == len(rows):
            names = {id(one): name for name, one in trained.parameters.items()}
            for own, group in zip(members, settings.groups, strict=False):
                own.sort(key=lambda one, group=group: group.place(names[id(one)]))  # type: ignore[misc]
        if len(rows) > 1 and not members[-1]:
            members.pop()
        self._settings = [
            _GroupSettings(number, row) for number, row in enumerate(rows[: len(members)])
        ]
        self.groups: list[Group] = [
            {"params": one, **has.shown} for one, has in zip(members, self._settings, strict=True)
        ]
        """Groups as torch's constructor takes them."""
        for made, zero in zip(self.groups, from_zero, strict=False):
            if zero and made["lr"] == 1:
                made["lr"] = 0.0

    @property
    def defaults(self) -> dict[str, Any]:
        """The settings of the last group, which torch reads."""
        return dict(self._settings[-1].shown)

    @property
    def torch_settings(self) -> list[dict[str, Any]]:
        """The settings of each group as torch's class has them."""
        return [one.shown for one in self._settings]

    @property
    def rates(self) -> list[float]:
        """The job's rate of each group."""
        return [one.lr for one in self._settings]

    def follow(self, groups: list[Group]) -> None:
        """Follow changes of the job before a step. Raises UsageError if the script has changed a
        setting of the job."""
        for one, group in zip(self._settings, groups, strict=True):
            one.check(group)
        if self._client.hyper_changes != self._changes:
            self._changes = self._client.hyper_changes
            rows = self._client.hyper
            for number, (one, group) in enumerate(zip(self._settings, groups, strict=True)):
                one.follow(group, rows[number])

    def scales(self, groups: list[Group]) -> _native.Scales:
        """Return this learner's learning rate of each group relative to the job's, and its
        momentum.

        The momentum only if a scheduler has moved it. Raises UsageError.
        """
        scales = tuple(map(_GroupSettings.scale, self._settings, groups))
        found = list(map(_GroupSettings.momentum, self._settings, groups))
        if found == [one.own_momentum for one in self._settings]:
            return scales
        momentum = found[0]
        if momentum is None or any(value != momentum for value in found):
            raise UsageError(
                "param_groups have different momentum or betas, and not the job's: a scheduler may "
                "move them to one value for all groups; give it one number, or cycle_momentum=False"
            )
        return scales, momentum
