"""What is said about a job's optimizer: by its job file or command line, and by a script.

What the job file says counts first, then what the script of the first learner says, then the
defaults.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict

FIELDS: Final = ("kind", "lr", "momentum", "beta1", "beta2", "eps", "weight_decay")
DEFAULTS: Final[dict[str, Any]] = {
    "kind": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
}


class Settings(BaseModel):
    """What somebody says about the optimizer; None: nothing. eps has a default for each kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sgd", "momentum", "nesterov", "adagrad", "adam", "adamw", "add"] | None = None
    lr: float | None = None
    momentum: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None

    @property
    def said(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    def applying(self, kind: str) -> dict[str, Any]:
        """What of this means the same for an optimizer of that kind."""
        if self.kind not in (None, kind) and "add" in (self.kind, kind):
            return {}
        found = {name: value for name, value in self.said.items() if name in uses(kind)}
        if (kind == "adagrad") != (self.kind == "adagrad"):
            found.pop("eps", None)
        return found

    def filled(self, script: Settings) -> Self:
        """These settings, where they say nothing the script's, and then the defaults."""
        kind = self.kind or script.kind or DEFAULTS["kind"]
        usual = DEFAULTS | ({"lr": 1.0} if kind == "add" else {})  # updates, as they are
        taken = script.applying(kind)
        return self.model_copy(update={**usual, **taken, "kind": kind, **self.said})


NOTHING: Final = Settings()


def uses(kind: str) -> tuple[str, ...]:
    """The fields that an optimizer of this kind looks at."""
    if kind == "add":
        return "kind", "lr"
    own: tuple[str, ...] = ()
    if kind in ("momentum", "nesterov"):
        own = ("momentum",)
    elif kind in ("adam", "adamw"):
        own = ("beta1", "beta2", "eps")
    elif kind == "adagrad":
        own = ("eps",)
    return ("kind", "lr", *own, "weight_decay")
