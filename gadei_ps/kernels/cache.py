"""Where compiled code is kept between starts.

To tell whether kept code is still right, Numba compares only the file of the compiled function, not
the functions and constants from other files that were compiled into it. Therefore the directory is
named by a digest of all these files, and a process never loads code that was compiled from others.
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
import platformdirs

from gadei_ps import _native

KEPT = 3  # directories of other versions that stay, the most recently used
UNUSED_S = 86400.0  # the others go when they were unused for that long
DIGEST = re.compile("[0-9a-f]{16}")
_PACKAGE = Path(__file__).parents[1]
# Every module with code that is kept, and every module that such a module imports.
SOURCES = tuple(
    _PACKAGE / name
    for name in (
        "kernels/borrow.py",
        "kernels/cache.py",
        "kernels/compiled.py",
        "kernels/cpu.py",
        "kernels/half.py",
        "kernels/optimizers.py",
        "memory/layout.py",
        "server/account.py",
        "server/apply.py",
        "server/arrival.py",
        "server/blocks.py",
        "server/chunks.py",
        "server/constants.py",
        "server/context.py",
        "server/dense.py",
        "server/frames.py",
        "server/journal.py",
        "server/known.py",
        "server/ledger.py",
        "server/payload.py",
        "server/record.py",
        "server/recover.py",
        "server/rows.py",
        "server/shard.py",
        "server/statistics.py",
        "server/structs.py",
        "server/superstep.py",
        "server/symbols.py",
        "server/undo.py",
        "sync/zipline.py",
    )
)


def base() -> Path:
    """A gadei-ps directory in $NUMBA_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache.

    If that cannot be written, a temporary directory that this process removes at its end. Numba's
    files are pickles, so a directory that another user owns is never used.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    home = Path(given) / "gadei-ps" if given else platformdirs.user_cache_path("gadei-ps")
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
    """Return the directory of this version's code, and make it if there is none.

    Its time of modification is that of the last call.
    """
    digest = hashlib.sha256(repr(_of_the_extension()).encode())
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


def _of_the_extension() -> object:
    """What compiled code has from the C extension: offsets, sizes, types and values.

    What fields and codes mean, in words, is not compiled.
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


def _prune(here: Path) -> None:
    """Remove the directories of replaced versions, see KEPT and UNUSED_S."""
    others = [path for path in here.parent.iterdir() if DIGEST.fullmatch(path.name)]
    others.remove(here)
    used = {path: path.stat().st_mtime for path in others}
    for old in sorted(others, key=lambda path: used[path])[:-KEPT]:
        if time.time() - used[old] > UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)


numba.config.CACHE_DIR = str(directory())
