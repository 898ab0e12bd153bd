"""Tensors of a PyTorch model that belong to the job, and their order in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gadei_ps.errors import UsageError
from gadei_ps.learners.attach import warn
from gadei_ps.learners.client import Client
from gadei_ps.learners.optimizer_settings import OptimizerSettings
from gadei_ps.learners.torch import casts
from gadei_ps.memory.weights import Model

STRANGE = (
    "tensor {0!r} ({1} in all) is of a type that a job does not have: checkpoints and exports are "
    "without it"
)
LACKS = (
    "the job's model, which it had before, is without {0!r} ({1} in all): so are checkpoints and "
    "exports, and each learner keeps its own"
)
ANOTHER = (
    "another model of this process has trained in job {0!r}, and this one would start from its "
    "weights: give it a job of its own (k-fold, sweeps: `with gadei_ps.serve('{0}-2') as job:` and "
    "Optimizer(model, job.name), or a `gadei-ps run` for each model), or name the job to continue "
    "from its weights: Optimizer(model, {0!r})"
)
# Which learner of this process has a parameter, by the parameter's id: a second one that took it
# would leave the first behind in its job, where others wait for it, and would lose the parameter at
# the close() of the first. Each owner has a close().
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# Layers of all models that have joined a job, by process and job. Not parameters: torch does not
# swap those that have weak references.
_JOINED: dict[tuple[int, bytes], list[weakref.ref[torch.nn.Module]]] = {}
Parameters = Mapping[str, torch.nn.Parameter]
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Given the parameters, makes an optimizer of torch's, which is the learner's own."""


