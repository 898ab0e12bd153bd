"""Optimizer settings of learners' scripts: in the job's memory, and compared with the job's.

They lie in the control segment (`script`), in two places. One word (`script_word`) has the place
that counts and its number of groups. So the next watchdog finds the old settings or the new ones,
at whichever instant this one dies. A place has a row for each group and, as the last one, a row for
the optimizer itself. Each row has FIELDS, and a bit for each that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gadei_ps.errors import UsageError
from gadei_ps.job.changes import NO_CHANGES, Changes
from gadei_ps.job.config import JobConfig
from gadei_ps.job.optimizer_config import FIELDS, NOTHING, ScriptSettings, Settings, Values, uses
from gadei_ps.job.parameter_groups import Group
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec
from gadei_ps.memory import layout
from gadei_ps.memory.layout import Role
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model, Tensor
from gadei_ps.show.counts import counted

# Bits of `script_word`.
PLACE: Final = 1  # the second place counts
OPEN: Final = 2
SAVED: Final = 4
GROUPED: Final = 8  # groups are set, or that there are none; the count is in the bits above
COUNT_AT: Final = 4
SAME_GROUPS: Final = (
    "use the same groups in all scripts, or set them in [[optimizer.groups]] of the job file, "
    "which override the scripts"
)
NO_GROUPS: Final = "set them in [[optimizer.groups]] of the job file, or start a new job"

MASK: Final = len(FIELDS)  # index in a row: a bit for each field that is there
OWN: Final = layout.MAX_GROUPS - 1  # the row of the optimizer itself


@dataclass(frozen=True)
class Script:
    """Settings of the scripts.

    is_open: no learner was admitted yet; the first one may still set others. saved: they are from
    a checkpoint.
    """

    settings: ScriptSettings = NOTHING
    is_open: bool = False
    saved: bool = False

    def source(self, config: JobConfig, name: str) -> str:
        """Return the source of a field's value: job, script, checkpoint or default."""
        if getattr(config.optimizer, name) is not None:
            return "job"
        mine, now = getattr(self.settings, name), config.optimizer.filled(self.settings)
        if mine is None or getattr(now, name) != mine:
            return "default"
        if name == "weight_decay" and mine == 0 and self.settings.kind not in (None, now.kind):
            return "default"  # of another optimizer, where it means nothing
        return "checkpoint" if self.saved else "script"


NOT_SET: Final = Script(is_open=True)


def write(control: Segment, script: Script) -> None:
    """Enter the settings of the script; they count from the last store on."""
    words = control.view(layout.CONTROL)
    place = 1 - (int(words["script_word"]) & PLACE)
    groups = script.settings.groups
    _write_row(words["script"][place, OWN], script.settings)
    for row, group in zip(words["script"][place], groups or (), strict=False):
        _write_row(row, group)
    word = place | OPEN * script.is_open | SAVED * script.saved | GROUPED * (groups is not None)
    words["script_word"] = word | len(groups or ()) << COUNT_AT


def _write_row(row: np.ndarray, settings: Settings) -> None:
    mask = 0
    for number, name in enumerate(FIELDS):
        value = getattr(settings, name)
        if value is not None:
            row[number] = Kind[value.upper()] if name == "kind" else value
            mask |= 1 << number
    row[MASK] = mask


def read(control: Segment) -> Script:
    """Read the settings that were entered last; empty in new memory."""
    words = control.view(layout.CONTROL)
    word = int(words["script_word"])
    rows = words["script"][word & PLACE]
    groups = tuple(Settings.model_validate(_read_row(row)) for row in rows[: word >> COUNT_AT])
    settings = ScriptSettings.model_validate(
        {**_read_row(rows[OWN]), "groups": groups if word & GROUPED else None}
    )
    return Script(settings, bool(word & OPEN), bool(word & SAVED))


