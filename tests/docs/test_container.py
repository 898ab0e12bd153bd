"""The recipe of the image and the compose file: what can be checked without an engine."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import yaml

from gadei_ps.cli.app import command_tree
from gadei_ps.job import config

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples" / "container"
RECIPE = re.sub(r"\\\n", " ", (HERE / "Containerfile").read_text())
SERVICES = yaml.safe_load((HERE / "compose.yaml").read_text())["services"]


def test_the_recipe_copies_all_that_is_built() -> None:
    copied = set()
    for line in RECIPE.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            copied |= set(sources)
    assert all((ROOT / one).exists() for one in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    needed = [*project["package-dir"].values(), "native", "setup.py", "pyproject.toml"]
    needed += [path for paths in project["data-files"].values() for path in paths]
    missing = [one for one in needed if not any(Path(one).is_relative_to(made) for made in copied)]
    assert missing == []
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert sorted(sent) == sorted(copied)


def test_learners_share_all_that_they_need_with_the_job() -> None:
    job, learner = SERVICES["job"], SERVICES["learner"]
    assert job["ipc"] == "shareable"
    assert learner["ipc"] == learner["pid"] == "service:job"
    runtime = re.search(r"GADEI_PS_RUNTIME_DIR=(\S+)", RECIPE)
    assert runtime is not None
    for one in (job, learner):
        assert f"runtime:{runtime[1]}" in one["volumes"]
        assert one["image"] == "gadei-ps"
        for place in one["volumes"]:
            source = place.split(":")[0]
            assert not source.startswith("./") or (HERE / source).is_file()
    assert config.load(HERE / "demo.toml").checkpoint is not None


def test_commands_have_their_options() -> None:
    commands = command_tree().commands
    for one in SERVICES.values():
        name, *rest = one["command"]
        known = {option for each in commands[name].params for option in each.opts}
        rest = rest[: rest.index("--")] if "--" in rest else rest
        assert {word for word in rest if word.startswith("--")} <= known
    served = re.findall(r"^#.*gadei-ps (serve \S+)$", RECIPE, re.M)
    assert [shlex.split(one)[1] for one in served] == ["/etc/gadei-ps/demo.toml"]
