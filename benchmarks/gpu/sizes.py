"""Sizes and rounds of the parts: the full ones, and quick ones that only try the parts out."""

from __future__ import annotations

from typing import Any

from gadei_ps.benchmarks.sizes import MB

LSTM, CLASSIFIER = "LSTM", "sentence classifier"

FULL: dict[str, dict[str, Any]] = {
    "overhead": {
        "seconds": 35.0,
        "steps": 150,
        "mini_batch": 8,
        "mlp": [2500, 1250, 2500],
        "profiled": 50,
    },
    "bandwidth": {
        "seconds": 25.0,
        "bytes": [25 * MB, 1 * MB, 250 * MB, 100 * MB, 5 * MB, 1000 * MB],
        "rounds": 5,
        "call_s": 0.05,
    },
    "learners": {
        "seconds": 200.0,
        "texts": ["mr", "trec6", "banking77"],
        "learners": [1, 4, 8],
        "peers": [4, 8],
        "cells": [
            *((CLASSIFIER, batch) for batch in (1, 8, 32)),
            *((LSTM, batch) for batch in (1, 8)),
            *((CLASSIFIER, batch) for batch in (4, 16)),
            *((LSTM, batch) for batch in (32, 4)),
            *((CLASSIFIER, batch) for batch in (2, 64, 128)),
            *((LSTM, batch) for batch in (16, 2, 64, 128)),
        ],
        "main": 5,
        "rounds": 3,
        "hidden": 512,
        "profiled": 20,
    },
    "vision": {
        "seconds": 60.0,
        "images": 5_000,
        "models": [
            {"model": "alexnet", "mini_batch": 128},
            {"model": "vgg", "mini_batch": 128},
            {"model": "vgg", "mini_batch": 32},
        ],
        "rounds": 4,
        "window_s": 1.0,
    },
    "timeline": {
        "seconds": 25.0,
        "models": [("vgg", 64), ("mlp", 4096)],
        "steps": 10,
        "mlp": [2500, 1250, 2500],
    },
    "server_on_gpu": {
        "seconds": 40.0,
        "bytes": [25 * MB, 5 * MB, 100 * MB, 1 * MB],
        "learners": [4, 1, 2],
        "rounds": 4,
        "call_s": 0.2,
    },
}
"""Sizes in the order of their importance: a part leaves out the last ones if there is no time.

seconds: time of the whole part, with its imports. cells: a network, and its mini-batch. main: as
many of the first cells matter most.
"""

QUICK: dict[str, dict[str, Any]] = {
    "overhead": {
        "seconds": 90.0,
        "steps": 4,
        "mini_batch": 2,
        "mlp": [20, 10, 20],
        "profiled": 3,
    },
    "bandwidth": {"seconds": 90.0, "bytes": [1 * MB], "rounds": 1, "call_s": 0.002},
    "learners": {
        "seconds": 180.0,
        "texts": [],
        "learners": [1, 2],
        "peers": [1, 2],
        "cells": [(CLASSIFIER, 1), (LSTM, 1), (CLASSIFIER, 4), (LSTM, 4)],
        "main": 2,
        "rounds": 1,
        "hidden": 16,
        "profiled": 3,
    },
    "vision": {
        "seconds": 90.0,
        "images": 64,
        "models": [{"model": "vgg", "mini_batch": 2}],
        "rounds": 1,
        "window_s": 0.05,
    },
    "timeline": {"seconds": 90.0, "models": [("mlp", 4)], "steps": 2, "mlp": [20, 10, 20]},
    "server_on_gpu": {
        "seconds": 90.0,
        "bytes": [1 * MB],
        "learners": [1, 2],
        "rounds": 1,
        "call_s": 0.02,
    },
}


def of(device: str, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Return the sizes of all parts; on the host always the quick ones."""
    return QUICK if quick or device == "host" else FULL
