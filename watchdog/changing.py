"""Changes of the optimizer's numbers while the job runs: what is asked for, and until it counts.

The watchdog first records a change in the job's memory. From then on this watchdog, or the next
one, asks the servers for it until it is in force (job/numbers.py).
"""

from __future__ import annotations

from typing import Any

from gadei_ps.job import changes, numbers
from gadei_ps.job.control import SetOptimizer
from gadei_ps.kernels.optimizers import OptimizerSpec
from gadei_ps.watchdog import settings
from gadei_ps.watchdog.memory import JobMemory


def change(memory: JobMemory, request: SetOptimizer) -> dict[str, Any]:
    """Apply the request of `gadei-ps set`; return the changed fields, each with both values.

    Raises UsageError, and changes nothing, for settings that the job's optimizer cannot have.
    """
    before = wanted(memory)
    values = changes.checked(request.values, before[-1].kind.name.lower(), len(before) - 1)
    new = memory.changes.with_(values, memory.config)
    after = settings.specs_of(memory.config, memory.script, new)
    if new != memory.changes:
        memory.changes = new
        memory.enter_settings()
    was, now = settings.fields(before), settings.fields(after)
    return {name: [was[name], now[name]] for name in values if was[name] != now[name]}


def wanted(memory: JobMemory) -> list[OptimizerSpec]:
    """Return the resulting settings of each group, and at last of the other parameters."""
    return settings.specs_of(memory.config, memory.script, memory.changes)


def is_settled(memory: JobMemory) -> bool:
    """Return whether the servers apply gradients with the resulting settings."""
    return numbers.are_in_force(memory.control, settings.packed(wanted(memory)))


def look(memory: JobMemory) -> None:
    """Ask for what is not in force yet: a change may have come amid another one. Every tick."""
    if memory.model is not None and not is_settled(memory):
        numbers.ask(memory.control, settings.packed(wanted(memory)))
