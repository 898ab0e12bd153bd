"""Plans of stages on the command line: what is shown, what is written, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from shell import Cli

from gadei_ps.commands import partition
from gadei_ps.errors import UsageError
from gadei_ps.learners.virtual.plan import Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_model.py"
MODULE = """
import torch
from torch import nn

print("being imported")

def layers():
    return [nn.Linear(10, 20), nn.ReLU(inplace=True), nn.Linear(20, 3)]

def sample():
    return torch.randn(4, 10), torch.zeros(4, dtype=torch.int64), nn.functional.cross_entropy

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(*layers())

one, number, empty, mixed = nn.Linear(10, 3), 3, [], [nn.Linear(10, 3), 5]
untrained, two, no_loss = [nn.ReLU(), nn.Tanh()], (1, 2), (*sample()[:2], 3)
norm = [nn.Linear(10, 20), nn.BatchNorm1d(20)]

def wide():
    return torch.randn(4, 11), *sample()[1:]

def broken():
    raise RuntimeError("first\\nsecond")

def exits():
    raise SystemExit(4)

def needs(what):
    return layers()

def none(parameters):
    return None
"""
DEVICES = "host:1,host:1"


def test_a_plan(cli: Cli) -> None:
    (cli.directory / "my_model.py").write_bytes(EXAMPLE.read_bytes())
    asked = ("my_model:layers", "--sample", "my_model:sample", "--devices", DEVICES)
    done = cli(
        *("partition", *asked, "--memory", "512MB,2GB", "--repeats", 2),
        *("--out", "plan.json", "--svg", "plan.svg"),
    )
    assert (done.code, done.err) == (0, "wrote plan.json\nwrote plan.svg\n")
    head, first, second, *_ = lines = done.out.splitlines()
    assert head.split()[:3] == ["device", "layers", "parameters"]
    assert max(map(len, (head, first, second))) < 80
    assert first.split()[:2] == ["0", "host:1"] and second.split()[:2] == ["1", "host:1"]
    plan = Plan.load(cli.directory / "plan.json")
    assert plan.layers == [263168, 0, 1049600, 0, 524800, 0, 131328, 0, 514]
    assert plan.in_flight == 4
    assert {one.memory_limit_bytes for one in plan.stages} == {512_000_000, 2_000_000_000}
    assert sum(one.parameters for one in plan.stages) == sum(plan.layers)
    rows = [line for line in lines if line.startswith(("0 host:1 ", "1 host:1 "))]
    assert len(rows) == 2 and all(any(sign in row for row in rows) for sign in "›‹·")
    assert lines[-1] == (
        f'VirtualWorker(layers(), devices=["host:1", "host:1"], cuts={plan.cuts}, '
        "optimizer=lambda p: torch.optim.SGD(p, lr=0.01))"
    )
    picture = ElementTree.parse(cli.directory / "plan.svg")
    labels = "".join(picture.getroot().itertext()).replace("\xa0", " ")
    assert "VirtualWorker(layers()" in labels and "mini-batches/s" in labels


def test_json_and_errors_are_alone_on_their_streams(cli: Cli) -> None:
    """Check it even if the module prints."""
    (cli.directory / "mine.py").write_text(MODULE)
    asked = ("--sample", "mine:sample", "--devices", "host:1,host:1,host:2", "--json")
    done = cli("partition", "mine:Model", *asked, "--sync", "bsp", "--optimizer", "adam")
    assert (done.code, done.err) == (0, "being imported\n")
    assert Plan.model_validate(done.json).in_flight == 1
    assert done.json["pieces"][0]["end_layer"] == 2  # ReLU works in place
    assert done.json["left_out"]  # two pieces, three devices
    refused = cli("partition", "nosuch:layers", *asked)
    assert refused.code == 2
    assert refused.error == (
        "nosuch:layers: there is no module 'nosuch' in this directory or on PYTHONPATH"
    )
    assert refused.json["kind"] == "UsageError"
    for option, file, why in (
        ("--out", "no/plan.json", "there is no directory no; create it first"),
        ("--out", ".", "it is a directory; name a file"),
        ("--svg", "plan.png", "give a name that ends in .svg"),
    ):
        refused = cli("partition", "mine:layers", *asked, option, file)
        assert (refused.code, refused.error) == (2, f"{option} {file}: {why}")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with the module, which is forgotten afterwards."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "torn.py").write_text("x = (\n")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(4)\n")
    (tmp_path / "lacks.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("mine", "torn", "leaves", "lacks"):
        sys.modules.pop(name, None)


WRONG = [
    ({"layers": "mine"}, "mine: write MODULE:NAME, as in my_model:layers"),
    ({"layers": "mine.py:layers"}, "mine.py:layers: write the module's name without .py"),
    ({"layers": "mine:lay"}, "mine:lay: mine has no 'lay'"),
    ({"layers": "torn:x"}, "torn:x: {}/torn.py:1: '(' was never closed"),
    ({"layers": "leaves:x"}, "leaves:x: the import raised SystemExit: 4"),
    ({"layers": "lacks:x"}, "lacks:x: the module 'no_such_module' that it imports is missing"),
    ({"layers": "mine:broken"}, "mine:broken() raised RuntimeError: first"),
    ({"layers": "mine:exits"}, "mine:exits() raised SystemExit: 4"),
    ({"layers": "mine:needs"}, "mine:needs() raised TypeError: needs() missing 1 required"),
    ({"layers": "mine:one"}, "mine:one is one layer, of type Linear: give a list"),
    ({"layers": "mine:number"}, "mine:number is of type int: give a list"),
    ({"layers": "mine:mixed"}, "mine:mixed: entry 1 is of type int: give a list"),
    ({"layers": "mine:empty"}, "mine:empty has no layers: give a list"),
    ({"layers": "mine:untrained"}, "the model has no parameters that require a gradient"),
    ({"layers": "mine:norm"}, "layer '1' (BatchNorm1d) keeps running statistics"),
    ({"sample": "mine:two"}, "--sample mine:two is of type tuple and has 2 entries: give (inputs"),
    ({"sample": "mine:number"}, "--sample mine:number is of type int: give (inputs, targets"),
    ({"sample": "mine:no_loss"}, "--sample mine:no_loss: its loss function is of type int"),
    ({"sample": "mine:wide"}, "layer 0 (Linear), given a tensor of shape (4, 11): mat1 and mat2"),
    ({"devices": "tpu"}, "device 'tpu': give 'host', 'host:CORES', 'cuda' or 'cuda:NUMBER'"),
    ({"devices": "host,"}, "device '': give 'host'"),
    ({"devices": "host,host,host,host"}, "devices: 4 for 3 layers: give at most one"),
    ({"devices": ",".join(["host"] * 9)}, "devices: 9, and a plan is for at most 8: name the best"),
    ({"memory": "1MB"}, "memory: 1 size for 2 devices: give one for each"),
    ({"memory": "-1MB,1MB"}, "size '-1MB': write it like"),
    ({"memory": "1K,1K"}, "no plan fits into the memory: device 0 (host:1) needs at least"),
    ({"spec": "ssp:s_local=3"}, "--sync: ssp: unknown parameter 's_local'; allowed"),
    ({"optimizer": "newton"}, "--optimizer 'newton': give one of sgd, momentum, adagrad"),
    ({"optimizer": "mine:number"}, "--optimizer mine:number is of type int: give a function"),
    (
        {"optimizer": "mine:none"},
        "the optimizer gave a NoneType: let it return an optimizer of torch",
    ),
]


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_makes_no_plan(given: dict[str, str], why: str, module: None) -> None:
    right = {"layers": "mine:layers", "sample": "mine:sample", "devices": DEVICES, "memory": None}
    asked = {**right, "spec": "wsp:D=1,s_local=3", "optimizer": "sgd", "repeats": 1, **given}
    with pytest.raises(UsageError) as refused:
        partition.partition(**asked)  # type: ignore[arg-type]
    result = str(refused.value)
    assert result.startswith(why.format(Path.cwd()))
    assert "\n" not in result


def test_what_a_plan_has_for_programs(module: None) -> None:
    made, call = partition.partition(
        *("mine:layers", "mine:sample", DEVICES, None, "wsp:0", "mine:torch.optim.Adam", 1)
    )
    dumped = json.loads(made.model_dump_json())
    assert dumped["stages"][0].keys() >= {"device", "first_layer", "forward_s", "memory_bytes"}
    assert dumped["pieces"][0]["optimizer_bytes"] == 2 * 220 * 4 + 8  # two moments and the steps
    assert dumped["pieces"][0]["times"].keys() == {"host:1"}
    assert call.endswith("optimizer=torch.optim.Adam)")
    made, call = partition.partition(
        *("mine:layers", "mine:sample", "host:1", None, "wsp:0", "none", 1)
    )
    assert call == 'VirtualWorker(layers(), devices=["host:1"])'
