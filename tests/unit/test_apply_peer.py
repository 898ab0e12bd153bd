"""The work that `gadei-ps bench apply` compares is the same: else its figures mean nothing."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from gadei_ps.benchmarks import apply
from gadei_ps.benchmarks.apply import Work
from gadei_ps.kernels.optimizers import Kind, WireType

SIZE = 3 * apply.CHUNK + 17


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return apply.build_peer(tmp_path_factory.mktemp("peer"))


@pytest.mark.parametrize("wire", WireType)
@pytest.mark.parametrize("kind", apply.KINDS)
def test_contenders_move_the_weights_alike(
    library: ctypes.CDLL, kind: Kind, wire: WireType
) -> None:
    works = {"gadei-ps": Work(kind, SIZE, lr=0.1), "C": Work(kind, SIZE, lr=0.1)}
    before = works["C"].w.copy()
    apply.ours(works["gadei-ps"], wire, 2)(3)
    apply.in_c(library, works["C"], wire, 2)(3)
    if kind in apply.FUSED:
        works["torch"] = Work(kind, SIZE, lr=0.1)
        apply.in_torch(works["torch"], wire)(3)
    for who, work in works.items():
        assert (work.w != before).all(), who
        # The bias correction of Adam is that of one step here, and of three in torch.
        np.testing.assert_allclose(work.w, works["gadei-ps"].w, rtol=2e-3, atol=2e-3, err_msg=who)
