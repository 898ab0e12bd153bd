"""Advice of `run` about a synchronization model, as far as it was measured."""

from __future__ import annotations

import pytest

from gadei_ps.show.optimizer_line import advice


@pytest.mark.parametrize(
    ("sync", "kind", "learners", "expected"),
    [
        ("asp", "adamw", 8, True),
        ("asp", "adam", 20, True),
        ("asp", "adam", 7, False),
        ("asp", "momentum", 8, False),
        ("bsp", "adam", 8, False),
        ("ssp:2", "adam", 8, False),
    ],
)
def test_many_learners_with_adam(sync: str, kind: str, learners: int, expected: bool) -> None:
    message = advice({"sync": sync, "settings": {"kind": kind}}, learners)
    assert bool(message) == expected
    if expected:
        assert message.startswith(
            f"with {learners} learners and {kind}, bsp comes further than asp"
        )
        assert "--sync bsp" in message
