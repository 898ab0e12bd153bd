"""Settings of a job's optimizer from its job file, its command line and scripts.

Precedence: the group of parameters, the job file and command line, the script of the first
learner, the defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from gadei_ps.job.number_types import Real
from gadei_ps.kernels.optimizers import DEFAULTS, NAMES, traits, usual
from gadei_ps.memory import layout

FIELDS: Final = ("kind", *DEFAULTS)
MOST_GROUPS: Final = layout.MAX_GROUPS - 1
"""Groups that a job may name; the parameters that are in none of them are one more."""
DEFAULT_KIND: Final = "sgd"
if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[NAMES]


Values = dict[str, str | float | None]
"""Values of settings by field. To the type checker, bool and int are float."""


class Settings(BaseModel):
    """Settings of the optimizer from one source; None: not set. eps has a default for each kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: KindName | None = None
    lr: Real | None = None
    momentum: Real | None = None
    beta1: Real | None = None
    beta2: Real | None = None
    alpha: Real | None = None
    eps: Real | None = None
    weight_decay: Real | None = None

    @property
    def given(self) -> Values:
        """The fields that are not None."""
        return {name: value for name in FIELDS if (value := getattr(self, name)) is not None}

    def applying(self, kind: str) -> Values:
        """Return the settings that mean the same for an optimizer of that kind."""
        if self.kind not in (None, kind) and "add" in (self.kind, kind):
            return {}
        theirs, ours = usual(self.kind or DEFAULT_KIND), usual(kind)
        # A number means something else where it has another default: eps of Adagrad, for example.
        other = {name for name in ours.keys() - {"lr"} if ours[name] != theirs[name]}
        names = set(uses(kind)) - other
        return {name: value for name, value in self.given.items() if name in names}

    def filled(self, script: Settings) -> Self:
        """These settings; fields that they lack are the script's, else the defaults."""
        kind = self.kind or script.kind or DEFAULT_KIND
        defaults = {name: value for name, value in usual(kind).items() if name != "eps"}
        taken = script.applying(kind)
        return self.model_copy(update={**defaults, **taken, "kind": kind, **self.given})


class ScriptSettings(Settings):
    """Settings of the optimizer from a script, and of groups of parameters in their order.

    groups: None: not set; empty: no groups.
    """

    groups: Annotated[Sequence[Settings], Field(max_length=MOST_GROUPS)] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it sets nothing."""
        return not self.given and self.groups is None

    def with_(self, later: ScriptSettings) -> ScriptSettings:
        """These settings, where `later` does not set another."""
        update: dict[str, Any] = dict(later.given)
        if later.groups is not None:
            update["groups"] = later.groups
        return self.model_copy(update=update)


NOTHING: Final = ScriptSettings()


def rows(base: Settings, groups: Sequence[Settings], kind: str | None) -> list[Settings]:
    """The settings of each group, and at last of the parameters that are in none of them.

    base: the optimizer's own, filled. kind: of the source that gives the groups.
    """
    assert base.kind is not None
    made = []
    for group in groups:
        own = group.model_copy(update={"kind": kind}).applying(base.kind)
        made.append(base.model_copy(update=own | {"kind": base.kind}))
    return [*made, base]


def uses(kind: str) -> tuple[str, ...]:
    """The fields that an optimizer of this kind uses."""
    return ("kind", "lr", *traits(kind).settings)
