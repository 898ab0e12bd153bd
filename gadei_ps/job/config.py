"""The fields of a job file, checked. The defaults suit a user without an opinion."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gadei_ps import homes, sync
from gadei_ps.errors import JobFailed, UsageError, invalid, is_lasting
from gadei_ps.job.number_types import Real, Whole
from gadei_ps.job.optimizer_config import (
    FIELDS,
    MOST_GROUPS,
    NOTHING,
    ScriptSettings,
    Settings,
    rows,
)
from gadei_ps.job.parameter_groups import Group
from gadei_ps.kernels.optimizers import Kind, OptimizerSpec, Schedule
from gadei_ps.machine import addresses, placement, process, user_files
from gadei_ps.memory import layout
from gadei_ps.memory.shm import JOB_NAME, check_job_name

_PLACE = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
MOST_BYTES = 1 << 20  # of a job file
LIBRARIES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}  # for curves
LEAST_HANG_S = 0.5  # a server shows a sign of life ten times a second


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScheduleConfig(_Table):
    """[optimizer.schedule]: how the learning rate moves."""

    kind: Literal["constant", "step", "cosine"] = "constant"
    warmup_steps: Whole = 0
    step_size: Whole = 0
    step_gamma: Real = 0.1
    total_steps: Whole = 0
    min_lr: Real = 0.0


class OptimizerConfig(Settings):
    """[optimizer]: what the server does with a gradient; semantics of torch.optim."""

    staleness_aware: bool = False
    spike_compensation: bool = True
    clip_norm: Real = 0.0
    schedule: ScheduleConfig = ScheduleConfig()
    groups: tuple[Group, ...] = ()

    @field_validator("groups")
    @classmethod
    def _groups(cls, value: tuple[Group, ...]) -> tuple[Group, ...]:
        if len(value) > MOST_GROUPS:
            raise ValueError(f"{len(value)} groups; a job has at most {MOST_GROUPS}")
        return value

    def spec(self, script: ScriptSettings = NOTHING) -> OptimizerSpec:
        """The checked specification of the parameters that are in no group; see specs()."""
        return self.specs(script)[-1]

    def specs(
        self,
        script: ScriptSettings = NOTHING,
        of_groups: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> list[OptimizerSpec]:
        """The checked specifications, with the settings of a script that the job lacks: of each
        group, and at last of the parameters that are in none.

        of_groups: what counts before all that, by the groups' numbers. Raises UsageError naming the
        field.
        """
        own, kind = self.in_groups(script)
        all_rows = rows(self.filled(script), own, kind)
        for number, values in (of_groups or {}).items():
            if number < len(own):
                all_rows[number] = all_rows[number].model_copy(update=dict(values))
        return [
            self._spec(row, f"groups[{number}]: " if number < len(own) else "")
            for number, row in enumerate(all_rows)
        ]

    def in_groups(self, script: ScriptSettings = NOTHING) -> tuple[Sequence[Settings], str | None]:
        """Return the settings of each group, and the kind that they are for.

        The job's groups, as a whole, override the script's.
        """
        if self.groups:
            return self.groups, self.filled(script).kind
        return script.groups or (), script.kind

    def _spec(self, row: Settings, where: str) -> OptimizerSpec:
        fields = {name: value for name in FIELDS if (value := getattr(row, name)) is not None}
        schedule = self.schedule.model_dump(exclude={"kind"})
        try:
            return OptimizerSpec(
                **fields | {"kind": Kind[str(row.kind).upper()]},
                schedule=Schedule[self.schedule.kind.upper()],
                staleness_aware=self.staleness_aware,
                spike_compensation=self.spike_compensation,
                clip_norm=self.clip_norm,
                **schedule,
            )
        except ValueError as error:
            raise UsageError(f"optimizer: {where}{error}") from None


class TensorConfig(_Table):
    """[[tensors]]: a tensor of the model, for jobs whose learners do not bring it."""

    name: str
    shape: list[Annotated[Whole, Field(ge=0)]]
    role: Literal["parameter", "buffer"] = "parameter"


class CheckpointConfig(_Table, allow_inf_nan=False):
    """[checkpoint]: copies on the disk, from which the job resumes if all its processes died."""

    every_s: Real = Field(300.0, ge=0, description="0: not by time")
    every_gradients: Whole = Field(0, ge=0, description="0: not by count")
    keep: Whole = Field(3, ge=1, le=1000, description="how many of them")
    on_stop: bool = Field(True, description="one more when the job is stopped")
    directory: Path | None = Field(None, description="default: the user's state directory")


class StopAfterConfig(_Table):
    """[stop_after]: the job ends once it has done so much, together; 0: no limit."""

    gradients: Whole = Field(default=0, ge=0, description="applied")
    samples: Whole = Field(
        default=0, ge=0, description="of applied gradients, as learners report them"
    )
    epochs: Whole = Field(default=0, ge=0, description="of batches that the server hands out")


class LearnersConfig(_Table):
    """[learners]: processes that the job starts itself, and starts again when they die."""

    command: list[str] = Field(min_length=1)
    count: Whole = Field(1, ge=1, le=layout.MAX_LEARNERS)

    @field_validator("command")
    @classmethod
    def _command(cls, value: list[str]) -> list[str]:
        if not value[0]:
            raise ValueError("the program's name is empty")
        return value


class MetricsConfig(_Table):
    """[metrics]: metrics of the job for Prometheus, while it runs."""

    listen: str = Field("127.0.0.1:9469", description="HOST:PORT")

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        addresses.parse(value)
        return value


class CurvesConfig(_Table):
    """[curves]: programs that show curves of the job, and where its curves are written for them."""

    tensorboard: Path | None = Field(default=None, description="directory; each run has one in it")
    mlflow: str | None = Field(default=None, description="tracking URI, or a directory")
    wandb: Path | None = Field(default=None, description="directory for offline runs")

    def places(self) -> dict[str, str]:
        """Return the place that is given for each program."""
        return {name: str(place) for name, place in self if place is not None}

    def check(self) -> None:
        """Raise UsageError if a library is missing."""
        for name in self.places():
            if importlib.util.find_spec(library := LIBRARIES[name]) is None:
                install = f"pip install 'gadei-ps[{name}]'"
                raise UsageError(f"curves.{name}: {library} is not installed: {install}")


class JobConfig(_Table, allow_inf_nan=False):
    """A job: its name, how gradients are applied, and how much memory it may take."""

    name: str
    optimizer: OptimizerConfig = OptimizerConfig()
    sync: str | dict[str, Any] = "asp"
    shards: Whole = Field(0, ge=0, le=layout.MAX_SHARDS, description="0: by the machine")
    cores: str = Field("", description="of the shards, as '0-3,8', one each; empty: by the machine")
    slots: Whole = Field(2, ge=1, le=64, description="gradients that a learner's ring holds")
    ahead: Whole = Field(4, ge=1, le=layout.AHEAD, description="batches handed out ahead")
    owned: bool = Field(False, description="batches are assigned by a replica")
    nonfinite: Literal["refuse", "allow"] = "refuse"
    spin_us: Real = Field(-1.0, ge=-1.0, le=1e5, description="-1: by the machine")
    standby: bool = Field(True, description="a second server, ready to take over at once")
    hang_s: Real = Field(5.0, description="a server that hangs for so long is killed")
    learner_timeout_s: Real = Field(
        60.0, ge=0, description="a learner that holds up others for so long is killed; 0: never"
    )
    start_with: Whole = Field(
        0,
        ge=0,
        le=layout.MAX_LEARNERS,
        description="learners that start together under bsp; 0: those of [learners] or `run`",
    )
    orphan_s: Real = Field(
        60.0, ge=1, description="how long servers wait for a new watchdog without learners"
    )
    core_dumps: bool = Field(False, description="of servers: a failover waits until it is written")
    when_idle: Literal["wait", "stop"] = "wait"
    history: bool = Field(True, description="loss, speed and changes over time, in a file")
    metrics: MetricsConfig | None = None
    curves: CurvesConfig = CurvesConfig()
    stop_after: StopAfterConfig = StopAfterConfig()
    checkpoint: CheckpointConfig | None = None
    learners: LearnersConfig | None = None
    tensors: list[TensorConfig] = []
    weights: Path | None = None
    buffers: list[str] = Field([], description="tensors of `weights` that no gradient moves")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not JOB_NAME.fullmatch(value):
            raise ValueError("use 1 to 48 letters, digits, '-' and '_'")
        return value

    @field_validator("cores")
    @classmethod
    def _cores(cls, value: str) -> str:
        missing = set(placement.parse(value)) - set(range(os.cpu_count() or 1)) if value else ()
        if missing:
            raise ValueError(f"this machine has no core {min(missing)}")
        return value

    @field_validator("hang_s")
    @classmethod
    def _hang_s(cls, value: float) -> float:
        if value < LEAST_HANG_S:
            raise ValueError(
                f"use {LEAST_HANG_S} s or more: a busy machine must not look like a hung one"
            )
        return value

    @field_validator("sync")
    @classmethod
    def _sync(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        try:
            sync.parse(value)
        except sync.SpecError as error:
            raise ValueError(str(error)) from None
        return value

    def resolved_shards(self, elements: int) -> int:
        """Shard threads: as asked, or a quarter of the cores; at most one for each chunk."""
        wanted = self.shards or max(1, min(8, process.cores() // 4))
        return max(1, min(wanted, -(-elements // layout.CHUNK)))

    def learners_to_come(self, launched: int) -> int:
        """Return the number of learners at the start. launched: by the command that serves."""
        return self.start_with or (self.learners.count if self.learners else launched)

    def checkpoint_directory(self) -> Path:
        """Directory of the job's checkpoints; each job has its own."""
        if self.checkpoint is not None and self.checkpoint.directory is not None:
            return self.checkpoint.directory
        return state_directory() / self.name

    def history_file(self) -> Path:
        """File of the job's history, if it is written: beside its checkpoints."""
        if self.checkpoint is None:
            return state_directory() / f"{self.name}.history.jsonl"
        return self.checkpoint_directory() / "history.jsonl"

    def resolved_spin_us(self) -> float:
        """Time that a wait spins before it sleeps (µs).

        Spinning takes the core from a learner where there are few, and pays where there are many.
        """
        if self.spin_us >= 0:
            return self.spin_us
        return 50.0 if process.cores() >= 8 else 2.0


