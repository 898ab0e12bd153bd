"""Changes of a running job's optimizer by `gadei-ps set`.

A change overrides the job file, the command line and the scripts: in the job's memory, and in
its checkpoints. It applies until the job file has another value than at the time of the change. The
field of a group of parameters is called groups.N.FIELD.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from gadei_ps.errors import UsageError
from gadei_ps.job.config import JobConfig, ScheduleConfig
from gadei_ps.job.optimizer_config import FIELDS, ScriptSettings, Values, uses
from gadei_ps.kernels.optimizers import OptimizerSpec

OF_SCHEDULE: Final = tuple(name for name in ScheduleConfig.model_fields if name != "kind")
FLAGS: Final = ("staleness_aware", "spike_compensation")
OF_ALL: Final = ("clip_norm", *FLAGS, "schedule", *OF_SCHEDULE)
NAMES: Final = (*(name for name in FIELDS if name != "kind"), *OF_ALL)
OF_GROUPS: Final = tuple(name for name in FIELDS if name != "kind")
OF_GROUP: Final = re.compile(rf"groups\.(0|[1-9][0-9]?)\.({'|'.join(OF_GROUPS)})")
COUNTS: Final = ("warmup_steps", "step_size", "total_steps")
_Kind = tuple[TypeAdapter[Any], str]
_NUMBER: Final[_Kind] = (TypeAdapter(FiniteFloat), "a finite number")
_KINDS: Final[dict[str, _Kind]] = {
    **dict.fromkeys(FLAGS, (TypeAdapter(bool), "true or false")),
    **dict.fromkeys(COUNTS, (TypeAdapter(int), "a whole number")),
    "schedule": (TypeAdapter(Literal["constant", "step", "cosine"]), "constant, step or cosine"),
}
"""Values of the fields that are not finite numbers, and what to give for each."""
WORDS: Final = {"true": True, "1": True, "false": False, "0": False}
PAIRS: Final = {"betas": ("beta1", "beta2")}
_OWN: Final = ", ".join(("lr", "weight_decay", "momentum", "betas", "alpha", "eps", *OF_ALL))
SHOWN: Final = f"{_OWN}; of a group of parameters groups.N.lr and the like"


class Changes(BaseModel):
    """Fields by name, each with its value and with the value in the job file when it was changed.

    schedule: the schedule's kind; its other fields stand beside it. groups.N.FIELD: of group N.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    values: dict[str, Any] = {}
    over: dict[str, Any] = {}

    def with_(self, values: Mapping[str, Any], config: JobConfig) -> Self:
        """These changes and further ones. config: of the job file."""
        over = {name: _given(config, name) for name in values}
        return type(self)(values=self.values | dict(values), over=self.over | over)

    def still(self, config: JobConfig) -> Self:
        """Those that still count. config: of the job file now."""
        names = [name for name in self.values if self.over.get(name) == _given(config, name)]
        return type(self)(
            values={name: self.values[name] for name in names},
            over={name: self.over.get(name) for name in names},
        )

    def applied(self, config: JobConfig) -> JobConfig:
        """The configuration with these changes, except those of groups."""
        own = {name: value for name, value in self.values.items() if name in NAMES}
        if not own:
            return config
        own = {name: value for name, value in own.items() if name not in OF_SCHEDULE}
        schedule = {name: self.values[name] for name in OF_SCHEDULE if name in self.values}
        if "schedule" in own:
            schedule["kind"] = own.pop("schedule")
        own["schedule"] = config.optimizer.schedule.model_copy(update=schedule)
        return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=own)})

    def specs(self, config: JobConfig, script: ScriptSettings) -> list[OptimizerSpec]:
        """Return the settings with these changes: per group of parameters, then for the others.

        Raises UsageError.
        """
        of_groups: dict[int, dict[str, Any]] = {}
        for name, value in self.values.items():
            if found := OF_GROUP.fullmatch(name):
                of_groups.setdefault(int(found[1]), {})[found[2]] = value
        return self.applied(config).optimizer.specs(script, of_groups)


