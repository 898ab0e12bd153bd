"""A job's optimizer in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gadei_ps.kernels.optimizers import NAMES, traits, usual
from gadei_ps.show.counts import counted

SOURCES = {
    "set": "from gadei-ps set",
    "job": "from the job",
    "script": "from the script",
    "checkpoint": "from the checkpoint",
    "default": "by default",
}
WORDS = {"weight_decay": "weight decay"}
MANY = 8  # learners, from which on Adam comes further under BSP (benchmark asynchrony)


def optimizer(settings: Mapping[str, Any]) -> str:
    """Return `adamw, lr 0.001, weight decay 0.01 (from the script)`. settings: of a status."""
    kind, sources = settings["kind"], settings.get("from", {})
    defaults = {"clip_norm": 0.0} | (
        usual(kind) if kind in NAMES else {}
    )  # else of a later release
    if defaults.get("momentum"):
        del defaults["momentum"]  # shown in any case
    always = {name for name, source in sources.items() if source == "script"} & {"weight_decay"}
    if kind in NAMES and traits(kind).settings.get("weight_decay"):
        always.add("weight_decay")
    names = ("momentum", "beta1", "beta2", "alpha", "weight_decay", "clip_norm")
    shown = ["lr"]
    shown += [
        name
        for name in names
        if name in settings and (name in always or settings[name] != defaults.get(name))
    ]
    parts = [kind, *(f"{WORDS.get(name, name)} {settings[name]:g}" for name in shown)]
    if settings.get("schedule", "constant") != "constant":
        parts.append(f"{settings['schedule']} schedule")
    if settings.get("staleness_aware"):
        parts.append("staleness-aware")
    if settings.get("spike_compensation") is False and settings.keys() & {"momentum", "beta1"}:
        parts.append("no spike compensation")
    text = ", ".join(parts)
    text = f"{text} ({_whence(sources, shown)})" if sources else text
    return "; ".join([text, *_groups(settings)])


def _groups(settings: Mapping[str, Any]) -> list[str]:
    """`group 0 (*.bias, 4 tensors): weight decay 0`, for each: what differs from the rest."""
    found = []
    for number, group in enumerate(settings.get("groups", ())):
        tensors = counted(group["tensors"], "tensor")
        names = f"{' '.join(group['match'])}, {tensors}" if group["match"] else tensors
        own = [
            f"{WORDS.get(name, name)} {value:g}"
            for name, value in group.items()
            if name not in ("match", "tensors") and value != settings.get(name)
        ]
        found.append(f"group {number} ({names}): {', '.join(own) or 'as the rest'}")
    return found


def _whence(sources: Mapping[str, str], shown: list[str]) -> str:
    """Name the source of the kind, and of the settings that come from another source."""
    first = sources["kind"]
    parts = [SOURCES[first]]
    for source, words in SOURCES.items():
        names = [WORDS.get(one, one) for one in shown if sources.get(one, first) == source]
        if source != first and names:
            parts.append(f"{', '.join(names)} {words}")
    return "; ".join(parts)


def start(status: Mapping[str, Any]) -> str:
    """Return the line that a job prints at its start, when its model exists."""
    return f"optimizer {optimizer(status['settings'])}; sync {status['sync']}"


def advice(status: Mapping[str, Any], learners: int) -> str:
    """Describe measurements against the job's synchronization model; empty if there are none."""
    kind = status["settings"]["kind"]
    if status["sync"] != "asp" or kind not in ("adam", "adamw") or learners < MANY:
        return ""
    return (
        f"with {learners} learners and {kind}, bsp comes further than asp on the same samples: "
        "--sync bsp (figures: gadei-ps docs momentum-and-staleness)"
    )


def changed(result: Mapping[str, Any]) -> str:
    """Describe the result of `gadei-ps set`: `lr 0.1 -> 0.05, from version 1,200 on`."""
    parts = [f"{name} {text(was)} -> {text(now)}" for name, (was, now) in result["changed"].items()]
    return f"{', '.join(parts)}, from version {result['version']:,} on" if parts else "already so"


def text(value: Any) -> str:
    """A value of a field, in words."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
