"""Tables and pictures that are made are up to date, and the job file has every field."""

from __future__ import annotations

import inspect
import re
import runpy
import tomllib
from pathlib import Path

from pydantic import BaseModel

from gadei_ps import errors
from gadei_ps.cli.exits import EXIT_CODES
from gadei_ps.job import config
from gadei_ps.job.parameter_groups import Group

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
SCREENSHOTS = runpy.run_path(str(ROOT / "docs" / "screenshots.py"))
PICTURES = SCREENSHOTS["NAMES"]
REMEDY = "run: python docs/tables.py"
EXAMPLE = (ROOT / "examples" / "job.toml").read_text()


def test_tables_are_those_of_the_code() -> None:
    pages = TABLES["pages"]()
    assert [path.name for path, text in pages.items() if path.read_text() != text] == [], REMEDY
    marks = {
        one for path in pages for one in re.findall(r"<!-- ([\w: ]+): table", path.read_text())
    }
    assert marks >= TABLES["TABLES"].keys()


def test_pictures_show_the_dashboard_of_today() -> None:
    """Each names the digest of all that a browser received when it was taken."""
    with SCREENSHOTS["dashboard"]() as url:
        served = SCREENSHOTS["served"](url)
    shown = {name: SCREENSHOTS["shown"](ROOT / "docs/pictures" / name) for name in PICTURES}
    assert shown == dict.fromkeys(PICTURES, served), "run: python docs/screenshots.py"


def test_every_exit_code_has_its_meaning() -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass)]
    codes = {one.exit_code for one in classes if issubclass(one, errors.GadeiError)}
    assert {str(code) for code in codes} <= {one.code for one in EXIT_CODES}


def fields(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def absent(text: str) -> set[str]:
    """Return the fields of a job file that a text sets nowhere, not even in a comment."""
    models = (
        *(config.JobConfig, config.CheckpointConfig, config.StopAfterConfig, config.LearnersConfig),
        *(config.MetricsConfig, config.CurvesConfig, config.TensorConfig),
        *(config.OptimizerConfig, config.ScheduleConfig, Group),
    )
    wanted = set().union(*map(fields, models))
    there = set(re.findall(r"^(?:# )?\[{0,2}(?:optimizer\.)?(\w+)(?:\]| *=)", text, re.M))
    return wanted - there


def test_the_example_has_every_field() -> None:
    assert not absent(EXAMPLE)
    assert "owned" in absent(EXAMPLE.replace("owned", "own"))
    config.JobConfig.model_validate(tomllib.loads(EXAMPLE))
