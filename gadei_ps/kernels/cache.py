"""Where compiled code is kept between starts.

Numba looks only at the file of a compiled function to tell whether its cache is still right, not at
the functions and constants that were compiled into it. So the directory is named by a digest of all
sources that are compiled, and an upgrade never meets old code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import numba

KEPT = 3  # directories of other versions that stay
UNUSED_S = 86400.0  # and those that have been used since
DIGEST = re.compile("[0-9a-f]{16}")
_PACKAGE = Path(__file__).parents[1]
SOURCES = (
    *sorted((_PACKAGE / "kernels").glob("*.py")),
    _PACKAGE / "memory" / "layout.py",
    *(
        _PACKAGE / "server" / name
        for name in (
            "symbols.py",
            "ledger.py",
            "places.py",
            "apply.py",
            "account.py",
            "shard.py",
            "journal.py",
            "recover.py",
            "frames.py",
            "rows.py",
        )
    ),
)


def base() -> Path:
    """A gadei-ps directory in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache.

    Where none can be written, a directory that lives as long as this process: Numba's files are
    pickles, so one that somebody else could have made is no choice.
    """
    given = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    home = Path(given or Path("~/.cache").expanduser()) / "gadei-ps"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if home.stat().st_uid == os.getuid() and os.access(home, os.W_OK):
            return home
    except OSError:
        pass
    return _temporary()


@functools.cache
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="gadei-ps-cache-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def directory() -> Path:
    """The directory of this version's code; made if there is none. Its time is its last use's."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.read_bytes())
    here = base() / digest.hexdigest()[:16]
    with contextlib.suppress(OSError):
        if here.is_dir():
            os.utime(here)
        else:
            here.mkdir(mode=0o700)
            _prune(here)
    return here


def _prune(here: Path) -> None:
    """Removes what only versions have used that have been replaced."""
    others = [path for path in here.parent.iterdir() if DIGEST.fullmatch(path.name)]
    others.remove(here)
    used = {path: path.stat().st_mtime for path in others}
    for old in sorted(others, key=lambda path: used[path])[:-KEPT]:
        if time.time() - used[old] > UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)


numba.config.CACHE_DIR = str(directory())
