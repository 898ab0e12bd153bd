"""The fields of GROUPS.toml, checked: which replicas train together, and how they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gadei_ps.errors import UsageError, first_of, invalid
from gadei_ps.groups import reading
from gadei_ps.groups.compress import Wire
from gadei_ps.groups.coordinator import MOST_MEMBERS
from gadei_ps.job import config as jobs
from gadei_ps.job.number_types import Real, Whole
from gadei_ps.memory.layout import MAX_LEARNERS
from gadei_ps.memory.shm import JOB_NAME
from gadei_ps.sync.parameters import SpecError

MOST_GROUPS = 64
MOST_MACHINES = MOST_MEMBERS
"""Greatest number of replicas in a group."""
LONGEST_NAME = 37
"""Greatest length of a run's name: with a dash and a number, it names a job."""
OURS = ("CPU",)
"""Resources that the run itself asks for."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Group(_Table):
    """[[groups]]: replicas that aggregate together.

    machines: how many. nodes: instead of it, addresses of hosts as Ray knows them. resources: what
    Ray has to reserve for each replica, beside one CPU. neighbours: numbers of the groups whose
    models it takes, counted from 0; None: the groups before and after it, in a ring.
    """

    machines: Whole | None = Field(None, ge=1, le=MOST_MACHINES)
    nodes: list[str] | None = Field(None, min_length=1, max_length=MOST_MACHINES)
    resources: dict[str, Annotated[Real, Field(gt=0)]] = {}
    neighbours: list[Annotated[Whole, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Group:
        if (self.machines is None) == (self.nodes is None):
            raise ValueError("give either machines, their number, or nodes, their addresses")
        for name in self.resources:
            if name in OURS or name.startswith("node:"):
                raise ValueError(f"resources: {name} is not to be given; nodes names addresses")
        return self

    @property
    def size(self) -> int:
        """Its number of replicas."""
        return self.machines or len(self.nodes or ())

    def bundles(self) -> Iterator[dict[str, float]]:
        """Yield the resources that Ray reserves for each replica."""
        for node in self.nodes or [""] * self.size:
            yield {"CPU": 1, **self.resources} | ({f"node:{node}": 0.001} if node else {})


class Run(_Table):
    """A run of groups.

    name: of the run; its jobs are NAME-0, NAME-1 and so on. every: gradients that a replica applies
    between two exchanges. rule: of exchange. overlap: whether learners train on while their group
    exchanges. wire: format of the models that are given to other groups. divide: whether replicas
    divide the batches that jobs hand out, instead of each handing out all. learners, restart,
    optimizer, lr, sync: of each replica's job, as `gadei-ps run` has them. silence_s: time after
    which a silent replica is removed from its group, and time limit of each piece of an exchange.
    """

    name: str
    every: Whole = Field(gt=0, le=10**9)
    rule: str = "outer:0.7:0.9"
    divide: bool = False
    overlap: bool = True
    wire: Wire = Wire.FLOAT32
    learners: Whole = Field(1, ge=1, le=MAX_LEARNERS)
    restart: Whole | None = Field(None, ge=0)
    optimizer: str | None = None
    lr: Real | None = None
    sync: str | None = None
    silence_s: Real = Field(3.0, gt=0, le=3600)
    groups: list[Group] = Field(min_length=1, max_length=MOST_GROUPS)

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not _is_name(value):
            raise ValueError(f"use 1 to {LONGEST_NAME} letters, digits, '-' and '_'")
        return value

    @field_validator("rule")
    @classmethod
    def _rule(cls, value: str) -> str:
        try:
            reading.parse(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return value

    @model_validator(mode="after")
    def _neighbours(self) -> Run:
        for number, group in enumerate(self.groups):
            for other in group.neighbours or ():
                if other == number or other >= len(self.groups):
                    what = "is this group itself" if other == number else "is not a group"
                    raise ValueError(f"groups.{number}.neighbours: {other} {what}")
        return self

    @model_validator(mode="after")
    def _places(self) -> Run:
        nodes = [node for group in self.groups for node in group.nodes or ()]
        for node in nodes:
            if not node or nodes.count(node) > 1:
                what = f"{node} is given twice" if node else "an address is empty"
                raise ValueError(f"groups: nodes: {what}; each replica has a node of its own")
        return self

    def sources(self, number: int) -> list[int]:
        """Return the groups whose models this one takes."""
        given = self.groups[number].neighbours
        if given is not None:
            return sorted(set(given))
        ring = {(number + step) % len(self.groups) for step in (1, -1)}
        return sorted(ring - {number})

    @property
    def machines(self) -> int:
        """Number of replicas in all groups."""
        return sum(group.size for group in self.groups)

    def numbers(self) -> list[int]:
        """Return the group of each replica, by its number."""
        return [place for place, group in enumerate(self.groups) for _ in range(group.size)]

    def overrides(self) -> dict[str, Any]:
        """Return the settings of its jobs that the run overrides."""
        owned = True if self.divide else None
        given = {"optimizer": self.optimizer, "lr": self.lr, "sync": self.sync, "owned": owned}
        return {name: value for name, value in given.items() if value is not None}


def job_name(run: str, number: int) -> str:
    """Return the name of a replica's job."""
    return f"{run}-{number}"


def from_mapping(values: Mapping[str, Any], where: str) -> Run:
    """Check values from a file, which `where` names. Raises UsageError in one line."""
    try:
        run = Run.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {invalid(error, model=Run)}{_advice(error)}") from None
    job = jobs.from_mapping({"name": job_name(run.name, 0)}, where)
    jobs.check_sync(jobs.with_overrides(job, run.overrides(), where), run.learners, where)
    return run


def _advice(error: ValidationError) -> str:
    """Return what to write instead, after a colon, if it is known."""
    first = first_of(error)
    *tables, name = map(str, first["loc"] or [""])  # a validator of the whole has no place
    if first["type"] in ("missing", "list_type"):
        return f": {_WANTED.get(name, 'give it')}"
    if first["type"] == "extra_forbidden" and name in (Run if tables else Group).model_fields:
        return f": write it {'above' if tables else 'below'} [[groups]]"
    return ""


_WANTED = {
    "name": 'a name of the run, such as name = "trec"',
    "every": "the gradients between two exchanges, such as every = 500",
    "groups": "[[groups]] with machines = 2",
    "nodes": 'a list such as nodes = ["10.0.0.1"]',
    "neighbours": "a list such as neighbours = [1]",
}


def load(path: Path) -> Run:
    """Read GROUPS.toml. The name of the run defaults to the file's.

    Raises UsageError, or JobFailed if the file cannot be read for now.
    """
    values = jobs.read(path)
    if "name" not in values and not _is_name(path.stem):
        raise UsageError(
            f"{path}: name: give {_WANTED['name']}; the file's, {path.stem!r}, is not valid"
        )
    values.setdefault("name", path.stem)
    return from_mapping(values, str(path))


def _is_name(text: str) -> bool:
    return JOB_NAME.fullmatch(text) is not None and len(text) <= LONGEST_NAME


def check_name(name: str) -> str:
    """Return the name of a run if it is valid. Raises UsageError."""
    if not _is_name(name):
        raise UsageError(f"{name!r} names no run: use 1 to {LONGEST_NAME} letters, digits, - and _")
    return name
