"""Sizes and rounds of the parts: the full ones, and quick ones that only try the parts out."""

from __future__ import annotations

from typing import Any

from gadei_ps.benchmarks.sizes import MB

FULL: dict[str, dict[str, Any]] = {
    "bandwidth": {
        "bytes": [1 * MB, 5 * MB, 25 * MB, 100 * MB, 250 * MB, 1000 * MB],
        "rounds": 7,
        "call_s": 0.05,
    },
    "learners": {
        "texts": ["mr", "banking77"],
        "learners": [1, 2, 4, 8],
        "peers": 4,
        "batches": [1, 2, 4, 8, 16, 32, 64, 128],
        "rounds": 3,
        "hidden": 512,
        "budget_s": {"without MPS": 220.0, "with MPS": 160.0},
    },
    "overhead": {"steps": 300, "mini_batch": 8, "mlp": [2500, 1250, 2500]},
    "vision": {
        "images": 50_000,
        "models": [
            {"model": "vgg", "mini_batch": 32},
            {"model": "vgg", "mini_batch": 128},
            {"model": "alexnet", "mini_batch": 128},
        ],
        "rounds": 5,
        "window_s": 1.5,
    },
    "timeline": {"models": [("mlp", 256), ("vgg", 64)], "steps": 10, "mlp": [2500, 1250, 2500]},
    "server_on_gpu": {
        "bytes": [1 * MB, 5 * MB, 25 * MB, 100 * MB],
        "learners": [1, 2, 4],
        "rounds": 5,
        "call_s": 0.4,
    },
}
QUICK: dict[str, dict[str, Any]] = {
    "bandwidth": {"bytes": [1 * MB], "rounds": 1, "call_s": 0.002},
    "learners": {
        "texts": [],
        "learners": [1, 2],
        "peers": 2,
        "batches": [1, 4],
        "rounds": 1,
        "hidden": 16,
        "budget_s": {"without MPS": 90.0, "with MPS": 90.0},
    },
    "overhead": {"steps": 4, "mini_batch": 2, "mlp": [20, 10, 20]},
    "vision": {
        "images": 64,
        "models": [{"model": "vgg", "mini_batch": 2}],
        "rounds": 1,
        "window_s": 0.05,
    },
    "timeline": {"models": [("mlp", 4)], "steps": 2, "mlp": [20, 10, 20]},
    "server_on_gpu": {"bytes": [1 * MB], "learners": [1, 2], "rounds": 1, "call_s": 0.02},
}
