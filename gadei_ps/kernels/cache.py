"""The cache of compiled code, which lasts from one start to the next.

Its directory is named by a digest of all that decides what the code is: the sources, the C
extension, the compiler, and the processor. So a process never loads code that was compiled from
other sources, or for another processor.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import platformdirs

from gadei_ps import _native, homes

KEPT = 3  # directories of other versions that stay, the most recently used
UNUSED_S = 86400.0  # the others go when they were unused for that long
DIGEST = re.compile("[0-9a-f]{16}")
_PACKAGE = Path(__file__).parents[1]
COMPILERS = ("numba", "llvmlite")
# What Numba's own settings change in the code. LLVM optimizes it whatever NUMBA_OPT is.
SETTINGS = tuple(
    f"NUMBA_{name}"
    for name in ("CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK", "DEBUGINFO", "DISABLE_INTEL_SVML")
)
# Every module with code that is kept, and every module that such a module imports.
SOURCES = tuple(
    _PACKAGE / name
    for name in (
        "homes.py",
        "kernels/borrow.py",
        "kernels/cache.py",
        "kernels/compiled.py",
        "kernels/cpu.py",
        "kernels/engine.py",
        "kernels/half.py",
        "kernels/loaded.py",
        "kernels/optimizers.py",
        "kernels/store.py",
        "memory/layout.py",
        "server/account.py",
        "server/apply.py",
        "server/arrival.py",
        "server/blocks.py",
        "server/chunks.py",
        "server/constants.py",
        "server/context.py",
        "server/frames.py",
        "server/journal.py",
        "server/kinds.py",
        "server/known.py",
        "server/ledger.py",
        "server/order.py",
        "server/payload.py",
        "server/record.py",
        "server/recover.py",
        "server/shard.py",
        "server/statistics.py",
        "server/structs.py",
        "server/superstep.py",
        "server/symbols.py",
    )
)


def base() -> Path:
    """Return a gadei-ps directory in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache.

    With the runtime directory of the system's units, the one of their user, for that user. What
    lies there is run, so a directory that another user owns is never used: raises OSError for that,
    and for one that cannot be written.
    """
    wanted = home()
    with contextlib.suppress(OSError):
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(wanted):
        raise PermissionError(errno.EACCES, f"{wanted} cannot be written")
    return wanted


def home() -> Path:
    """Return the preferred directory, even if it cannot be written."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if not given and homes.of_the_system() and _is_ours(homes.CACHE):
        return homes.CACHE
    return Path(given) / "gadei-ps" if given else platformdirs.user_cache_path("gadei-ps")


def is_lasting() -> bool:
    """Return whether code can be kept."""
    try:
        return base().is_dir()
    except OSError:
        return False


def _is_ours(path: Path) -> bool:
    try:
        ours = path.is_dir() and path.stat().st_uid == os.getuid()
        return ours and os.access(path, os.W_OK | os.X_OK)
    except OSError:
        return False


def directory() -> Path:
    """Return the directory of this version's code, and make it if there is none.

    Its time of modification is that of the last call. Raises OSError, as base() does.
    """
    given = [os.environ.get(name) for name in SETTINGS]
    told = _of_the_extension(), _of_the_machine(), given, _of_the_sources()
    digest = hashlib.sha256(repr(told).encode())
    here = base() / digest.hexdigest()[:16]
    with contextlib.suppress(OSError):
        if here.is_dir():
            os.utime(here)
        else:
            here.mkdir(mode=0o700)
            _prune(here)
    return here


def _on_the_disk() -> str:
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _of_the_sources() -> str:
    """Return the digest of the sources as this process first read them."""
    return _on_the_disk()


def check_sources() -> None:
    """Raise OSError if the sources have been replaced since this process first read them.

    Call it after the sources are imported and before they are compiled.
    """
    if _on_the_disk() != _of_the_sources():
        raise OSError(errno.ESTALE, "gadei-ps was installed again meanwhile; start the job again")


def _of_the_extension() -> object:
    """Return what compiled code takes from the C extension: offsets, sizes, types and values.

    The descriptions of fields and codes are not compiled.
    """
    structs = {
        name: (size, {field: told[:4] for field, told in fields.items()})
        for name, (size, fields) in _native.layout().items()
    }
    codes = {
        name: {code: value for code, (value, _) in told.items()}
        for name, told in _native.codes().items()
    }
    return structs, _native.numbers(), codes


@functools.cache
def _of_the_machine() -> tuple[object, ...]:
    """Return the versions of the compilers and the processor, without importing Numba (slow)."""
    from llvmlite import binding

    found = [importlib.util.find_spec(name) for name in COMPILERS]
    folders = [one.submodule_search_locations or () for one in found if one]
    versions = [(Path(*folder) / "_version.py").read_bytes() for folder in folders]
    features = binding.get_host_cpu_features().flatten()
    target = binding.get_process_triple(), binding.get_host_cpu_name(), features
    return *versions, *target, sys.implementation.cache_tag


def _prune(here: Path) -> None:
    """Remove the directories of replaced versions, see KEPT and UNUSED_S."""
    others = [path for path in here.parent.iterdir() if DIGEST.fullmatch(path.name)]
    others.remove(here)
    used = {path: path.stat().st_mtime for path in others}
    for old in sorted(others, key=lambda path: used[path])[:-KEPT]:
        if time.time() - used[old] > UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)


_problems: list[str] = []


def note(error: OSError) -> None:
    """Note that code could not be loaded or kept."""
    _problems.append(str(error))


def has_failed() -> bool:
    """Return whether code could not be loaded or kept."""
    return bool(_problems)


def report(log: Any) -> None:
    """Log a warning if code could not be loaded or kept since the last call."""
    if _problems:
        log.warning("compiled code cannot be kept for the next start", reason=_problems[-1])
        _problems.clear()