@dataclass(frozen=True)
class Trained:
    """A model's parameters that require a gradient, by name, and what else its job has.

    buffers: those that state_dict() has, as they are when this is made: forward() may replace them.
    frozen: the other parameters. fixed: those of them that are part of the job.
    """

    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    device: torch.device
    frozen: dict[str, torch.nn.Parameter]
    fixed: dict[str, torch.nn.Parameter]

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        *,
        any_type: bool = False,
        buffers: bool = True,
        fixed: bool = True,
    ) -> Trained:
        """Collect the tensors of a model.

        any_type: whether parameters may have other types than float32. buffers, fixed: whether
        buffers and frozen parameters are part of the job.

        Raises UsageError for a model whose parameters cannot be shared.
        """
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                "give Optimizer the model itself, not its parameters, groups of them or another "
                "optimizer: Optimizer(model, kind='adamw', lr=1e-3, groups=[{'params': ..., 'lr': "
                "...}]), as the job has parameters by name; several modules go into one "
                "torch.nn.ModuleList, and like= takes an optimizer of torch"
            )
        parameters: dict[str, torch.nn.Parameter] = {}
        frozen: dict[str, torch.nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            (parameters if parameter.requires_grad else frozen)[name] = parameter
        if not parameters:
            raise UsageError("the model has no parameters that require a gradient")
        for name, parameter in parameters.items():
            if torch.nn.parameter.is_lazy(parameter):
                raise UsageError(
                    f"parameter {name!r} has no values yet (a lazy layer): call the model with a "
                    "batch first"
                )
            types = casts.TYPES if any_type else casts.TYPES[:1]
            if parameter.dtype not in types or parameter.device.type not in ("cpu", "cuda"):
                raise UsageError(
                    f"parameter {name!r} is {parameter.dtype} on {parameter.device}: "
                    + (
                        "a job trains parameters of float32, float64, bfloat16 and float16"
                        if any_type
                        else "the weights of a job are float32 (use Optimizer for other types)"
                    )
                    + ", on the CPU or a CUDA device"
                )
        device = _device_of(parameters)
        one = next(iter(parameters.values()))
        # Optimizer gives them the job's weights in the end, and warns itself.
        if not any_type and device.type == "cpu" and one.is_shared():  # type: ignore[no-untyped-call]
            warn(
                "the model is shared with other processes (share_memory), and they do not see what "
                "the job learns: let `gadei-ps run` start the learners, and test in one of them",
            )
        kept = module.state_dict(keep_vars=True).keys() if buffers else ()
        more = {name: buffer for name, buffer in module.named_buffers() if name in kept}
        strange = [
            name
            for name, one in [*more.items(), *(frozen.items() if fixed else ())]
            if not casts.is_plain(one)
        ]
        if strange:
            warn(STRANGE.format(strange[0], len(strange)))
        return cls(
            module,
            parameters,
            {name: one for name, one in more.items() if name not in strange},
            device,
            frozen,
            {name: one for name, one in frozen.items() if fixed and name not in strange},
        )

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a buffer as it is now; None if the module has it no more."""
        try:
            return self.module.get_buffer(name)
        except AttributeError:
            return None

    def replace(self, name: str, values: torch.Tensor) -> None:
        """Give the module another tensor in the place of a buffer."""
        owner, _, own = name.rpartition(".")
        setattr(self.module.get_submodule(owner), own, values)

    @property
    def is_cast(self) -> bool:
        """Whether some parameters have other types than the job's float32."""
        return any(map(casts.differs, self.parameters.values()))

    def join(self, job: str | None, **options: Any) -> Client:
        """Return a client whose job has this model. options: keywords of Client.

        Raises what Client raises, and UsageError if another model of this process has joined the
        job.
        """
        ordered = _ordered(self.module, self.parameters)
        values = {name: casts.host(one) for name, one in ordered.items()}
        client = Client(
            job,
            tensors=values,
            buffers={name: casts.copy(one) for name, one in self.buffers.items()},
            frozen={name: casts.bits(one) for name, one in self.fixed.items()},
            has_buffers=bool(self.buffers),
            aliases=self.aliases(),
            **options,
        )
        try:
            self._check_same(values, client, named=job is not None)
        except BaseException:
            client.detach()
            raise
        lacks = [one for one in (*self.buffers, *self.fixed) if one not in client.weights]
        if lacks:
            warn(LACKS.format(lacks[0], len(lacks)))
        return client

    def _check_same(self, values: Mapping[str, np.ndarray], client: Client, *, named: bool) -> None:
        """Raise UsageError if another model of this process has joined the job before, which would
        give its weights to this one without a warning.

        values: of the parameters, before they are the job's. named: whether the script names the
        job.
        """
        job = os.getpid(), client.place.control.header["job_id"].tobytes()
        joined = _JOINED.get(job)
        living = [one for one in joined or () if one() is not None]
        ours = {id(one) for one in self.module.parameters()}
        held = (
            one for layer in living if (known := layer()) for one in known.parameters(recurse=False)
        )
        is_another = joined is not None and not named and not any(id(one) in ours for one in held)
        if is_another and any(
            not np.array_equal(client.weights[name], one) for name, one in values.items()
        ):
            raise UsageError(ANOTHER.format(client.job))
        _JOINED[job] = [*living, *map(weakref.ref, self.module.modules())]

    # -- the learner that has the parameters ----------------------------------------------------

    def own(self, owner: object) -> None:
        """Record the learner that has the parameters."""
        for one in self.parameters.values():
            _OWNERS[id(one)] = owner

    def disown(self, owner: object) -> None:
        """Record that this learner has the parameters no more."""
        for one in self.parameters.values():
            if _OWNERS.get(id(one)) is owner:
                del _OWNERS[id(one)]

    def end_earlier(self, kind: type[Any]) -> None:
        """Close the owner of this kind that has exactly these parameters, if there is one."""
        ours = {id(one) for one in self.parameters.values()}
        for owner in {id(one): one for number in ours if (one := _OWNERS.get(number))}.values():
            held = {number for number, one in _OWNERS.items() if one is owner}
            if type(owner) is kind and held == ours:
                owner.close()

    def check_free(self) -> None:
        """Raise UsageError if a parameter has an owner."""
        for name, one in self.parameters.items():
            if (owner := _OWNERS.get(id(one))) is not None:
                kind = type(owner).__name__
                raise UsageError(
                    f"parameter {name!r} belongs to {'an' if kind[0] in 'AEIOU' else 'a'} {kind} "
                    "that has not left its job: close() that one first"
                )

    def aliases(self) -> dict[str, str]:
        """Return further names of tied weights in state_dict(), each with the first name."""
        ours = {**self.parameters, **self.buffers, **self.fixed}
        first = {id(tensor): name for name, tensor in ours.items()}
        every: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        every |= dict(self.module.named_buffers(remove_duplicate=False))
        return {
            name: first[id(tensor)]
            for name, tensor in every.items()
            if id(tensor) in first and name not in ours
        }

    def join_adding(self, job: str | None, make: Make, argument: str, **options: Any) -> Client:
        """Return a client whose job has this model and adds what the learner's own optimizer
        changes.

        argument: as what `make` was given. Raises UsageError unless it is a function.
        """
        if not callable(make):
            raise UsageError(
                f"{argument} is a {type(make).__name__}: give a function that makes the optimizer, "
                "as lambda p: torch.optim.SGD(p, lr=0.1)"
            )
        return self.join(job, optimizer=OptimizerSettings(kind="add"), **options)

    def made(self, make: Make, argument: str) -> torch.optim.Optimizer:
        """Return the learner's own optimizer. Raises UsageError if `make` makes none."""
        return own_optimizer(make, list(self.parameters.values()), argument)

    def warn_of_unfrozen(self) -> None:
        """Warn once of parameters that the job does not have and that require a gradient now."""
        for name, parameter in self.frozen.items():
            if parameter.requires_grad:
                warn(
                    f"parameter {name!r} requires a gradient now, and did not when Optimizer was "
                    "made: the job does not have it, so that it is not trained; freeze it after "
                    "Optimizer(model) instead",
                )
                self.frozen.clear()
                return

    def in_order_of(self, model: Model) -> list[torch.nn.Parameter | None]:
        """Return the parameters in the order of the job's table; None for its buffers."""
        return [self.parameters.get(tensor.name) for tensor in model.tensors]


def own_optimizer(
    make: Make, parameters: list[torch.nn.Parameter], argument: str
) -> torch.optim.Optimizer:
    """Make an optimizer for the parameters. Raises UsageError if a learner cannot step with it."""
    optimizer = make(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{argument} gave a {type(optimizer).__name__}: let it return an optimizer of torch"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            f"{argument} gave LBFGS, which computes gradients several times a step: take an "
            "optimizer that steps with the gradients at hand"
        )
    own = {id(one) for one in parameters}
    held = [id(one) for group in optimizer.param_groups for one in group["params"]]
    if not own.issuperset(held):
        raise UsageError(
            f"{argument} gave a {type(optimizer).__name__} of other parameters: make it of "
            "those that the function is given, as lambda p: torch.optim.SGD(p, lr=0.1)"
        )
    return optimizer


def _device_of(parameters: Parameters) -> torch.device:
    """Raise UsageError if the parameters are on several devices."""
    found = {parameter.device for parameter in parameters.values()}
    if len(found) > 1:
        devices = " and ".join(sorted(map(str, found)))
        raise UsageError(
            f"the model's parameters are on {devices}: move all to one device (model.to)"
        )
    return found.pop()


def _ordered(module: torch.nn.Module, parameters: Parameters) -> dict[str, torch.nn.Parameter]:
    """Return the parameters in the order in which they shall lie in memory."""
    group_of = {name: names for names in recurrent(module, parameters) for name in names}
    order: dict[str, torch.nn.Parameter] = {}
    for name in parameters:
        for member in group_of.get(name, [name]):
            order.setdefault(member, parameters[member])
    return order


def recurrent(module: torch.nn.Module, parameters: Parameters) -> list[list[str]]:
    """Return the parameters' names of each recurrent layer in the order that cuDNN requires.

    That is all matrices, then all biases, without gaps. In another order cuDNN copies the
    parameters in every call.
    """
    found = []
    for prefix, layer in module.named_modules():
        if isinstance(layer, torch.nn.RNNBase):
            names = [f"{prefix}.{name}" if prefix else name for name, _ in layer.named_parameters()]
            known = [name for name in names if name in parameters]
            found.append(sorted(known, key=lambda name: parameters[name].dim() < 2))
    return [names for names in found if names]
