"""Where compiled code is kept between starts.

Numba looks only at the file of a compiled function to tell whether its cache is still right, not at
the functions and constants that were compiled into it. So the directory is named by a digest of all
sources that are compiled, and an upgrade never meets old code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numba

KEPT = 3  # directories of earlier versions that stay
_PACKAGE = Path(__file__).parents[1]
SOURCES = (
    *sorted((_PACKAGE / "kernels").glob("*.py")),
    *(_PACKAGE / name for name in ("layout.py", "symbols.py", "ledger.py", "places.py")),
    *(_PACKAGE / name for name in ("apply.py", "account.py", "shard.py")),
)


def base() -> Path:
    """$NUMBA_CACHE_DIR, or gadei-ps below $XDG_CACHE_HOME or ~/.cache, or one in /tmp."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "gadei-ps"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"gadei-ps-{os.getuid()}" / "cache"


def directory() -> Path:
    """The directory of this version's code; made if there is none."""
    digest = hashlib.sha256()
    for path in SOURCES:
        digest.update(path.read_bytes())
    here = base() / digest.hexdigest()[:16]
    if not here.is_dir():
        with contextlib.suppress(OSError):
            here.mkdir(parents=True, mode=0o700)
            others = [path for path in here.parent.iterdir() if path.is_dir() and path != here]
            for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-KEPT]:
                if len(old.name) == len(here.name):
                    shutil.rmtree(old, ignore_errors=True)
    return here


numba.config.CACHE_DIR = str(directory())
