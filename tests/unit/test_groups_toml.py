"""GROUPS.toml: what it says, and its mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gadei_ps.commands.run import RunOptions
from gadei_ps.errors import UsageError
from gadei_ps.replicas import config

WHOLE = """
name = "trec"
every = 500
rule = "outer:0.7:0.9"
learners = 2
lr = 0.1
divide = true
[[groups]]
nodes = ["10.0.0.1", "10.0.0.2"]
resources = { GPU = 2 }
"""


def written(directory: Path, text: str) -> Path:
    path = directory / "GROUPS.toml"
    path.write_text(text)
    return path


def test_what_it_says(tmp_path: Path) -> None:
    run = config.load(written(tmp_path, WHOLE))
    assert (run.name, run.machines, run.numbers()) == ("trec", 2, [0, 0])
    assert list(run.groups[0].bundles())[1] == {"CPU": 1, "GPU": 2, "node:10.0.0.2": 0.001}
    assert run.overrides() == {"lr": 0.1, "owned": True}
    dumped = run.model_dump(mode="json", exclude_unset=True)
    assert config.from_mapping(dumped, "run") == run


def test_learners_are_restarted_as_for_run(tmp_path: Path) -> None:
    run = config.load(written(tmp_path, WHOLE))
    assert run.restart == RunOptions.restart
    assert config.load(written(tmp_path, f"restart = 3\n{WHOLE}")).restart == 3


def test_its_name_is_that_of_the_file(tmp_path: Path) -> None:
    run = config.load(written(tmp_path, "every = 1\n[[groups]]\nmachines = 3\n"))
    assert run.name == "GROUPS" and list(run.groups[0].bundles()) == [{"CPU": 1}] * 3


def test_neighbours_are_a_ring_unless_they_are_given() -> None:
    groups = [{"machines": 1}, {"machines": 2, "neighbours": []}, {"nodes": ["a"]}]
    run = config.from_mapping({"name": "a", "every": 1, "groups": groups}, "test")
    assert [run.sources(number) for number in range(3)] == [[1, 2], [], [0, 1]]
    assert run.numbers() == [0, 1, 1, 2]
    run = config.from_mapping({"name": "a", "every": 1, "groups": groups[:1]}, "test")
    assert run.sources(0) == []


GROUP = "\n[[groups]]\nmachines = 2\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("every = 5", "groups: Field required: [[groups]] with machines = 2"),
        (GROUP, "every: Field required: the gradients between two exchanges"),
        ("every = 0" + GROUP, "every: Input should be greater than 0"),
        ("every = true" + GROUP, "every: give a number, not true"),
        ("every = 5\n[[groups]]\nmachines = true", "groups.0.machines: give a number, not true"),
        (
            "every = 5" + GROUP + "neighbours = [false]",
            "groups.0.neighbours.0: give a number, not f",
        ),
        ("every = 5" + GROUP + "resources = {GPU = true}", "groups.0.resources.GPU: give a number"),
        ("every = 5\nsteps = 1" + GROUP, "steps: there is no such field"),
        ("evry = 5" + GROUP, "evry: there is no such field: did you mean 'every'?"),
        ("every = 5\n[groups]\nmachines = 2", "groups: Input should be a valid list: [[groups]]"),
        ("every = 5" + GROUP + "neighbours = [0]", "groups.0.neighbours: 0 is this group itself"),
        ("every = 5" + GROUP + "neighbours = [1]", "groups.0.neighbours: 1 is not a group"),
        ("every = 5\nwire = 'int4'" + GROUP, "wire: Input should be 'float32', 'bfloat16' or"),
        ("every = 5\n[[groups]]\n", "groups.0: give either machines, their number, or nodes"),
        ("every = 5" + GROUP + "nodes = ['a', 'b']", "groups.0: give either machines"),
        (
            "every = 5" + GROUP + "learners = 2",
            "groups.0.learners: there is no such field: write it above [[groups]]",
        ),
        ("every = 5\nmachines = 2", "machines: there is no such field: write it below [[groups]]"),
        (
            "every = 5\n[[groups]]\nnodes = 'a'",
            "groups.0.nodes: Input should be a valid list: a list such as nodes = [",
        ),
        (
            "every = 5" + GROUP + "neighbours = 0",
            "neighbours: Input should be a valid list: a list such as neigh",
        ),
        ("every = 5\n[[groups]]\nmachines = 65", "groups.0.machines: Input should be less than"),
        ("every = 5" + GROUP + "resources = {CPU = 1}", "groups.0: resources: CPU is not to be"),
        ("every = 5\nname = 'a b'" + GROUP, "name: use 1 to 37 letters, digits, '-' and '_'"),
        ("every = 5\nrule = 'best'" + GROUP, "rule: unknown rule 'best'; write one of replace"),
        ("every = 5\nsync = 'best'" + GROUP, "sync: unknown model 'best'"),
        ("every = 5\nlr = -1" + GROUP, "optimizer: lr"),
        ("every = 5\nlr = nan" + GROUP, "lr: Input should be a finite number"),
        ("every = 5\noptimizer = 'best'" + GROUP, "optimizer.kind: Input should be"),
        (
            "every = 5\n[[groups]]\nnodes = ['a', 'a']",
            "groups: nodes: a is given twice; each replica",
        ),
        ("every = 5\n[[groups]]\nnodes = ['']", "groups: nodes: an address is empty"),
        ("every = ", "toml:1: Invalid value; correct it"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as error:
        config.load(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    assert line in message


@pytest.mark.parametrize("name", sorted(config.Run.model_fields.keys() - {"divide", "overlap"}))
def test_true_is_no_number(name: str) -> None:
    groups = [{"machines": 1}]
    with pytest.raises(UsageError, match=f"test: {name}: "):
        config.from_mapping({"name": "a", "every": 1, "groups": groups, name: True}, "test")


def test_a_file_whose_name_is_none(tmp_path: Path) -> None:
    path = tmp_path / "my groups.toml"
    path.write_text("every = 5" + GROUP)
    with pytest.raises(UsageError, match="name: give a name of the run, such as name"):
        config.load(path)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: No such file or directory"):
        config.load(tmp_path / "none.toml")
