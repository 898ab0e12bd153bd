"""Checks of what is installed: Python, the native module, Numba's cache, PyTorch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

import gadei_ps
from gadei_ps import homes
from gadei_ps.commands import service_manager
from gadei_ps.commands.doctor.result import Found, Level


def python() -> Found:
    found = f"Python {platform.python_version()}, gadei-ps {gadei_ps.__version__}"
    if sys.platform != "linux":
        return Level.ERROR, f"{found} on {sys.platform}", "use Linux"
    return Level.OK, found, ""


def native() -> Found:
    try:
        from gadei_ps import _native
        from gadei_ps.memory import layout
    except ImportError as error:
        return Level.ERROR, f"cannot be loaded: {error}", "install again: pip install gadei-ps"
    made = _native.layout()
    if any(made[name][0] != layout.STRUCTS[name].itemsize for name in made):
        return Level.ERROR, "is of another version than the package", "install gadei-ps again"
    return Level.OK, Path(_native.__file__ or "").name, ""


def numba() -> Found:
    try:
        from gadei_ps.kernels import cache, half  # noqa: F401 (whether it can be imported)
        from gadei_ps.kernels.optimizers import Kind
        from gadei_ps.server import code
        from gadei_ps.server.units import units as of_server
    except ImportError as error:
        return Level.ERROR, f"Numba cannot be loaded: {error}", "pip install gadei-ps again"
    writable = "set NUMBA_CACHE_DIR to a directory you may write"
    if not cache.is_lasting():
        return (
            Level.WARNING,
            f"{cache.home()} cannot be written: what is compiled is kept in {code.spare_home()}, "
            "until the end of the session or of the machine",
            writable,
        )
    where = cache.directory()
    if not os.access(where, os.W_OK | os.X_OK):
        return (
            Level.WARNING,
            f"{where} cannot be written: every start compiles for up to half a minute",
            writable,
        )
    kept = all(unit.is_kept() for unit in of_server([Kind.SGD]))
    filled = "filled" if kept else "not filled: the next start compiles for up to half a minute"
    units = ""
    if homes.of_the_system() and where.parent != homes.CACHE:  # as root sees it
        units = f"; the units use {homes.CACHE}"
    return Level.OK, f"{where}, {filled}{units}", ""


def torch() -> Found:
    if importlib.util.find_spec("torch") is None:
        return (
            Level.WARNING,
            "not installed; train, predict and gadei_ps.learners.torch need it",
            "pip install 'gadei-ps[torch]'",
        )
    return Level.OK, importlib.metadata.version("torch"), ""


def systemd() -> Found:
    found = service_manager.version()
    if found is None:
        return Level.OK, "no systemd here", ""
    if old := service_manager.too_old():
        return Level.WARNING, old, "start jobs with gadei-ps serve"
    return Level.OK, f"systemd {found}", ""