def _read_row(row: np.ndarray) -> Values:
    mask = int(row[MASK])
    found: Values = {}
    for number, name in enumerate(FIELDS):
        if mask & 1 << number:
            value = float(row[number])
            found[name] = Kind(int(value)).name.lower() if name == "kind" else value
    return found


# -- a learner's script ---------------------------------------------------------------------------


def in_force(config: JobConfig, script: Script, changes: Changes = NO_CHANGES) -> Values:
    """Return the settings in force that the optimizer uses, by field."""
    return _fields(changes.applied(config).optimizer.spec(script.settings))


def _fields(spec: OptimizerSpec) -> Values:
    kind = spec.kind.name.lower()
    return {name: kind if name == "kind" else getattr(spec, name) for name in uses(kind)}


def settled(
    config: JobConfig, script: Script, wanted: ScriptSettings, changes: Changes = NO_CHANGES
) -> tuple[Script, str]:
    """Merge the scripts' settings with this learner's; return them and a warning for it.

    The warning is empty unless the job overrides a setting of the learner's script.

    wanted: settings of the learner's own script. Raises UsageError if they differ from the job's.
    """
    now = in_force(config, script, changes)
    overridden: Values = {}
    kind: Values = {"kind": wanted.kind} if wanted.kind is not None else {}
    for name, value in (kind | wanted.applying(str(now["kind"]))).items():
        if now[name] == value:
            continue
        updates = name == "kind" and "add" in (now[name], value)  # against gradients
        if name in changes.values or (script.source(config, name) == "job" and not updates):
            overridden[name] = value
        elif not script.is_open or name == "kind":  # whose slots are made
            raise _refusal(config, script, name, now[name], value)
    notice = _notice(config, now, overridden, changes)
    merged = script.settings.with_(wanted)
    if wanted.groups is not None and not config.optimizer.groups:
        _check_groups(changes.applied(config), script, wanted.groups, merged)
    elif wanted.groups:
        groups = (
            f"optimizer: job {config.name!r} has its parameter groups from its job file, which "
            "override the script's"
        )
        notice = f"{notice}; {groups}" if notice else groups
    if script.is_open and not wanted.is_empty:
        changes.specs(config, merged)
        return Script(merged), notice
    return Script(script.settings, saved=script.saved), notice


def _check_groups(
    config: JobConfig, script: Script, wanted: Sequence[Settings], merged: ScriptSettings
) -> None:
    """Raise UsageError where a script's groups are others than the job's.

    merged: settings of the scripts together with this one.
    """
    had = script.settings.groups or ()
    whose = {"script": "its first learner", "checkpoint": "its checkpoint"}
    of = f" from {whose['checkpoint' if script.saved else 'script']}" if had else ""
    if len(had) != len(wanted):
        raise UsageError(
            f"optimizer: job {config.name!r} has {_counted(len(had))}{of}, but this script has "
            f"{_counted(len(wanted))}: {SAME_GROUPS if had else NO_GROUPS}"
        )
    if script.is_open:
        return
    now = config.optimizer.specs(script.settings)
    for number, (has, wants) in enumerate(zip(now, config.optimizer.specs(merged), strict=True)):
        for name, value in _fields(has).items():
            other = _fields(wants).get(name)
            if value != other and number < len(wanted):
                raise UsageError(
                    f"optimizer: job {config.name!r} has {name} {_text(value)} in parameter group "
                    f"{number}{of}, but this script has {_text(other)}: {SAME_GROUPS}"
                )


def check_members(
    config: JobConfig, script: Script, job: Model, offered: Sequence[Tensor], wanted: ScriptSettings
) -> None:
    """Raise UsageError where a script puts a parameter into another group than the job has it in.

    offered: with the groups of the script. How many groups there are is for settled() to compare.
    """
    had = script.settings.groups or ()
    if config.optimizer.groups or len(had) != len(wanted.groups or ()):
        return
    group_of = {one.name: one.group for one in offered if one.role is Role.PARAMETER}
    for tensor in job.tensors:
        other = group_of.get(tensor.name, tensor.group)
        if other != tensor.group:
            raise UsageError(
                f"optimizer: job {config.name!r} has parameter {tensor.name!r} in "
                f"{_place(tensor.group, wanted)}, but this script has it in "
                f"{_place(other, wanted)}: {SAME_GROUPS}"
            )


