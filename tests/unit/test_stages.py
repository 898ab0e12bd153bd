"""Threads of a virtual worker: of its stages, and of the learner itself."""

from __future__ import annotations

import threading

import pytest
import torch
from support.torch_models import one_thread as one_thread

from gadei_ps.learners import stages
from gadei_ps.learners.stages import Place

CPU = torch.device("cpu")


def test_a_thread_has_the_cores_of_its_place() -> None:
    """Also if another thread sets its own before this one computes for the first time."""
    seen: list[int] = []
    used, other = threading.Event(), threading.Event()

    def run() -> None:
        Place(CPU, 2).use()
        used.set()
        other.wait()
        torch.ones(8).add_(1)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    used.wait()
    torch.set_num_threads(3)
    other.set()
    thread.join()
    assert seen == [2]


def test_what_stages_leave_is_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.process, "cores", lambda: 8)
    gpu = Place(torch.device("cuda:0"), 8)
    torch.set_num_threads(6)
    for where, threads in (([3, 2], 3), ([1, 1], 6), ([4, 4], 1), ([8, 8], 1)):
        places = [Place(CPU, one) for one in where]
        assert stages.left([*places, gpu]) == threads
