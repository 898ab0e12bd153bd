"""A job file and the memory made with it: what must stay the same, and what may change.

ADOPTED must stay the same while the memory is used, CHANGEABLE may change while the job runs.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gadei_ps import sync
from gadei_ps.errors import ControlError
from gadei_ps.job import hyperparameters, recorded, sync_change
from gadei_ps.job.changes import NAMES, NO_CHANGES, OF_GROUPS, Changes
from gadei_ps.job.config import JobConfig, from_mapping
from gadei_ps.job.hyperparameters import Packed
from gadei_ps.job.optimizer_config import Values
from gadei_ps.job.parameter_groups import Group
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.memory import layout
from gadei_ps.memory.segment import Segment
from gadei_ps.watchdog.script import Script

ADOPTED = ("optimizer", "slots", "shards", "ahead", "nonfinite", "tensors", "owned")
CHANGEABLE = frozenset(
    {
        *(f"optimizer.{name}" for name in NAMES),
        "checkpoint.every_s",
        "checkpoint.every_gradients",
        "checkpoint.keep",
        "checkpoint.on_stop",
        "learner_timeout_s",
        "hang_s",
        "stop_after.epochs",
        "stop_after.gradients",
        "stop_after.samples",
        "when_idle",
    }
)
_OF_A_GROUP = re.compile(r"optimizer\.groups\[\d+\]\.(?!match$)")
NO_CHECKPOINTS = {"every_s": 0.0, "every_gradients": 0, "keep": None, "on_stop": False}


def digests(config: JobConfig) -> dict[str, int]:
    """Return digests of the fields ADOPTED, which the next watchdog compares with its own."""
    fields = config.model_dump(mode="json", include=set(ADOPTED))
    texts = {name: json.dumps(fields[name], sort_keys=True).encode() for name in ADOPTED}
    return {name: zlib.crc32(text) for name, text in texts.items()}


def enter(
    memory: Segment,
    config: JobConfig,
    script: Script,
    changes: Changes = NO_CHANGES,
    *,
    begins: bool = True,
) -> None:
    """Enter them into the control segment.

    script: settings of the scripts. changes: of `gadei-ps set`. begins: whether no gradient has
    come yet; after that, the servers change them (job/hyperparameters.py). The digests come first:
    the next watchdog enters the rest again, whenever this one dies.
    """
    control = memory.view(layout.CONTROL)
    specs = changes.specs(config, script.settings)
    spec = specs[-1]
    control["config"][: len(ADOPTED)] = list(digests(config).values())
    recorded.write(memory, config, changes)
    (hyperparameters.initialize if begins else hyperparameters.request)(memory, packed(specs))
    control["optimizer"] = spec.kind
    control["staleness_aware"] = spec.staleness_aware
    control["saves"] = config.checkpoint is not None and config.checkpoint.on_stop


def packed(specs: Sequence[OptimizerSpec]) -> Packed:
    """Pack the settings for job/hyperparameters.py."""
    return np.array([spec.pack() for spec in specs])


def fields(specs: Sequence[OptimizerSpec]) -> Values:
    """Return the fields by their names in `gadei-ps set`. specs: result of Changes.specs()."""
    spec = specs[-1]
    of_all = {
        name: spec.schedule.name.lower() if name == "schedule" else getattr(spec, name)
        for name in NAMES
    }
    of_groups = {
        f"groups.{number}.{name}": getattr(one, name)
        for number, one in enumerate(specs[:-1])
        for name in OF_GROUPS
    }
    return of_all | of_groups


def changed(
    memory: Segment, old: JobConfig, mapping: dict[str, Any], script: Script
) -> tuple[JobConfig, Mapping[str, object]]:
    """Return the configuration in a running job's file as it is now, and the fields that differ.

    Fields of the optimizer differ if their effective value does, with the scripts' settings.
    Raises UsageError if the file is wrong, ControlError if another field than CHANGEABLE differs
    or the job would make no checkpoints any more.
    """
    new = from_mapping(mapping, "job file")
    # Curves change at the next start: the running job's may come from its command line.
    new = new.model_copy(update={"curves": old.curves})
    new.optimizer.specs(script.settings)
    before, after = (dict(_flat(one, script)) for one in (old, new))
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if str(sync.parse(new.sync)) == sync_change.text(memory, sync_change.requested(memory)):
        names = [name for name in names if name != "sync"]  # gadei-ps set has been there first
    fixed = sorted(name for name in names if name not in CHANGEABLE and not _OF_A_GROUP.match(name))
    if fixed:
        advice = "gadei-ps set changes it" if fixed == ["sync"] else "restart the job for that"
        raise ControlError(
            f"{', '.join(fixed)} cannot change while job {old.name!r} runs: {advice}; "
            "nothing is changed"
        )
    if old.checkpoint is not None and new.checkpoint is None:
        raise ControlError(
            f"the file has no [checkpoint] any more, and job {old.name!r} would not make its "
            "last one: keep the table, with on_stop = false if that is meant; nothing is changed"
        )
    return new, {name: after.get(name) for name in names}


def with_script(config: JobConfig, script: Script) -> dict[str, Any]:
    """Return the effective configuration as JSON: with the scripts' settings and the defaults."""
    filled = config.model_copy(update={"optimizer": config.optimizer.filled(script.settings)})
    values = filled.model_dump(mode="json")
    values["optimizer"]["groups"] = [
        one.given | ({"match": list(one.match)} if isinstance(one, Group) else {})
        for one in config.optimizer.in_groups(script.settings)[0]
    ]
    return values


def _flat(config: JobConfig, script: Script) -> Iterator[tuple[str, Any]]:
    """Return the effective fields of the job file; those of a table as TABLE.FIELD."""
    values = with_script(config, script)
    for number, group in enumerate(values["optimizer"].pop("groups")):
        yield from ((f"optimizer.groups[{number}].{key}", one) for key, one in group.items())
    values["sync"] = str(sync.parse(config.sync))
    values["checkpoint"] = (values["checkpoint"] or NO_CHECKPOINTS) | {
        "directory": str(config.checkpoint_directory())
    }
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", one) for key, one in value.items())
        else:
            yield name, value