def state_directory() -> Path:
    """$GADEI_PS_STATE_DIR, else gadei-ps in $XDG_STATE_HOME or ~/.local/state.

    With the runtime directory of the system's unit, its state directory.
    """
    named = os.environ.get("GADEI_PS_STATE_DIR")
    if not named and homes.of_the_system():
        return homes.STATE
    return Path(named) if named else platformdirs.user_state_path("gadei-ps")


def from_mapping(values: Mapping[str, Any], where: str) -> JobConfig:
    """Check values from a file or from flags; `where` stands in the error."""
    try:
        config = JobConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {invalid(error, 'job', JobConfig)}") from None
    try:
        config.optimizer.spec()
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if config.curves.places() and not config.history:
        raise UsageError(f"{where}: curves are made of the history: leave out history = false")
    if config.tensors and config.weights:
        raise UsageError(f"{where}: give tensors or weights, not both")
    check_sync(config, config.learners.count if config.learners else None, where)
    return config


def check_sync(config: JobConfig, learners: int | None, where: str) -> None:
    """Raise UsageError if the synchronization model does not fit this number of learners."""
    try:
        model = sync.parse(config.sync)
        model.check(learners)
        check_room(model)
    except sync.SpecError as error:
        raise UsageError(f"{where}: sync: {error}") from None


