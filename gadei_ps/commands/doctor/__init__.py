"""`gadei-ps doctor`: can jobs run on this machine, and if not, what is to be done?"""

from __future__ import annotations

from collections.abc import Callable

from gadei_ps.commands.doctor import graphics, kernel, memory, packages
from gadei_ps.commands.doctor.result import Check, Found, Level
from gadei_ps.errors import GadeiError

__all__ = ["CHECKS", "Check", "Level", "examine"]

CHECKS: dict[str, Callable[[], Found]] = {
    "Python": packages.python,
    "native module": packages.native,
    "Numba's cache": packages.numba,
    "/dev/shm": memory.shm,
    "large pages": memory.large_pages,
    "cores": kernel.cores,
    "futex_waitv": kernel.futex_waitv,
    "pidfd_open": kernel.pidfd,
    "robust mutexes": kernel.robust_mutex,
    "open files": kernel.files,
    "runtime directory": kernel.runtime_directory,
    "systemd": packages.systemd,
    "RemoveIPC": memory.remove_ipc,
    "PyTorch": packages.torch,
    "GPU": graphics.driver_shows,
    "CUDA": graphics.cupy_works,
    "left by dead jobs": memory.litter,
}


def examine() -> list[Check]:
    """All checks. They change nothing, but may make the runtime directory."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def _guarded(name: str, check: Callable[[], Found]) -> Check:
    try:
        return Check(name, *check())
    except (OSError, GadeiError) as error:
        return Check(name, Level.ERROR, str(error))
