"""The changelog lists what differs between releases, briefly, and agrees with the version."""

from __future__ import annotations

import re
from pathlib import Path

import gadei_ps

ROOT = Path(__file__).parents[2]
HEADINGS = ["**Breaking**", "**Added**", "**Changed**", "**Fixed**"]
MOST_LINES = 150


def test_releases() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (\d+\.\d+\.\d+), (unreleased|\d{4}-\d\d-\d\d)$", text, re.M)
    assert len(releases) == text.count("\n## ")
    version, state = releases[0]
    assert gadei_ps.__version__ == version + (".dev0" if state == "unreleased" else "")
    assert all(state != "unreleased" for _, state in releases[1:])
    assert [*map(_number, releases)] == sorted(map(_number, releases), reverse=True)
    for part in text.split("\n## ")[1:-1]:  # the first release has nothing to differ from
        found = re.findall(r"^\*\*.*\*\*$", part, re.M)
        assert found == [one for one in HEADINGS if one in found], "in this order, and no others"
    assert len(text.splitlines()) <= MOST_LINES


def _number(release: tuple[str, str]) -> list[int]:
    return [int(part) for part in release[0].split(".")]