def check_room(model: sync.SyncModel) -> None:
    """Raise SpecError where the model's text is longer than shared memory has room for."""
    if len(str(model).encode()) >= layout.SYNC_TEXT:
        raise sync.SpecError(f"{model.name}: its parameters are too long; use a shorter path")


def read(path: Path) -> dict[str, Any]:
    """The values of a TOML file of at most MOST_BYTES.

    Raises UsageError, or JobFailed if it cannot be read for now.
    """
    try:
        raw = user_files.read(path, MOST_BYTES)
    except OSError as error:
        what = error.strerror
        if error.errno == errno.ENOENT:
            job_file = f"give the job file, such as {path}.toml, not the name of a job"
            what = f"{what}; {'check the path' if path.suffix else job_file}"
        raise (UsageError if is_lasting(error) else JobFailed)(f"{path}: {what}") from None
    return _parsed(path, raw)


def load(path: Path) -> JobConfig:
    """Read a job file, of at most MOST_BYTES. Its name defaults to the file's.

    Raises UsageError, or JobFailed if it cannot be read for now.
    """
    values = read(path)
    values.setdefault("name", path.stem)
    try:
        check_job_name(str(values["name"]))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    if isinstance(weights := values.get("weights"), str):
        values["weights"] = _absolute("weights", weights, path.parent, f"{path}: weights")
    try:
        values["sync"] = sync.relative_to(path.parent, values.get("sync", "asp"))
    except sync.SpecError as error:
        raise UsageError(f"{path}: sync: {error}") from None
    for name, fields in (("checkpoint", ("directory",)), ("curves", CurvesConfig.model_fields)):
        table = values.get(name)
        for field in fields:
            if isinstance(table, dict) and isinstance(text := table.get(field), str):
                table[field] = _absolute(field, text, path.parent, f"{path}: {name}.{field}")
    return from_mapping(values, str(path))


