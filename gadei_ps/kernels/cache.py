"""The cache of compiled code: a file for each unit, which lasts from one start to the next.

Its directory is named by a digest of all that decides what the code is: the sources, the C
extension, the compiler, and the processor. So a process never loads code that was compiled from
other sources, or for another processor.

A file is a checksum and an object file (ELF). A damaged file, or that of another directory or unit,
counts as missing.
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
import tempfile
import time
from pathlib import Path

import platformdirs

from gadei_ps import _native, homes

KEPT = 3  # directories of other versions that stay, the most recently used
UNUSED_S = 86400.0  # the others go when they were unused for that long
UNFINISHED_S = 600.0  # longer than any process writes a file
DIGEST = re.compile("[0-9a-f]{16}")
CHECKSUM_BYTES = hashlib.sha256().digest_size
COMPILERS = ("numba", "llvmlite")
# What Numba's own settings change in the code. LLVM optimizes it whatever NUMBA_OPT is.
SETTINGS = ("CPU_NAME", "CPU_FEATURES", "BOUNDSCHECK", "DEBUGINFO")
_PACKAGE = Path(__file__).parents[1]
# Modules of the server's folder that compiled code does not need; a test compares them.
_NOT_COMPILED = "code compiler driver fork_server loading manager rings shards units watchers"
SOURCES = (
    *sorted(_PACKAGE.glob("kernels/*.py")),
    *sorted(one for one in _PACKAGE.glob("server/*.py") if one.stem not in _NOT_COMPILED.split()),
    _PACKAGE / "memory" / "layout.py",
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
    settings = [os.environ.get(f"NUMBA_{name}") for name in SETTINGS]
    extension = _native.layout(), _native.numbers(), _native.codes()
    told = repr((extension, _of_the_machine(), settings, _of_the_sources()))
    here = base() / hashlib.sha256(told.encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):
        if here.is_dir():
            os.utime(here)
        else:
            here.mkdir(mode=0o700)
            _prune(here)
    return here


@functools.cache
def _of_the_sources() -> str:
    """Return the digest of the sources as this process first read them."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_sources() -> None:
    """Raise OSError if the sources have been replaced since this process first read them.

    Call it after the sources are imported and before they are compiled.
    """
    if _of_the_sources.__wrapped__() != _of_the_sources():
        raise OSError(errno.ESTALE, "gadei-ps was installed again meanwhile; start the job again")


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


def _path(name: str) -> Path:
    return directory() / f"{name}.code"


def _checksum(path: Path, code: bytes) -> bytes:
    """Return a checksum for this file alone: it rejects a copy in another version's directory."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}\n".encode() + code).digest()


def read(name: str) -> bytes | None:
    """Return the code of a unit, some tens of kilobytes; None if no whole file can be read."""
    try:
        path = _path(name)
        data = path.read_bytes()
    except OSError:
        return None
    code = data[CHECKSUM_BYTES:]
    return code if data[:CHECKSUM_BYTES] == _checksum(path, code) else None


def _remove_unfinished(here: Path) -> None:
    """Remove the files of processes that were killed while they wrote."""
    for path in here.glob("*.new"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNFINISHED_S:
                path.unlink()


def keep(name: str, code: bytes) -> None:
    """Write the file of a unit. Raises OSError."""
    path = _path(name)
    _remove_unfinished(path.parent)
    fd, new = tempfile.mkstemp(".new", f"{name}.", path.parent)
    made = Path(new)
    try:
        with open(fd, "wb") as file:
            file.write(_checksum(path, code) + code)
        made.rename(path)
    except OSError:
        made.unlink(missing_ok=True)
        raise