def _place(group: int, wanted: ScriptSettings) -> str:
    named = group < len(wanted.groups or ())
    return f"parameter group {group}" if named else "no parameter group"


def _counted(groups: int) -> str:
    return counted(groups, "parameter group") if groups else "no parameter groups"


def _refusal(config: JobConfig, script: Script, name: str, has: Any, wanted: Any) -> UsageError:
    source = script.source(config, name)
    where = {
        "job": " from its job file or command line",
        "script": " from its first learner",
        "checkpoint": " from its checkpoint",
        "default": " by default, as its model is not a script's",
    }[source]
    flag = {"kind": " or with --optimizer", "lr": " or with --lr"}.get(name, "")
    advice = (
        f"use the same in all scripts, or set it in [optimizer] of the job file{flag}, which "
        "overrides the scripts"
    )
    if name != "kind":
        advice = f"{advice}; gadei-ps set {config.name} {name}=VALUE changes it for all"
    if name == "kind" and "add" in (has, wanted):
        advice = (
            "add is for scripts that push updates (LocalOptimizer, Waves, VirtualWorker with "
            "optimizer=), the others are for those that push gradients; use the same in all "
            "scripts, and in [optimizer] of the job file or with --optimizer"
        )
    elif name == "kind" and source != "script":
        advice = (
            f"use {has} in the script, or start over (--fresh) with {wanted} in [optimizer] of the "
            f"job file{flag}"
        )
    return UsageError(
        f"optimizer: job {config.name!r} has {name} {_text(has)}{where}, but this script has "
        f"{_text(wanted)}: {advice}"
    )


def _notice(config: JobConfig, now: Values, overridden: Values, changes: Changes) -> str:
    if not overridden:
        return ""
    source = "its job file or command line"
    if changed := overridden.keys() & changes.values.keys():
        source = "gadei-ps set" if changed == overridden.keys() else f"{source} and gadei-ps set"
    counts = ", ".join(f"{name} {_text(now[name])}" for name in overridden)
    scripts = ", ".join(f"{name} {_text(value)}" for name, value in overridden.items())
    return (
        f"optimizer: job {config.name!r} has {counts} from {source}, which overrides the "
        f"script's {scripts}"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


# -- for the status --------------------------------------------------------------------------------


def report(
    config: JobConfig, script: Script, changes: Changes, model: Model | None
) -> Mapping[str, object]:
    """Return the optimizer for the status: settings in force and, under `from`, their sources.

    Under `groups` each group of parameters: its settings, and how many tensors of the model.
    """
    now = in_force(config, script, changes)
    rest = changes.applied(config).optimizer
    sources = {name: script.source(config, name) for name in now}
    sources |= {name: "set" for name in changes.values if name in sources}
    return {
        **now,
        "clip_norm": rest.clip_norm,
        "staleness_aware": rest.staleness_aware,
        "spike_compensation": rest.spike_compensation,
        "schedule": rest.schedule.kind,
        "from": sources,
        "groups": _groups(config, script, changes, model),
    }


def _groups(
    config: JobConfig, script: Script, changes: Changes, model: Model | None
) -> list[Mapping[str, object]]:
    of_groups, _ = config.optimizer.in_groups(script.settings)
    tensors = model.tensors if model is not None else ()
    numbers = [one.group for one in tensors if one.role is Role.PARAMETER]
    return [
        {
            **{name: value for name, value in _fields(spec).items() if name != "kind"},
            "match": list(one.match) if isinstance(one, Group) else None,
            "tensors": numbers.count(number),
        }
        for number, (one, spec) in enumerate(
            zip(of_groups, changes.specs(config, script.settings), strict=False)
        )
    ]
