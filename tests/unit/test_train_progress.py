"""Progress of a training, from its job's status."""

from __future__ import annotations

import pytest

from gadei_ps.classifier.train import handed_out


@pytest.mark.parametrize(
    ("epoch", "next_batch", "epochs"),
    [
        (0, 0, 0.0),
        (0, 3, 0.25),
        (0, 12, 1.0),
        (1, 3, 1.25),  # also while the last batches of epoch 0 are not answered
        (2, 12, 3.0),
    ],
)
def test_handed_out(epoch: int, next_batch: int, epochs: float) -> None:
    for done in range(max(0, epoch - 1), epoch + 1):
        work = {"epoch": epoch, "next": next_batch, "batches": 12, "epochs_done": done}
        assert handed_out(work) == epochs
