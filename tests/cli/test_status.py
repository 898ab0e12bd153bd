"""`gadei-ps status`: the text and the picture."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import support
from rich.console import Console
from shell import FOREVER, Cli, learning

from gadei_ps.show import picture, status, tables

SVG = "{http://www.w3.org/2000/svg}"


def drawn(file: Path) -> str:
    """The text of a picture. Checks that the picture is well-formed and loads nothing."""
    root = ElementTree.fromstring(file.read_text())
    assert root.tag == f"{SVG}svg"
    assert "http" not in file.read_text().replace("http://www.w3.org", "").replace(
        "https://www.textualize.io", ""
    )
    return "".join(root.itertext()).replace("\xa0", " ")


def test_a_picture_of_a_running_job(
    cli: Cli, job_name: str, learner: list[str], compiled: None
) -> None:
    cli.serve(job_name)
    attached = cli.start("attach", job_name, "--", *learner, FOREVER)
    support.eventually(learning(job_name, attached, 1))
    file = cli.directory / "status.svg"
    file.write_text("an older one")
    made = cli("status", job_name, "--svg", "status.svg")
    assert (made.code, made.out, made.err) == (0, "wrote status.svg\n", "")
    text = drawn(file)
    for part in (f"gadei-ps status {job_name}", "serving", str(attached.pid), "samples/s", "share"):
        assert part in text
    assert cli("status", "--svg", cli.directory / "all.svg").code == 0
    assert job_name in drawn(cli.directory / "all.svg")
    assert not list(cli.directory.glob(".*")), "nothing half made is left"
    assert "learner" in cli("status", job_name).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--svg gone/status.svg", "--svg gone/status.svg: there is no directory gone; create it"),
        ("--svg status.png", "--svg status.png: give a name that ends in .svg"),
        ("--svg x.svg --json", "give only one of --svg, --json"),
        ("--svg x.svg --watch", "give only one of --watch, --svg"),
        ("--svg taken.svg", "--svg taken.svg: it is a directory; name a file"),
    ],
)
def test_no_picture(cli: Cli, arguments: str, message: str) -> None:
    (cli.directory / "taken.svg").mkdir()
    result = cli("status", *arguments.split())
    assert result.code == 2
    assert message in result.error
    assert [one.name for one in cli.directory.iterdir()] == ["taken.svg"]


def test_equal_tables_are_equal_pictures() -> None:
    table = tables.FittedTable(("job", "learners"), right=("learners",))
    table.add_row("demo", "3")
    assert picture.svg(table, "one") == picture.svg(table, "one")


def test_histogram_of_staleness() -> None:
    """Single bins up to 3, then powers of two, and no line after the last gradient."""
    counts = [0] * 32
    counts[0], counts[5], counts[7], counts[17] = 60, 10, 20, 10
    columns = [
        [str(one) for one in cells] for cells in zip(*status.histogram(counts).rows, strict=True)
    ]
    assert columns[0] == ["0", "1", "2", "3", "4-7", "8-15", "16-31", "32-63"]
    assert columns[1] == ["60", "0", "0", "0", "30", "0", "0", "10"]
    assert columns[2][0] == "60.0%"
    counts[31] = 1
    assert str(status.histogram(counts).rows[-1][0]) == "524,288 and more"


@pytest.mark.parametrize(
    ("part", "shown"),
    [(0.0, ""), (1e-9, "▏"), (0.5, "████"), (0.25 + 1 / 16, "██▌"), (1.0, "█" * 8)],
)
def test_bars(part: float, shown: str) -> None:
    assert status.bar(part, width=8) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (None, ""),
        (0, "0 KiB"),
        (1730, "1.7 KiB"),
        (128 << 20, "128.0 MiB"),
        (3 << 29, "1.5 GiB"),
    ],
)
def test_sizes(count: int | None, shown: str) -> None:
    assert tables.size(count) == shown


def test_a_terminal_takes_no_name_for_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """A learner may have any name; root may look at another user's job."""
    named = tables.facts({"learner": "a\x1b[2Jb\u202ec", "line": "1\n2"})
    tables.show(named)
    tables.show("d\re\tf\n")
    output = capsys.readouterr().out
    assert "a\\x1b[2Jb\\u202ec" in output
    assert output.endswith("d\\re\tf\n\n")
    assert output.replace("\n", "").replace("\t", "").isprintable()


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_breaks_no_word(width: int) -> None:
    """It omits columns instead; only a column that says so is cut, and sentences are wrapped."""
    made = tables.FittedTable(
        ("job", "state", "started", "samples of all", "remark", "command"),
        right=("samples of all",),
        whole=("state", "started"),
        dispensable=("started", "samples of all"),
        cut="command",
    )
    command = "python my_train.py --lr 0.1 --epochs 20"
    made.add_row("demo", "running", "11-26 14:29:08", "123,456", "two words", command)
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    words = set(out.getvalue().split())
    assert {"demo", "running", "two", "words", "job", "state", "remark"} <= words
    assert ({"11-26", "14:29:08"} <= words) == (width >= 60)
    assert ("123,456" in words) == (width >= 60)
    assert (command in out.getvalue()) == (width == 200)
    assert ("…" in out.getvalue()) == (width < 200)
