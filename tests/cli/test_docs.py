"""gadei-ps docs: pages by name and by words."""

from __future__ import annotations

from pathlib import Path

import pytest
from shell import Cli

from gadei_ps.commands import pages
from gadei_ps.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_all_pages_are_listed(cli: Cli) -> None:
    listed = cli("docs", "--json").json["pages"]
    assert {"page": "exit-codes", "title": "Exit codes"} in listed
    assert {"page": "scripts/data", "title": "Data and DataLoader"} in listed
    for name in ("glossary", "README", "CONTRIBUTING", "CHANGELOG", "reference/client"):
        assert name in cli("docs").out


def test_a_page_is_shown(cli: Cli) -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    assert cli("docs", "memory").out == text
    assert cli("docs", "memory", "--json").json["text"] == text
    for name in ("README", "CONTRIBUTING", "CHANGELOG"):
        assert cli("docs", name).out == (ROOT / f"{name}.md").read_text()
    assert [one.name for one in pages.search(pages.every(), ["readme"])] == ["README"]


def test_pages_of_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The files of the root lie beside the others, and with the comments that the site replaces."""
    for name in ("glossary", "README"):
        (tmp_path / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "readme.md").write_text("<!-- The site shows README.md here -->\n")
    monkeypatch.setattr(pages, "PLACES", (tmp_path,))
    assert [one.name for one in pages.every()] == ["README", "glossary"]


def test_the_api_is_shown(cli: Cli) -> None:
    """Check that pages name their modules, and that a name of the API is shown."""
    text = cli("docs", "reference/waves").out
    assert text.startswith("# Waves and virtual workers\n")
    assert "`gadei-ps docs gadei_ps.learners.waves` shows this module.\n" in text
    assert "automodule" not in text and ":inherited" not in text
    shown = cli("docs", "gadei_ps.learners.client.Client.push").out
    assert "push(self, gradient" in shown and "gadei_ps.learners.client" in shown
    assert cli("docs", "gadei_ps.no_such_module").code == 2


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("network partition", "faq"),
        ("exit code 4", "exit-codes"),
        ("status --json", "status"),
        ("memory much", "memory"),
        ("reboot resume", "starting"),
        ("many learners", "tuning"),
        ("learning rate change", "set"),
        ("GPU", "gpu"),
        ("hyperparameter", "set"),
        ("quorum", "faq"),
        ("out of memory", "memory"),
        ("macOS", "faq"),
        ("Docker", "containers"),
        ("Kubernetes", "containers"),
        ("split brain", "faq"),
        ("torch.compile", "scripts/optimizer"),
        ("learner hangs", "learner-failures"),
        ("DataLoader workers", "scripts/data"),
        ("Adam state", "scripts/optimizer"),
        ("change number of learners", "faq"),
        ("Docker 64 MB", "containers"),
        ("stop everything", "faq"),
        ("wandb", "watching"),
        ("evicted", "learner-failures"),
        ("disk full", "checkpoints"),
        ("restore checkpoint", "checkpoints"),
        ("dashboard port", "watching"),
        ("several jobs", "faq"),
        ("uninstall", "install"),
        ("logs", "starting"),
        ("upgrade", "upgrading"),
    ],
)
def test_words_of_users_are_found(words: str, page: str) -> None:
    """The page is on the first screen of the list, whatever the number of pages with the words."""
    assert page in [one.name for one in pages.search(pages.every(), words.split())[:5]]


def test_order_of_pages() -> None:
    texts = {
        "often": "# One\n\nGray, gray; cat, cat.\nNo more.",
        "line": "# Two\n\nA gray cat sits on a long sentence.\nNo more.",
        "heading": "# Three\n\n## The gray cat\n\nNo more.",
        "title": "# Gray things\n\nA dog.\nA cat.",
        "none": "# Five\n\nGray.",
    }
    every = [pages.Page(name, text) for name, text in texts.items()]
    names = [one.name for one in pages.search(every, ["gray", "cat"])]
    assert names == ["heading", "often", "line", "title"]
    assert next(iter(pages.search(every, ["gray"]))).name == "title"
    assert [one.name for one in pages.search(every, ["often"])] == ["often"]


def test_what_no_page_has_is_an_error(cli: Cli) -> None:
    done = cli("docs", "nosuchword")
    assert done.code == 2
    assert done.err == "gadei-ps: no page has 'nosuchword'; gadei-ps docs lists the pages\n"


def test_a_missing_documentation_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "PLACES", (tmp_path,))
    with pytest.raises(UsageError, match=r"no documentation in .*; reinstall gadei-ps"):
        pages.every()
