"""The model that a job begins with: from a checkpoint, from the job file, or from a learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from gadei_ps.errors import (
    MOST_SHOWN,
    CheckpointError,
    CheckpointMistake,
    JobFailed,
    ModelMismatch,
    UsageError,
    invalid,
    is_lasting,
)
from gadei_ps.job import changes, sync_change
from gadei_ps.job import parameter_groups as job_groups
from gadei_ps.job.config import JobConfig
from gadei_ps.job.optimizer_config import MOST_GROUPS, ScriptSettings, Settings
from gadei_ps.kernels import optimizers
from gadei_ps.machine import user_files
from gadei_ps.memory import weights
from gadei_ps.memory.layout import Role
from gadei_ps.memory.segment import Segment
from gadei_ps.memory.weights import Model, Tensor
from gadei_ps.show.counts import counted
from gadei_ps.show.optimizer_line import start
from gadei_ps.storage import checkpoint, export
from gadei_ps.storage.checkpoint import Snapshot
from gadei_ps.storage.files import parse_object
from gadei_ps.watchdog import model_segments, script
from gadei_ps.watchdog.job_memory import JobMemory
from gadei_ps.watchdog.model_segments import InitialModel
from gadei_ps.watchdog.script import Script


def from_checkpoint(config: JobConfig, path: Path | None, log: Any) -> InitialModel | None:
    """The model of the checkpoint at `path`, or of the newest whole one; None if there is none.

    Raises CheckpointError if the checkpoint cannot be used.
    """
    if path is not None:
        snapshot: Snapshot | None = checkpoint.read(path)
    else:
        snapshot, path = _newest(config, log)
    if snapshot is None or path is None:
        return None
    check_fits(config, snapshot, path)
    try:
        saved = _saved(snapshot.config["optimizer"])
        changed = changes.read(snapshot.changes).still(config)
        specs = changed.specs(config, saved)
        if max(one.group for one in snapshot.model.tensors) > len(saved.groups or ()):
            raise UsageError("its tensors are in groups that it does not have")
        if len(snapshot.slots) != (slots := optimizers.slots(specs[-1].kind)):
            raise UsageError(f"it has {len(snapshot.slots)} slots, and the optimizer has {slots}")
    except (ValueError, UsageError) as error:
        why = invalid(error) if isinstance(error, ValidationError) else str(error)[:MOST_SHOWN]
        raise CheckpointMistake(
            f"{path}: the job cannot resume with the checkpoint's optimizer: {why}; change "
            "[optimizer] in the job file, or start over (serve --fresh)"
        ) from None
    # Settings that the job file lacks stay as they were.
    resumed = Script(saved, is_open=True, saved=True)
    if changed.values:
        log.warning("the optimizer is as gadei-ps set has left it", **changed.values)
    values = model_segments.copied(np.concatenate([snapshot.weights, snapshot.frozen]))
    return in_groups(config, InitialModel(snapshot.model, values, snapshot, resumed, changed))


class _SavedGroup(Settings):
    """A group of parameters, as checkpoints have it: with or without patterns."""

    model_config = ConfigDict(extra="ignore")


class _Saved(_SavedGroup):
    """[optimizer] of a checkpoint's configuration. Those of before there were groups have none."""

    groups: Annotated[Sequence[_SavedGroup], Field(max_length=MOST_GROUPS)] = ()


def _saved(has: object) -> ScriptSettings:
    """The settings of a checkpoint. Raises ValidationError."""
    found = _Saved.model_validate(has)
    groups = [one.given for one in found.groups]
    return ScriptSettings.model_validate({**found.given, "groups": groups})


def in_groups(config: JobConfig, first: InitialModel) -> InitialModel:
    """The same model with its parameters in the groups of the job file, if that has any."""
    groups = config.optimizer.groups
    if not groups:
        return first
    placed = weights.place(job_groups.grouped(first.model.tensors, groups))
    return model_segments.placed_anew(first, placed)


def check_fits(config: JobConfig, snapshot: Snapshot, path: Path) -> None:
    """Raise CheckpointMistake if the job cannot resume from the checkpoint at `path`."""
    made_by = snapshot.config.get("optimizer")
    kind = made_by.get("kind") if isinstance(made_by, dict) else None
    wanted = config.optimizer.kind
    if kind is None or wanted not in (None, kind):
        # Slots and step count of one optimizer mean nothing to another.
        raise CheckpointMistake(
            f"{path}: the checkpoint is of optimizer {str(kind)[:40]}, the job of {wanted}: "
            "start over (serve --fresh, or move the checkpoints away), or export the weights "
            "(gadei-ps export) and give them as `weights`"
        )
    if config.tensors:
        try:
            weights.check_same(snapshot.model, _tensors(config))
        except ModelMismatch as error:
            raise CheckpointMistake(
                f"{path}: the checkpoint is of another model: {error}; start over (serve "
                "--fresh, or move the checkpoints away), or give the job file the tensors it had"
            ) from None


