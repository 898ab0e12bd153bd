"""The models of native/verify/, for tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "native" / "verify" / "run"


def verify() -> ModuleType:
    """The script that checks them, as a module; the test is skipped where it cannot run."""
    for program, package in (("spin", "spin"), ("cc", "gcc")):
        if not shutil.which(program):
            pytest.skip(f"needs {program}: install Debian's package {package}")
    if "verify" not in sys.modules:
        loader = importlib.machinery.SourceFileLoader("verify", str(SCRIPT))
        spec = importlib.util.spec_from_loader("verify", loader)
        assert spec is not None
        module = sys.modules["verify"] = importlib.util.module_from_spec(spec)
        written = sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        try:
            loader.exec_module(module)
        finally:
            sys.dont_write_bytecode = written
    return sys.modules["verify"]