def _absolute(field: str, text: str, parent: Path, where: str) -> str:
    """Return the absolute path of what is named relative to `parent`; a URI stays as it is.

    Raises UsageError.
    """
    if not text:
        raise UsageError(f"{where}: the path is empty")
    if field == "mlflow":
        if re.match("databricks(:|$)", text):  # it has other names of experiments
            raise UsageError(f"{where}: Databricks is not supported; give a server or a directory")
        if "://" in text or text.startswith("file:/"):
            return text
        if text.startswith("file:"):
            raise UsageError(f"{where}: {text!r} is relative; give the directory without 'file:'")
    try:
        return str((parent / Path(text).expanduser()).absolute())
    except RuntimeError:  # it begins with ~USER
        raise UsageError(f"{where}: {text!r} names no user of this machine; give a path") from None


def with_overrides(base: JobConfig, overrides: Mapping[str, Any], where: str) -> JobConfig:
    """The configuration with optimizer, lr, sync, shards, owned, stop_after, curves replaced where
    given.

    Raises UsageError.
    """
    values = base.model_dump(exclude_unset=True)
    optimizer = dict(values.get("optimizer", {}))
    for name, value in overrides.items():
        if name in ("optimizer", "lr"):
            optimizer["kind" if name == "optimizer" else name] = value
        elif name not in CurvesConfig.model_fields:
            values[name] = value
    made = from_mapping(values | {"optimizer": optimizer}, where)
    return with_curves(made, overrides, where)


def with_curves(config: JobConfig, given: Mapping[str, Any], where: str) -> JobConfig:
    """Return the configuration with the places of curves that a command line gives.

    given: by the names of CurvesConfig, relative to the current directory. Raises UsageError.
    """
    names = [name for name in CurvesConfig.model_fields if given.get(name) is not None]
    places = {name: _absolute(name, str(given[name]), Path(), f"--{name}") for name in names}
    if not places:
        return config
    values = config.model_dump(exclude_unset=True)
    return from_mapping(values | {"curves": config.curves.places() | places}, where)


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    """The values of a TOML file. Raises UsageError with the file, the line and the column."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8 text; give a TOML file") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply; give a job file") from None
    except ValueError as error:  # not only TOMLDecodeError: a number may have too many digits
        found = _PLACE.fullmatch(str(error))
        if found is None:
            what, at = str(error).partition(";")[0], ""
        else:
            end = text.rstrip().count("\n") + 1
            what, at = found[1], f":{found[2]}:{found[3]}" if found[2] else f":{end}"
        if what == "Cannot overwrite a value" and found is not None:
            what += _overwritten(text.split("\n")[int(found[2] or end) - 1])
        raise UsageError(f"{path}{at}: {what}; correct it (https://toml.io)") from None


def _overwritten(line: str) -> str:
    """`: 'lr' has a value already`, for the line at which a TOML parser stops; or nothing."""
    key = line.strip("[] \t") if line.lstrip().startswith("[") else line.partition("=")[0].strip()
    return f": {key[:60]!r} has a value already" if key and key != line.strip() else ""