def _newest(config: JobConfig, log: Any) -> tuple[Snapshot | None, Path | None]:
    directory = config.checkpoint_directory()
    snapshot, path, problems = checkpoint.newest(directory)
    for problem in problems:
        log.error("a checkpoint cannot be used", problem=str(problem))
    if problems and snapshot is None:
        lasts = all(isinstance(one, CheckpointMistake) for one in problems)
        raise (CheckpointMistake if lasts else CheckpointError)(
            f"{directory}: none of {counted(len(problems), 'checkpoint')} can be used; start over "
            "(serve --fresh, or move them away), or put a whole one there"
        )
    if path is not None:
        log.warning("resuming from a checkpoint", path=str(path))
    return snapshot, path


def configured(config: JobConfig) -> InitialModel | None:
    """The model of the job file; None if the first learner brings it.

    Raises UsageError, or JobFailed if its file cannot be read for now.
    """
    if config.weights is not None:
        return in_groups(config, _of_file(config, config.weights))
    if config.tensors:
        return in_groups(config, InitialModel(weights.place(_tensors(config)), None))
    return None


def _tensors(config: JobConfig) -> list[Tensor]:
    return [Tensor(one.name, tuple(one.shape), Role[one.role.upper()]) for one in config.tensors]


def _of_file(config: JobConfig, path: Path) -> InitialModel:
    # Imported here, for only jobs that name a file need it.
    from safetensors import safe_open
    from safetensors.numpy import load_file

    try:
        with user_files.open_file(path):  # reports why not; the library's errors have no number
            arrays = load_file(path)
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            names = _aliases(_parsed(metadata.get(export.ALIASES)), arrays)
            roles = _roles(_parsed(metadata.get(export.ROLES)))
    except Exception as error:
        passes = isinstance(error, OSError) and error.errno and not is_lasting(error)
        what = error.strerror if isinstance(error, OSError) and error.errno else error
        raise (JobFailed if passes else UsageError)(f"{path}: {what}") from None
    missing = set(config.buffers) - arrays.keys()
    if missing:
        raise UsageError(f"{path} has no tensor {min(missing)!r} (buffers)")
    roles |= dict.fromkeys(config.buffers, Role.BUFFER)
    model = weights.place(
        Tensor(
            name,
            array.shape,
            role,
            aliases=tuple(alias for alias, of in names.items() if of == name),
            dtype=weights.F32 if role is Role.PARAMETER else weights.NAME_OF[array.dtype],
        )
        for name, array in arrays.items()
        if name not in names
        for role in [roles.get(name, _role(array))]
    )
    return InitialModel(model, model_segments.copied(model.flatten(arrays)))


def _role(array: np.ndarray) -> Role:
    """Return the role of a tensor in a file without roles: whole numbers are not trained."""
    return Role.PARAMETER if array.dtype.kind == "f" else Role.BUFFER


def _parsed(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; empty for anything else."""
    try:
        return parse_object((text or "").encode())
    except ValueError:
        return {}


def _roles(found: Mapping[str, Any]) -> dict[str, Role]:
    """Return an export's roles of its tensors; invalid ones are left out."""
    known = {"buffer": Role.BUFFER, "frozen": Role.FROZEN}
    return {name: known[role] for name, role in found.items() if role in (*known,)}


def _aliases(found: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return an export's tensors with two names; entries that are not true are left out."""
    return {
        alias: name
        for alias, name in found.items()
        if isinstance(name, str)
        and name not in found
        and {alias, name} <= arrays.keys()
        and np.array_equal(arrays[alias], arrays[name], equal_nan=True)
    }


def enter(memory: JobMemory, first: InitialModel, made: tuple[Segment, Segment], log: Any) -> None:
    """Give the job this model, and notify the servers."""
    memory.enter_model(first, made)
    memory.words["model_ready"] = 1
    memory.ring_bells()
    log.info("model", tensors=len(first.model.tensors), values=first.model.values)
    if empty := unused_groups(memory.config, first.model):
        log.warning(empty)
    log.info(started(memory))


def unused_groups(config: JobConfig, model: Model) -> str:
    """Describe groups of the job file that have no parameter; empty if all have one."""
    groups = config.optimizer.groups
    empty = [groups[number] for number in job_groups.without(model.tensors, groups)]
    if not empty:
        return ""
    names = " and ".join(repr(" ".join(one.match)) for one in empty)
    return (
        f"[[optimizer.groups]] match {names}: no parameter of the model that is in no group before "
        "it; correct the pattern or leave it out"
    )


def started(memory: JobMemory) -> str:
    """Describe in one line what a job with a model does with gradients."""
    sync = sync_change.text(memory.control, sync_change.in_force(memory.control))
    optimizer = script.report(memory.config, memory.script, memory.changes, memory.model)
    return start({"settings": optimizer, "sync": sync})
