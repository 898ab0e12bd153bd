"""The state of a job's optimizer in the format of torch's own class of that kind."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import torch

from gadei_ps.errors import UsageError
from gadei_ps.kernels.optimizers import TABLE, Kind, OptimizerSpec
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import Client
from gadei_ps.learners.torch import casts
from gadei_ps.learners.torch.convert_settings import CLASSES
from gadei_ps.learners.torch.model import Trained

MOVED_BY_SCHEDULERS = ("momentum", "betas")
OURS = "gadei_ps"  # beside torch's entries: what torch's class does not keep
KEPT = (
    "load_state_dict: the job has made steps with another state, and keeps it; to go back to this "
    "one, load it after a step of this learner"
)
READ_ONLY = (
    "optimizer.state is the server's and can only be read: load_state_dict() replaces it, and "
    "optimizer.assign(values, reset=True) clears it"
)
NO_STATE: Mapping[str, torch.Tensor] = MappingProxyType({})
Saved = Mapping[str, Any]


def _kind(client: Client) -> Kind:
    return OptimizerSpec.unpack(client.hyper[0]).kind


def whole_group(client: Client, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group with all settings that torch's class has."""
    kind = _kind(client)
    has = inspect.signature(CLASSES[kind]).parameters.items()
    defaults = {
        name: one.default for name, one in has if one.default is not inspect.Parameter.empty
    }
    return defaults | dict(TABLE[kind].torch_saved) | dict(group)


def read_state(
    client: Client, trained: Trained, parameters: Sequence[torch.Tensor]
) -> tuple[dict[int, dict[str, torch.Tensor]], int]:
    """Return the state by the parameters' numbers, as torch's class keeps it, and the optimizer's
    steps.

    parameters: in the order of the groups. Raises what Client.job_state raises.
    """
    kind, found = _kind(client), client.job_state()
    state: dict[int, dict[str, torch.Tensor]] = {}
    one_of = TABLE[kind]
    if not one_of.slots or not (found.steps or any(slot.any() for slot in found.slots)):
        return state, found.steps
    views = [client.model.views(slot) for slot in found.slots]
    names = {id(parameter): name for name, parameter in trained.parameters.items()}
    rows = [OptimizerSpec.unpack(row) for row in client.hyper]
    moving = {one.name: rows[one.group].momentum for one in client.model.tensors}
    for number, parameter in enumerate(parameters):
        name = names[id(parameter)]
        one = {
            key: torch.from_numpy(view[name]).to(parameter.device, parameter.dtype)
            for key, view in zip(one_of.slots, views, strict=True)
        }
        if not moving[name]:
            one.pop(one_of.with_momentum, None)
        if one_of.torch_steps:
            one = {"step": torch.tensor(float(found.steps))} | one
        state[number] = one
    return state, found.steps


def load_state(
    client: Client, trained: Trained, parameters: Sequence[torch.Tensor], saved: Saved
) -> None:
    """Load the state that state_dict() of this class or of torch's has saved into the server.

    parameters: in the order of the groups. Warns where the job keeps another one. Raises UsageError
    for the state of another optimizer, what Client.load_optimizer_state raises otherwise.
    """
    kind = _kind(client)
    slots, optional = TABLE[kind].slots, TABLE[kind].with_momentum
    ids = [one for group in saved["param_groups"] for one in group["params"]]
    names = {id(parameter): name for name, parameter in trained.parameters.items()}
    steps: set[int] = set()
    values: list[dict[str, np.ndarray]] = [{} for _ in slots]
    for number, parameter in zip(ids, parameters, strict=True):
        state = {key: one for key, one in saved["state"].get(number, {}).items() if one is not None}
        if not state or id(parameter) not in names:
            continue  # it never had a gradient; it is frozen now
        name = names[id(parameter)]
        if optional and {*slots} - {*state} == {optional}:
            state[optional] = torch.zeros_like(parameter)
        if {*state} - {"step"} != {*slots}:
            raise UsageError(
                f"load_state_dict: the state has {', '.join(sorted(state))}, and the job's "
                f"{kind.name.lower()} has {', '.join(slots) or 'none'}: it is of another "
                "optimizer"
            )
        if "step" in state:
            steps.add(round(float(state["step"])))
        for slot, key in zip(values, slots, strict=True):
            slot[name] = casts.host(state[key])
    if not steps and saved.get(OURS):
        steps.add(int(saved[OURS]["steps"]))
    if not any(steps) and not any(values):  # it is new
        if client.is_new or not (steps or slots):
            return
        steps.add(0)
    if len(steps) > 1:
        warn(
            f"load_state_dict: parameters have made {min(steps)} to {max(steps)} steps; the job "
            f"counts {max(steps)} for all",
        )
    if not client.load_optimizer_state(values, max(steps, default=None)):
        warn(KEPT)


def warn_of_settings(saved: Saved, groups: Sequence[Mapping[str, Any]]) -> None:
    """Warn of saved settings that the job overrides, except lr."""
    for theirs, ours in zip(saved["param_groups"], groups, strict=True):
        for name, has in ours.items():
            given = theirs.get(name, has)
            if name in ("lr", "initial_lr", "params") or given == has:
                continue
            if "initial_lr" in theirs and name in MOVED_BY_SCHEDULERS:
                continue
            if isinstance(given, list) and tuple(given) == has:
                continue
            warn(f"load_state_dict: {name} was saved as {given!r}; the job keeps {has!r}")


class State(Mapping[torch.Tensor, Mapping[str, torch.Tensor]]):
    """`optimizer.state`: momentum and moments of each parameter, as torch's class keeps them.

    A copy of the server's, made at the first look after each step of this learner. Torch refuses
    writes to the tensors, which are made under inference_mode(). Empty after close().
    """

    def __init__(
        self, client: Client, trained: Trained, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._client, self._trained, self._parameters = client, trained, parameters
        self._found: dict[torch.Tensor, Mapping[str, torch.Tensor]] = {}
        self._published = -1

    def _now(self) -> dict[torch.Tensor, Mapping[str, torch.Tensor]]:
        client = self._client
        if client.left:
            return {}
        if self._published != client.published:
            published = client.published
            with torch.inference_mode():
                found, _ = read_state(client, self._trained, self._parameters)
            self._found = {
                self._parameters[number]: MappingProxyType(one) for number, one in found.items()
            }
            self._published = published
        return self._found

    def __getitem__(self, parameter: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return self._now().get(parameter, NO_STATE)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._now()

    def __setitem__(self, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Accept the same values: frameworks move tensors to the device where they are."""
        kept = self[parameter]
        if kept.keys() != values.keys() or any(kept[name] is not values[name] for name in kept):
            raise UsageError(READ_ONLY)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UsageError(READ_ONLY)

    __delitem__ = clear = pop = popitem = setdefault = update = _refuse
