"""gadei-ps: a parameter server for one machine.

A watchdog owns the weights of a model in shared memory; learner processes push gradients into
lock-free queues and pull weights, and may be killed at any instant.

`gadei_ps.serve` serves a job from a notebook or a script; it is loaded when it is first used.

The top-level folders learners/, watchdog/ and benchmarks/ are imported as gadei_ps.learners,
gadei_ps.watchdog and gadei_ps.benchmarks.
"""

import importlib
from typing import Any

__version__ = "0.3.0.dev0"
_LATER = {"serve": "gadei_ps.commands.notebook"}  # the rooms above import this package


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'gadei_ps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
