"""Sizes and rounds of all benchmarks: full ones, and quick ones for a trial."""

from __future__ import annotations

from typing import Any

MB = 1_000_000

FULL: dict[str, dict[str, Any]] = {
    "apply": {"bytes": [2 * MB, 25 * MB, 100 * MB, 250 * MB], "rounds": 15, "call_s": 0.03},
    "undo": {"bytes": [2 * MB, 25 * MB, 100 * MB], "rounds": 20, "call_s": 0.005},
    "groups": {"bytes": [MB // 4, 2 * MB, 25 * MB, 100 * MB], "rounds": 20, "call_s": 0.005},
    "start": {"rounds": 8, "empty": 4},
    "attach": {
        "bytes": [100 * MB, 1000 * MB, 1600 * MB],
        "optimizers": ["sgd", "adam"],
        "rounds": 4,
    },
    "ingest": {
        "bytes": [1 * MB, 5 * MB, 25 * MB, 100 * MB],
        "learners": [1, 2, 4],
        "rounds": 4,
        "call_s": 0.25,
        "ray_bytes": 25 * MB,
    },
    "aggregate": {
        "bytes": [1 * MB, 25 * MB, 100 * MB],
        "members": [2, 4, 8],
        "peers": ["gloo all-reduce", "hivemind", "Ray's object store", "Ray, one store for all"],
        "rounds": 7,
        "bytes_per_call": 400 * MB,
    },
    "latency": {"rounds": 10, "spinning": 2000, "asleep": 200},
    "scale": {
        "bytes": [1 * MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB, 1000 * MB],
        "learners": [1, 2, 4, 8, 16, 32],
        "shards": [1, 2, 4, 8],
        "rounds": 7,
        "call_s": 0.3,
    },
    "kills": {
        "rows": 64_000,
        "mini_batch": 16,
        "seconds": 60.0,
        "trial_s": 6.0,
        "every_s": 4.0,
        "seed": 1,
    },
    "learners": {"learners": [2, 16, 64, 200], "silent": [62, 254], "rounds": 10, "call_s": 0.5},
    "nlc": {
        "sets": ["mr", "banking77"],
        "learners": [1, 2],
        "batches": [1, 2, 4, 8, 32, 128],
        "window_s": 1.0,
        "rounds": 3,
    },
    "table8": {
        "sets": ["mr", "banking77", "trec6"],
        "batches": [1, 2, 4, 8, 16, 32, 64, 128],
        "window_s": 1.5,
        "rounds": 3,
    },
    "table7": {
        "sets": ["mr", "banking77", "trec6"],
        "learners": [1, 2],
        "window_s": 1.5,
        "rounds": 3,
        "copy_bytes": 256 * MB,
    },
    "time_to_accuracy": {
        "accuracy": {"mr": 0.74, "trec6": 0.82, "banking77": 0.8},
        "interval_s": 1.0,
        "cap_s": 45.0,
    },
    "memory": {
        "contenders": [
            ("gadei-ps", 1),
            ("gadei-ps", 2),
            ("Hogwild", 2),
            ("Hogwild sparse", 2),
            ("DDP gloo", 2),
        ],
        "run_s": 2.0,
        "megabytes": 25,
        "gradients": 2000,
    },
    "failover": {"bytes": [22 * MB, 100 * MB], "kills": 60, "both": 50, "peer_kills": 20},
    "idle_agent": {
        "values": [1000, 10_000, 250_000],
        "learners": 2,
        "rounds": 30,
        "call_s": 0.4,
    },
    "worker_groups": {
        "tasks": {
            "trec6": {"wait_s": 0.06, "every": 10, "seeds": [0, 1]},
            "mnist": {"wait_s": 0.04, "every": 20, "seeds": [0, 1]},
        },
        "groups": [2, 2],
        "learners": 2,
        "rule": "mix:0.5",
        "share": 1.0,
    },
    "watching": {"rounds": 15, "call_s": 4.0},
    "group_deaths": {
        "machines": 3,
        "every": 30,
        "kills": {
            "whole": (
                {"machine": 30, "agent": 20, "learner": 20, "coordinator": 14, "head of Ray": 7},
                1200.0,
            ),
            "divided": (
                {"machine": 14, "agent": 8, "learner": 8, "coordinator": 6, "head of Ray": 3},
                600.0,
            ),
            "22 MB": ({"machine": 20}, 400.0),
        },
        "bytes": {"22 MB": 22 * MB},
        "seed": 0,
    },
    "asynchrony": {
        "tasks": ["gpt", "resnet", "text"],
        "steps": {"gpt": 800, "resnet": 800, "text": 1600},
        "rates": [1.0],
        "learners": [1, 2, 4, 8],
        "seeds": [0, 1],
    },
    "virtual": {
        "waits": [
            [[0.010, 0.020]] * 2,
            [[0.010, 0.020]] * 3,
            [[0.010, 0.020]] * 4,
            [[seconds / 3, 2 * seconds / 3] for seconds in (0.010, 0.020, 0.030)],
        ],
        "in_flight": [1, 2],
        "micro_batches": [2, 8],
        "mini_batches": 24,
        "s_local": [0, 1, 3],
        "planned": {
            "wait": {
                "stages": 6,
                "waits": [[n * 0.001, n * 0.002] for n in (2, 3, 1, 4, 2, 3)],
            },
            "compute": {"stages": 6, "width": 1024, "samples": 64},
        },
        "large": {"stages": 6, "width": 1024, "samples": 64},
        "limit": 128 << 20,
        "towers": [(64, 4, 8), (256, 4, 8), (256, 4, 64), (1024, 2, 16), (1024, 4, 64)],
        "rounds": 3,
        "call_s": 0.5,
    },
    "scripts": {"scripts": [], "share": 1.0, "sync": ["asp", "bsp"], "rounds": 3},
}
QUICK: dict[str, dict[str, Any]] = {
    "apply": {"bytes": [2 * MB], "rounds": 2, "call_s": 0.003},
    "undo": {"bytes": [2 * MB], "rounds": 2, "call_s": 0.002},
    "groups": {"bytes": [2 * MB], "rounds": 2, "call_s": 0.002},
    "start": {"rounds": 1, "empty": 0},
    "attach": {"bytes": [4 * MB], "optimizers": ["sgd"], "rounds": 1},
    "ingest": {
        "bytes": [1 * MB],
        "learners": [2],
        "rounds": 1,
        "call_s": 0.03,
        "ray_bytes": 0,
    },
    "aggregate": {
        "bytes": [1 * MB],
        "members": [2],
        "peers": ["gloo all-reduce"],
        "rounds": 1,
        "bytes_per_call": 4 * MB,
    },
    "latency": {"rounds": 2, "spinning": 200, "asleep": 20},
    "scale": {
        "bytes": [1 * MB],
        "learners": [1, 2],
        "shards": [2],
        "rounds": 1,
        "call_s": 0.03,
    },
    "kills": {
        "rows": 1600,
        "mini_batch": 16,
        "seconds": 1.5,
        "trial_s": 0.25,
        "every_s": 0.4,
        "seed": 1,
    },
    "learners": {"learners": [2, 3], "silent": [1], "rounds": 1, "call_s": 0.05},
    "nlc": {
        "sets": ["mr"],
        "learners": [2],
        "batches": [1],
        "window_s": 0.3,
        "rounds": 1,
    },
    "table8": {"sets": ["trec6"], "batches": [1], "window_s": 0.2, "rounds": 1},
    "table7": {
        "sets": ["trec6"],
        "learners": [2],
        "window_s": 0.3,
        "rounds": 1,
        "copy_bytes": 32 * MB,
    },
    "time_to_accuracy": {"accuracy": {"trec6": 0.8}, "interval_s": 1.0, "cap_s": 1.0},
    "memory": {
        "contenders": [("gadei-ps", 1), ("Hogwild", 1)],
        "run_s": 0.2,
        "megabytes": 1,
        "gradients": 100,
    },
    "failover": {"bytes": [MB], "kills": 1, "both": 1, "peer_kills": 0},
    "idle_agent": {"values": [1000], "learners": 1, "rounds": 2, "call_s": 0.03},
    "watching": {"rounds": 1, "call_s": 1.0},
    "worker_groups": {
        "tasks": {"mnist": {"wait_s": 0.01, "every": 5, "seeds": [0]}},
        "groups": [1, 1],
        "learners": 1,
        "rule": "mix:0.5",
        "share": 0.02,
    },
    "group_deaths": {
        "machines": 2,
        "every": 10,
        "kills": {"whole": ({"machine": 1}, 60.0)},
        "seed": 0,
    },
    "asynchrony": {
        "tasks": ["text"],
        "steps": {"text": 80},
        "rates": [1.0],
        "learners": [1, 2],
        "seeds": [0],
    },
    "virtual": {
        "waits": [[[0.001, 0.002]] * 2],
        "in_flight": [2],
        "micro_batches": [],
        "mini_batches": 4,
        "s_local": [3],
        "planned": {"compute": {"stages": 2}},
        "large": {"stages": 2},
        "limit": 200_000,
        "towers": [(64, 1, 8)],
        "rounds": 1,
        "call_s": 0.02,
    },
    "scripts": {"scripts": ["bfloat16"], "share": 0.01, "sync": ["asp"], "rounds": 1},
}


def sizes(name: str, quick: bool) -> dict[str, Any]:
    """The sizes of one benchmark."""
    return (QUICK if quick else FULL)[name]
