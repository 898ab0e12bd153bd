"""Lists and tables of the documents are those of the code."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from support import models

from gadei_ps.cli.app import app
from gadei_ps.job import config, control
from gadei_ps.job.parameter_groups import Group
from gadei_ps.watchdog import settings

ROOT = Path(__file__).parents[2]
SOURCES = ("gadei_ps", "learners", "watchdog", "benchmarks", "native")
# Set and read by gadei-ps itself, between a command and the daemon that it starts.
INTERNAL = {"GADEI_PS_ALONE", "GADEI_PS_LEARNER_FILE"}
# The tables of docs/job-file.md, in order.
TABLES = (
    "job",
    "checkpoint",
    "stop_after",
    "metrics",
    "curves",
    "learners",
    "optimizer",
    "groups",
    "schedule",
)


# What differs from message to message: `'X'`, `N MiB`, `10`, `...`.
VARIES = re.compile(r"\.\.\.|'?\b(?:[A-Z]+|\d+)\b'?")


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def section(page: str, heading: str) -> str:
    """The text below a heading, up to the next one of the same rank or a higher one."""
    text = (ROOT / page).read_text()
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.M)
    assert found, f"{page} has no heading {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def tables(text: str) -> list[list[list[str]]]:
    """Each table as rows of cells, without its header."""
    found = re.findall(r"(?:^\|.*\n)+", text + "\n", re.M)
    return [
        [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
            for line in table.splitlines()[2:]
        ]
        for table in found
    ]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def model_of(field: str) -> type[BaseModel]:
    """The table of a job file behind a field."""
    kinds: dict[str, type[BaseModel]] = {
        "job": config.JobConfig,
        "checkpoint": config.CheckpointConfig,
        "stop_after": config.StopAfterConfig,
        "metrics": config.MetricsConfig,
        "curves": config.CurvesConfig,
        "learners": config.LearnersConfig,
        "optimizer": config.OptimizerConfig,
        "groups": Group,
        "schedule": config.ScheduleConfig,
    }
    return kinds[field]


@pytest.mark.parametrize("place", list(enumerate(TABLES)), ids=TABLES)
def test_every_field_of_a_job_file_has_its_row(place: tuple[int, str]) -> None:
    number, name = place
    model = model_of(name)
    rows = tables(section("docs/job-file.md", "The job file"))[number]
    defaults: dict[str, str] = {}
    for row in rows:
        fields, values = code(row[0]), row[1].split(", ") if "," in row[0] else [row[1]]
        values += [""] * (len(fields) - len(values))
        defaults |= dict(zip(fields, values, strict=True))
    inner = {*TABLES} - {"job"}
    refused = {"kind"} if name == "groups" else set()
    assert defaults.keys() == model.model_fields.keys() - inner - refused
    for field, shown in defaults.items():
        value = default(model, field)
        if isinstance(value, bool | int | float | str):
            text = f'"{value}"' if isinstance(value, str) else f"{value:g}"
            text = str(value).lower() if isinstance(value, bool) else text
            assert shown.strip("`") == text, (name, field)


def default(model: type[BaseModel], field: str) -> Any:
    return model.model_fields[field].default


def requests() -> dict[str, set[str]]:
    """Each message of the control socket with its fields."""
    return {
        one.model_fields["op"].default: one.model_fields.keys() - {"op", "v"}
        for one in control.Request.__subclasses__()
    }


def test_every_message_of_the_control_socket_is_listed() -> None:
    rows = tables(section("docs/control-socket.md", "Control socket"))[0]
    assert {code(row[0])[0] for row in rows} == requests().keys()
    for row in rows:
        assert requests()[code(row[0])[0]] <= set(code(row[1])), row[0]


def test_environment_variables_are_listed() -> None:
    used: set[str] = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".c", ".h"):
                used |= set(re.findall(r"\bGADEI_PS_[A-Z]+(?:_[A-Z]+)*\b", path.read_text()))
    rows = tables(section("docs/environment.md", "Environment variables"))[0]
    listed = {name for row in rows for name in code(row[0])}
    assert {name for name in listed if name.startswith("GADEI_PS_")} == used - INTERNAL


def test_every_command_is_listed() -> None:
    made = re.findall(r"<!-- commands: .*?<!-- end of table -->", read("docs/commands.md"), re.S)
    rows = [row for text in made for table in tables(text) for row in table]
    listed = {code(row[0])[0].split()[0] for row in rows}
    commands = {
        one.name or one.callback.__name__ for one in app.registered_commands if one.callback
    }
    groups = {one.name for one in app.registered_groups}
    assert listed == {name.replace("_", "-") for name in commands} | groups


def test_what_adoption_compares_is_said() -> None:
    text = section("docs/fault-tolerance.md", "The watchdog")
    found = re.search(r"and the\s+same\s+((?:`\w+`(?:,\s+|\s+and\s+)?)+)", text)
    assert found
    assert set(code(found[1])) == set(settings.ADOPTED)
    step = re.search(
        r"^2\. .*?\((.*?)\)", section("docs/protocol-jobs.md", "Adoption"), re.M | re.S
    )
    assert step
    assert set(code(step[1])) == set(settings.ADOPTED)


@cache
def texts() -> str:
    """All text in the sources; parts of a message that are written on several lines, as one."""
    found = []
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            found += [
                node.value
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
    for path in (ROOT / "native").glob("*.c"):
        literals = re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', path.read_text())
        found += [re.sub(r'"\s*"', "", one) for one in literals]
    return "\n".join(found)


def unknown_messages(text: str) -> list[str]:
    """Return messages of the first column that no source has; capitals stand for what differs."""
    wrong = []
    for row in (row for table in tables(text) for row in table):
        for message in code(row[0]):
            parts = VARIES.split(message)
            if not all(part.strip() in texts() for part in parts):
                wrong.append(message)
    return wrong


def test_messages_are_those_of_the_code() -> None:
    assert not unknown_messages((ROOT / "docs" / "troubleshooting.md").read_text())
    table = "| m | n |\n| --- | --- |\n| `no job 'X' is running`, `no job 'X' was running` | |\n"
    assert unknown_messages(table) == ["no job 'X' was running"]


def test_every_extra_is_listed() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    rows = tables(section("docs/install.md", "Install"))[0]
    listed = [name for row in rows for name in code(row[0])]
    assert sorted(listed) == sorted(project["optional-dependencies"])


def packages() -> set[str]:
    inside = {path.parent.name for path in (ROOT / "gadei_ps").glob("*/__init__.py")}
    return inside | {"learners", "watchdog", "systemd", "benchmarks"}


def layers() -> list[set[str]]:
    """LAYERS of the test that holds them, from the lowest to the highest."""
    tree = ast.parse((ROOT / "tests" / "unit" / "test_house.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "LAYERS":
            assert node.value
            return [set(layer) for layer in ast.literal_eval(node.value)]
    raise AssertionError("tests/unit/test_house.py has no LAYERS")


def test_architecture_has_every_package() -> None:
    rows = tables(section("docs/architecture.md", "Packages"))[0]
    assert {code(row[0])[0].strip("/").removeprefix("gadei_ps/") for row in rows} == packages()


@pytest.mark.parametrize("way", ["Data path of a push", "Data path of a pull"])
def test_each_file_is_on_a_way_once(way: str) -> None:
    drawn = re.findall(r"```\n(.*?)```", section("docs/architecture.md", way), re.S)
    files = re.findall(r"^([\w/]+\.\w+) ", "".join(drawn), re.M)
    assert len(files) > 2
    assert len(files) == len(set(files))
    assert not [file for file in files if not (ROOT / file).exists()]


def test_architecture_draws_the_layers_as_they_are_held() -> None:
    drawn = re.search(r"```\n(.*?)```", section("docs/architecture.md", "Layers"), re.S)
    assert drawn
    lines = [set(re.findall(r"\w+", line)) for line in drawn[1].splitlines()]
    held = [{name.strip("_") for name in layer} for layer in layers()]
    assert [{name.strip("_") for name in line} for line in lines[::-1]] == held


def test_runs_of_spin_are_described_as_recorded() -> None:
    described = {
        (run.model, run.defines, run.checks + "; progress" * (run.kind == "live"))
        for run in models.verify().RUNS
    }
    text = (ROOT / "docs/decisions/0011-spin-models.md").read_text()
    rows = [row for table in tables(text) for row in table if len(row) in {4, 7}]
    recorded = {(row[0].strip("`"), row[1].strip("`"), row[2]) for row in rows}
    assert len(recorded) > 100
    assert not recorded - described


def test_a_table_is_read_as_it_is_shown() -> None:
    text = "x\n\n| a | b |\n| --- | --- |\n| `c \\| d` | 1 |\n| e | |\n\nThen.\n"
    assert tables(text) == [[["`c \\| d`", "1"], ["e", ""]]]
