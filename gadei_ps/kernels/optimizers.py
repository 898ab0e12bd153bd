"""Optimizers, schedules and wire types that the server computes, and their parameters.

TABLE describes each kind of optimizer; the command line, the job file, learners and the display
derive from it. The loop of a kind is in cpu.py.

A specification travels from the process that starts a job to the one that applies gradients as a
float64 array of shape (PACKED,), so that it can lie in shared memory. Index constants name its
elements. The command line imports this file, so it does not import NumPy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Kind(IntEnum):
    """An optimizer, with the semantics of the class of that name in `torch.optim`.

    ADD adds what learners push, which are updates and not gradients: the optimizer and its state
    are theirs (Park et al. 2020: w += u).
    """

    SGD = 1
    MOMENTUM = 2
    NESTEROV = 3
    ADAGRAD = 4
    ADAM = 5
    ADAMW = 6
    ADD = 7
    RMSPROP = 8


class Schedule(IntEnum):
    """Course of the learning rate after the warm-up."""

    CONSTANT = 1
    STEP = 2
    COSINE = 3


class WireType(IntEnum):
    """Number format of a gradient's values as a learner pushes them: enum ps_wire_type in C."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3


# Elements of a packed specification. Shared memory (`hyper`) has one for each group of parameters.
KIND = 0
LR = 1
MOMENTUM = 2
BETA1 = 3
BETA2 = 4  # or alpha, which RMSprop's squares decay by in the same way
EPS = 5
WEIGHT_DECAY = 6
SCHEDULE = 7
WARMUP_STEPS = 8
STEP_SIZE = 9
STEP_GAMMA = 10
TOTAL_STEPS = 11
MIN_LR = 12
STALENESS_AWARE = 13
CLIP_NORM = 14
SPIKE_COMPENSATION = 15
PACKED = 16

# Elements of the scalars of one gradient, as `cpu.coefficients` writes them.
RATE = 0  # what multiplies the direction; for Adam lr / (1 - beta1**t)
DECAY = 1  # coupled: what multiplies the weight and is added to the gradient. AdamW: 1 - lr * decay
MASS = 2  # momentum
FLOOR = 3  # eps
MEAN_NEW = 4  # 1 - beta1
SQUARE_OLD = 5  # beta2, alpha
SQUARE_NEW = 6  # 1 - beta2, 1 - alpha
UNBIAS = 7  # 1 / sqrt(1 - beta2**t)
OF_MOMENT = 8  # what multiplies the momentum or first moment in the direction
OF_GRADIENT = 9  # what multiplies the gradient beside it; for Adam times 1 - beta1**t
COEFFICIENTS = 10


@dataclass(frozen=True)
class Traits:
    """A kind of optimizer, except for its arithmetic."""

    settings: Mapping[str, float]
    """Fields that it uses beside `lr`, each with the default of torch's class."""
    slots: tuple[str, ...] = ()
    """Values kept for each weight, by torch's names: at most two float32, which begin at zero."""
    torch: str = ""
    """Its class in `torch.optim`; empty: none. The first kind of a class stands for the class."""
    torch_lr: float = 1e-3
    """Default learning rate of that class."""
    torch_fixed: Mapping[str, object] = field(default_factory=dict)
    """Settings of that class that the kind does not have as fields."""
    torch_saved: Mapping[str, object] = field(default_factory=dict)
    """The same, of those that only a saved state has."""
    torch_steps: bool = True
    """Whether that class counts the steps of each parameter."""
    with_momentum: str = ""
    """The slot that torch keeps only if there is a momentum."""
    job: Mapping[str, float] = field(default_factory=dict)
    """Defaults of a job that differ from DEFAULTS, eps aside."""


_MOMENTUM = {"momentum": 0.9, "weight_decay": 0.0}
_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
_SGD = {"dampening": 0.0, "nesterov": False}