NO_CHANGES: Final = Changes()


def read(raw: object) -> Changes:
    """Parse the changes in a checkpoint or in memory. Raises ValueError for anything else."""
    found = Changes.model_validate(raw)
    for name in found.values.keys() | found.over.keys():
        if name not in NAMES and not OF_GROUP.fullmatch(name):
            raise ValueError(f"there is no field {name!r} to be changed")
    return Changes(values=_checked(found.values), over=found.over)


def checked(values: Mapping[str, Any], kind: str, groups: int) -> Values:
    """Check the requested values for an optimizer of that kind with so many groups.

    Raises UsageError, in one line.
    """
    for given in values:
        name, found = given, OF_GROUP.fullmatch(given)
        if found is not None:
            if int(found[1]) >= groups:
                there = f"has groups 0 to {groups - 1}" if groups else "has no parameter groups"
                raise UsageError(f"{given}: the job {there}; gadei-ps status shows them")
            name = found[2]
        if name == "kind":
            raise UsageError(
                "kind cannot change while a job runs: what its optimizer keeps for each weight "
                "means nothing to another one; start a job of its own with the weights "
                "(gadei-ps export, and weights = FILE in its job file)"
            )
        if name not in NAMES:
            raise UsageError(f"{name} cannot be set in a running job; these can: {SHOWN}")
        if name not in OF_ALL and name not in uses(kind):
            raise UsageError(f"{given}: the job's optimizer is {kind}, which has none")
    try:
        return _checked(values)
    except ValueError as error:
        raise UsageError(str(error)) from None


def parse(given: Sequence[str]) -> Values:
    """Parse FIELD=VALUE from a command line. Raises UsageError, in one line."""
    found: Values = {}
    for item in given:
        name, equals, text = item.partition("=")
        if not equals or name.startswith("-"):
            raise UsageError(f"cannot read {item!r}; write FIELD=VALUE, as lr=0.01")
        of, dot, field = name.rpartition(".")
        names = PAIRS.get(field, (field,))
        texts = text.split(",") if field in PAIRS else [text]
        if len(texts) != len(names):
            raise UsageError(f"{item}: give two numbers, as {name}=0.9,0.999")
        for one, value in zip((of + dot + one for one in names), texts, strict=True):
            if one in found:
                raise UsageError(f"{one} is given twice")
            found[one] = _read(one, value.strip())
    return found


def _read(name: str, text: str) -> str | float:
    if name in ("kind", "schedule") or not (name in NAMES or OF_GROUP.fullmatch(name)):
        return text
    if name in FLAGS:
        if text.lower() not in WORDS:
            raise UsageError(f"{name}={text}: give true or false")
        return WORDS[text.lower()]
    try:
        return int(text) if name in COUNTS else float(text)
    except ValueError:
        what = "a whole number" if name in COUNTS else "a number"
        raise UsageError(f"{name}={text}: give {what}") from None


def _checked(values: Mapping[str, Any]) -> Values:
    """Return values of the right type. OptimizerConfig.spec() checks whether they fit together."""
    found: Values = {}
    for name, value in values.items():
        kind, what = _KINDS.get(name, _NUMBER)
        try:
            found[name] = kind.validate_python(value, strict=True)
        except ValidationError:
            raise ValueError(f"{name}={repr(value)[:40]}: give {what}") from None
    return found


def _given(config: JobConfig, name: str) -> Any:
    """Return the value of a field in the job file; None if it has none."""
    optimizer, schedule = config.optimizer, config.optimizer.schedule
    if found := OF_GROUP.fullmatch(name):
        number = int(found[1])
        groups = optimizer.groups
        return getattr(groups[number], found[2]) if number < len(groups) else None
    if name == "schedule":
        return schedule.kind
    return getattr(schedule if name in OF_SCHEDULE else optimizer, name)
