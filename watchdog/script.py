"""What a learner's script has said about the optimizer: in the job's memory, and against the job's.

It lies in the control segment behind the packed optimizer (`hyper`), in two places. One word says
which place counts and which fields it has. So the next watchdog finds the old settings or the new
ones, at whichever instant this one dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gadei_ps.errors import UsageError
from gadei_ps.job.changes import NO_CHANGES, Changes
from gadei_ps.job.config import JobConfig
from gadei_ps.job.optimizer import FIELDS, NOTHING, Settings, uses
from gadei_ps.kernels import optimizers
from gadei_ps.kernels.optimizers import Kind
from gadei_ps.memory import layout
from gadei_ps.memory.segment import Segment

WORD: Final = optimizers.PACKED  # index in `hyper` of a sum of these bits:
PLACE: Final = 1  # the second place counts
OPEN: Final = 2
SAVED: Final = 4
FIRST_FIELD: Final = 8  # the first of FIELDS is there; the next bits are for the next ones


@dataclass(frozen=True)
class Script:
    """What the scripts have said.

    is_open: no learner was let in yet; the first one may still say otherwise. saved: it is what a
    checkpoint had.
    """

    settings: Settings = NOTHING
    is_open: bool = False
    saved: bool = False

    def source(self, config: JobConfig, name: str) -> str:
        """Who says what counts for a field: job, script, checkpoint or default."""
        if getattr(config.optimizer, name) is not None:
            return "job"
        mine = getattr(self.settings, name)
        if mine is None or getattr(config.optimizer.filled(self.settings), name) != mine:
            return "default"
        return "checkpoint" if self.saved else "script"


UNSAID: Final = Script(is_open=True)


def write(control: Segment, script: Script) -> None:
    """Enters what the script says; it counts from the last store on."""
    hyper = control.view(layout.CONTROL)["hyper"]
    place = 1 - (int(hyper[WORD]) & PLACE)
    word = place | OPEN * script.is_open | SAVED * script.saved
    for number, name in enumerate(FIELDS):
        value = getattr(script.settings, name)
        if value is not None:
            hyper[_at(place) + number] = Kind[value.upper()] if name == "kind" else value
            word |= FIRST_FIELD << number
    hyper[WORD] = word


def read(control: Segment) -> Script:
    """What was entered last; nothing in memory that is new."""
    hyper = control.view(layout.CONTROL)["hyper"]
    word = int(hyper[WORD])
    said: dict[str, Any] = {}
    for number, name in enumerate(FIELDS):
        if word & FIRST_FIELD << number:
            value = float(hyper[_at(word & PLACE) + number])
            said[name] = Kind(int(value)).name.lower() if name == "kind" else value
    return Script(Settings(**said), bool(word & OPEN), bool(word & SAVED))


def _at(place: int) -> int:
    return WORD + 1 + place * len(FIELDS)


# -- a learner's script ---------------------------------------------------------------------------


def in_force(config: JobConfig, script: Script, changes: Changes = NO_CHANGES) -> dict[str, Any]:
    """The settings that count and that the optimizer looks at, by field."""
    spec = changes.applied(config).optimizer.spec(script.settings)
    kind = spec.kind.name.lower()
    return {name: kind if name == "kind" else getattr(spec, name) for name in uses(kind)}


def settled(
    config: JobConfig, script: Script, says: Settings, changes: Changes = NO_CHANGES
) -> tuple[Script, str]:
    """What the scripts have said together with this learner's, and what it is to be warned of.

    The warning is empty unless the job overrides something that the learner's script says.

    says: what the learner's own script says. Raises UsageError where it disagrees with the job.
    """
    now = in_force(config, script, changes)
    overridden: dict[str, Any] = {}
    kind = {"kind": says.kind} if says.kind is not None else {}
    for name, value in (kind | says.applying(now["kind"])).items():
        if now[name] == value:
            continue
        updates = name == "kind" and "add" in (now[name], value)  # against gradients
        if name in changes.values or (script.source(config, name) == "job" and not updates):
            overridden[name] = value
        elif not script.is_open or name == "kind":  # whose slots are made
            raise _refusal(config, script, name, now[name], value)
    told = _notice(config, now, overridden, changes)
    if script.is_open and says.said:
        merged = script.settings.model_copy(update=says.said)
        changes.applied(config).optimizer.spec(merged)
        return Script(merged), told
    return Script(script.settings, saved=script.saved), told


def _refusal(config: JobConfig, script: Script, name: str, has: Any, says: Any) -> UsageError:
    source = script.source(config, name)
    where = {
        "job": " from its job file or command line",
        "script": " from its first learner",
        "checkpoint": " from its checkpoint",
        "default": " by default, as its model is not a script's",
    }[source]
    flag = {"kind": " or with --optimizer", "lr": " or with --lr"}.get(name, "")
    advice = (
        f"say the same in all scripts, or give it in [optimizer] of the job file{flag}, which "
        "counts before the scripts"
    )
    if name == "kind" and "add" in (has, says):
        advice = (
            "add is for scripts that push updates (LocalOptimizer, Waves, VirtualWorker with "
            "optimizer=), the others are for those that push gradients; say the same in all "
            "scripts, and in [optimizer] of the job file or with --optimizer"
        )
    elif name == "kind" and source != "script":
        advice = (
            f"say {has} in the script, or begin anew (--fresh) with {says} in [optimizer] of the "
            f"job file{flag}"
        )
    return UsageError(
        f"optimizer: job {config.name!r} has {name} {_text(has)}{where}, and this script says "
        f"{_text(says)}: {advice}"
    )


def _notice(
    config: JobConfig, now: dict[str, Any], overridden: dict[str, Any], changes: Changes
) -> str:
    if not overridden:
        return ""
    whence = "its job file or command line"
    if changed := overridden.keys() & changes.values.keys():
        whence = "gadei-ps set" if changed == overridden.keys() else f"{whence} and gadei-ps set"
    counts = ", ".join(f"{name} {_text(now[name])}" for name in overridden)
    said = ", ".join(f"{name} {_text(value)}" for name, value in overridden.items())
    return (
        f"optimizer: job {config.name!r} has {counts} from {whence}, which counts before the "
        f"script's {said}"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


# -- for people -----------------------------------------------------------------------------------


def report(config: JobConfig, script: Script, changes: Changes = NO_CHANGES) -> dict[str, Any]:
    """The optimizer for the status: what counts and, under `from`, who says it, by field."""
    now = in_force(config, script, changes)
    rest = changes.applied(config).optimizer
    whence = {name: script.source(config, name) for name in now}
    whence |= {name: "set" for name in changes.values if name in whence}
    return {
        **now,
        "clip_norm": rest.clip_norm,
        "staleness_aware": rest.staleness_aware,
        "schedule": rest.schedule.kind,
        "from": whence,
    }