TABLE: Final[Mapping[Kind, Traits]] = {
    Kind.SGD: Traits(
        {"weight_decay": 0.0}, torch="SGD", torch_fixed=_SGD | {"momentum": 0.0}, torch_steps=False
    ),
    Kind.MOMENTUM: Traits(
        _MOMENTUM, ("momentum_buffer",), "SGD", torch_fixed=_SGD, torch_steps=False
    ),
    Kind.NESTEROV: Traits(
        _MOMENTUM,
        ("momentum_buffer",),
        "SGD",
        torch_fixed=_SGD | {"nesterov": True},
        torch_steps=False,
    ),
    Kind.ADAGRAD: Traits({"eps": 1e-10, "weight_decay": 0.0}, ("sum",), "Adagrad", 1e-2),
    Kind.ADAM: Traits(
        _ADAM, ("exp_avg", "exp_avg_sq"), "Adam", torch_saved={"decoupled_weight_decay": False}
    ),
    Kind.ADAMW: Traits(
        _ADAM | {"weight_decay": 1e-2},
        ("exp_avg", "exp_avg_sq"),
        "AdamW",
        torch_saved={"decoupled_weight_decay": True},
    ),
    Kind.ADD: Traits({}, torch_lr=1.0, job={"lr": 1.0}),  # updates, as they are
    Kind.RMSPROP: Traits(
        {"momentum": 0.0, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0},
        ("square_avg", "momentum_buffer"),
        "RMSprop",
        1e-2,
        torch_fixed={"centered": False},
        with_momentum="momentum_buffer",
        job={"momentum": 0.0},
    ),
}
assert [*TABLE] == [*Kind], "each kind has a row, in the order of their numbers"

NAMES: Final = tuple(kind.name.lower() for kind in Kind)
"""The kinds as job files and scripts name them."""
DEFAULTS: Final[Mapping[str, float]] = {
    "lr": 0.01,
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.999,
    "alpha": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
}
"""Default settings of a job, for most kinds; usual() has those of one kind."""


def traits(name: str) -> Traits:
    """Return the row of a kind by its name, one of NAMES."""
    return TABLE[Kind[name.upper()]]


def usual(name: str) -> dict[str, float]:
    """Return the defaults of a job whose optimizer is of that kind, one of NAMES."""
    one = traits(name)
    eps = {"eps": one.settings["eps"]} if "eps" in one.settings else {}
    return {**DEFAULTS, **eps, **one.job}


# The kernels compute in float32. A larger value would be an infinity there, and a smaller learning
# rate zero; with an eps of zero, 0 / (sqrt(0) + 0) is not a number.
_LARGEST = (2 - 2.0**-23) * 2.0**127
_LEAST_RATE = 2.0**-149
_LEAST_EPS = 2.0**-126
# The largest count that a float64 holds exactly together with all smaller ones.
_LARGEST_COUNT = 2**53


