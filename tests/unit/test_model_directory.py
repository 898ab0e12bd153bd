"""Directory of the model of `train`: an earlier one is kept, unless it may be replaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gadei_ps.classifier.measuring import Measuring
from gadei_ps.classifier.training_settings import Settings
from gadei_ps.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def claimed(**given: Any) -> str:
    measuring = object.__new__(Measuring)
    settings = Settings(Path("rows.csv"), **given)
    measuring._plan = SimpleNamespace(settings=settings)  # type: ignore[assignment]
    return str(measuring._claimed())


def test_a_new_directory_by_default() -> None:
    Path("model-2").write_text("of the user")
    assert [claimed() for _ in range(3)] == ["model-1", "model-3", "model-4"]


def test_a_directory_that_another_training_has_filled_meanwhile() -> None:
    Path("mine").mkdir()
    assert claimed(out=Path("mine")) == "mine", "it is empty"
    Path("mine/config.json").touch()
    assert claimed(out=Path("mine")) == "mine-2"
    assert claimed(out=Path("mine"), overwrite=True) == "mine"
    assert claimed(out=Path("new/mine")) == "new/mine"


def test_an_earlier_model_is_refused_before_the_training() -> None:
    Path("mine").mkdir()
    Path("mine/config.json").touch()
    with pytest.raises(UsageError, match=r"--out mine: there is a model already; .* --overwrite"):
        Settings(Path("rows.csv"), out=Path("mine")).check()
    Settings(Path("rows.csv"), out=Path("mine"), overwrite=True).check()
    Settings(Path("rows.csv")).check()