def slots(kind: int) -> int:
    """Return how many float32 values the optimizer keeps for each weight (0, 1 or 2).

    TABLE names them. Raises ValueError for an unknown kind.
    """
    return len(TABLE[Kind(kind)].slots)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer with its parameters, checked when it is made.

    Semantics are those of `torch.optim`: SGD without dampening, weight decay added to the gradient
    for every kind but AdamW, Adagrad with `lr_decay` 0 and an accumulator that begins at 0, Adam
    without `amsgrad`, RMSprop not centered. ADD adds the rate times what is pushed and knows no
    weight decay.

    The learning rate at step t = 0, 1, 2, ... is

    - for t < warmup_steps: lr * (t + 1) / warmup_steps, so that the last of them has all of lr;
    - from then on, with u = t - warmup_steps and n = total_steps - warmup_steps,
      CONSTANT: lr;
      STEP: lr * step_gamma ** (u // step_size), as torch's StepLR;
      COSINE: min_lr + (lr - min_lr) * (1 + cos(pi * u / n)) / 2 up to u = n, min_lr after it, as
      torch's CosineAnnealingLR with T_max = n.

    total_steps includes the warm-up. With `staleness_aware`, a gradient of staleness s > 1 is
    applied with that rate divided by s (Zhang, Gupta, Lian, Liu 2016, 'Staleness-aware async-SGD
    for distributed deep learning').

    With `spike_compensation`, momentum, Nesterov, Adam, AdamW and RMSprop apply a gradient g of
    staleness D as far as the momentum would have carried it through the D updates that it missed:
    the direction m becomes beta**D m + (1 - beta**D) g for Adam's first moment, and beta**D m +
    (1 - beta**D) / (1 - beta) g for a momentum that sums, as RMSprop's does of scaled gradients
    (Kosson et al. 2021, 'Pipelined backpropagation at scale'). Without staleness it is the same.

    `clip_norm` above 0 scales a gradient whose Euclidean norm is larger down to it, as
    ``torch.nn.utils.clip_grad_norm_`` does before the step.

    `eps` None stands for torch's default: 1e-10 for Adagrad, 1e-8 for the others. Parameters that
    the kind does not use are checked, carried and ignored. Raises ValueError naming the field.

    Every field must be a value that float32 can hold, because the kernels compute in float32: 1e39
    would be an infinity there. An lr above 0 that float32 rounds to 0 is refused too; other fields,
    and the rates of a schedule, may become 0.
    """

    kind: Kind
    lr: float = 0.01
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float | None = None
    weight_decay: float = 0.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    step_size: int = 0
    step_gamma: float = 0.1
    total_steps: int = 0
    min_lr: float = 0.0
    staleness_aware: bool = False
    clip_norm: float = 0.0
    spike_compensation: bool = True
    alpha: float = 0.99

    def __post_init__(self) -> None:
        """Check every field; raise ValueError naming the first that is wrong."""
        object.__setattr__(self, "kind", _member("kind", Kind, self.kind))
        object.__setattr__(self, "schedule", _member("schedule", Schedule, self.schedule))
        if self.eps is None:
            object.__setattr__(self, "eps", usual(self.kind.name)["eps"])

        lr = _number("lr", self.lr)
        _require("lr", lr, lr >= 0, "at least 0")
        _require(
            "lr", lr, lr == 0 or _rounded(lr) > 0, f"0, or at least {_LEAST_RATE:.3g} (float32)"
        )
        for name in ("momentum", "beta1", "beta2", "alpha"):
            value = _number(name, getattr(self, name))
            _require(name, value, 0 <= value < 1, "in [0, 1)")
            _require(name, value, _rounded(value) < 1, "below 1 when rounded to float32")
        eps = _number("eps", self.eps)
        _require("eps", eps, eps >= _LEAST_EPS, f"at least {_LEAST_EPS:.3g}")
        decay = _number("weight_decay", self.weight_decay)
        _require("weight_decay", decay, decay >= 0, "at least 0")
        gamma = _number("step_gamma", self.step_gamma)
        _require("step_gamma", gamma, gamma > 0, "above 0")
        clip_norm = _number("clip_norm", self.clip_norm)
        _require("clip_norm", clip_norm, clip_norm >= 0, "at least 0")
        min_lr = _number("min_lr", self.min_lr)
        _require("min_lr", min_lr, 0 <= min_lr <= lr, f"between 0 and lr ({lr})")
        for name in ("warmup_steps", "step_size", "total_steps"):
            _count(name, getattr(self, name))
        for name in ("staleness_aware", "spike_compensation"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, not {getattr(self, name)!r}")

        if self.kind is Kind.NESTEROV:
            _require("momentum", self.momentum, self.momentum > 0, "above 0 for NESTEROV")
        if self.schedule is Schedule.STEP:
            _require("step_size", self.step_size, self.step_size >= 1, "at least 1 for STEP")
        if self.schedule is Schedule.COSINE:
            rule = f"above warmup_steps ({self.warmup_steps}) for COSINE"
            _require("total_steps", self.total_steps, self.total_steps > self.warmup_steps, rule)
        _require("lr", lr, lr <= self.most_lr, f"at most {self.most_lr:.3g} (float32)")

    @property
    def most_lr(self) -> float:
        """The largest rate with which all factors of an update are finite in float32.

        Adam divides the rate by 1 - beta1 at its first step, and AdamW multiplies it by the decay.
        """
        adam = self.kind in (Kind.ADAM, Kind.ADAMW)
        most = _LARGEST * (1 - self.beta1) if adam else _LARGEST
        return most / max(1.0, self.weight_decay) if self.kind is Kind.ADAMW else most

    def rate(self, t: int) -> float:
        """Return the learning rate at step t. Raises OverflowError if it is not finite."""
        since = t - self.warmup_steps
        if since < 0:
            return self.lr * (t + 1) / self.warmup_steps
        if self.schedule is Schedule.STEP:
            return self.lr and float(self.lr * self.step_gamma ** (since // self.step_size))
        if self.schedule is Schedule.COSINE:
            part = min(since / (self.total_steps - self.warmup_steps), 1.0)
            return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * part)) / 2
        return self.lr

    def pack(self) -> NDArray[np.float64]:
        """Return the specification as a new float64 array of shape (PACKED,)."""
        import numpy as np

        hyper = np.zeros(PACKED, np.float64)
        for index, name in _fields_of(self.kind).items():
            hyper[index] = getattr(self, name)
        return hyper

    @classmethod
    def unpack(cls, hyper: NDArray[np.float64]) -> OptimizerSpec:
        """Return the specification that `pack` wrote, from a float64 array of shape (PACKED,).

        Raises ValueError for another shape or type, and for values that no specification has.
        """
        if hyper.shape != (PACKED,) or hyper.dtype != "float64":
            raise ValueError(f"hyper must be float64 of shape ({PACKED},)")
        values: dict[str, Any] = {}
        for index, name in _fields_of(hyper[KIND]).items():
            value = float(hyper[index])
            values[name] = _RESTORE[name](value) if name in _RESTORE else value
        return cls(**values)


_FIELDS = {
    KIND: "kind",
    LR: "lr",
    MOMENTUM: "momentum",
    BETA1: "beta1",
    BETA2: "beta2",
    EPS: "eps",
    WEIGHT_DECAY: "weight_decay",
    SCHEDULE: "schedule",
    WARMUP_STEPS: "warmup_steps",
    STEP_SIZE: "step_size",
    STEP_GAMMA: "step_gamma",
    TOTAL_STEPS: "total_steps",
    MIN_LR: "min_lr",
    STALENESS_AWARE: "staleness_aware",
    CLIP_NORM: "clip_norm",
    SPIKE_COMPENSATION: "spike_compensation",
}
assert {*_FIELDS.values(), "alpha"} == {field.name for field in fields(OptimizerSpec)}


def _fields_of(kind: float) -> dict[int, str]:
    """Return the field of each element."""
    has_alpha = any(kind == one and "alpha" in row.settings for one, row in TABLE.items())
    return _FIELDS | {BETA2: "alpha"} if has_alpha else _FIELDS


def _whole(value: float) -> float | int:
    """Return a count as an int; another value is returned as it is, for `_count` to refuse."""
    return int(value) if value.is_integer() else value


def _flag(value: float) -> object:
    """Return 0 or 1 as a bool; what is neither comes back as it is, to be refused."""
    return bool(value) if value in (0.0, 1.0) else value


_RESTORE: dict[str, Callable[[float], object]] = {
    "kind": _whole,
    "schedule": _whole,
    "warmup_steps": _whole,
    "step_size": _whole,
    "total_steps": _whole,
    "staleness_aware": _flag,
    "spike_compensation": _flag,
}

E = TypeVar("E", bound=IntEnum)


def _member(name: str, choices: type[E], value: int) -> E:
    """Return the member of that value, or raise ValueError naming the field."""
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(choice.name for choice in choices)
        raise ValueError(f"{name} must be one of {known}, not {value!r}") from None


def _number(name: str, value: object) -> float:
    """Return a number that float32 holds as it is, or raise ValueError naming the field."""
    # A comparison, because an int may be too large for float().
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if abs(value) > _LARGEST:
        shown = value if isinstance(value, float) else "a larger one"
        raise ValueError(f"{name} must be at most {_LARGEST:.3g} (float32), not {shown}")
    return value


def _rounded(value: float) -> float:
    """Return a number that is not above _LARGEST as float32 has it."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _count(name: str, value: object) -> None:
    """Raise ValueError naming the field unless the value is a whole number that float64 holds."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 <= value <= _LARGEST_COUNT:  # type: ignore[operator]
        raise ValueError(f"{name} must be a whole number from 0 to 2**53, not {value!r}")


def _require(name: str, value: object, holds: bool, rule: str) -> None:
    """Raise ValueError naming the field and the rule that its value breaks."""
    if not holds:
        raise ValueError(f"{name} must be {rule}, not {value!r}")
