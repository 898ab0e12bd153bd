"""Where compiled code is kept between starts.

To tell whether kept code is still right, Numba compares only the file of the compiled function, not
the functions and constants from other files that were compiled into it. Therefore the directory is
named by a digest of all these files, and a process never loads code that was compiled from others.

Numba gives a file its name before the file is on the disk, and raises an error for one that it
cannot read or write. Here a file is on the disk before it gets its name, one that cannot be read is
compiled again, and what cannot be written is used without being kept.
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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import platformdirs

from gadei_ps import _native, homes
from gadei_ps.kernels.frozen import caching, numba

KEPT = 3  # directories of other versions that stay, the most recently used
UNUSED_S = 86400.0  # the others go when they were unused for that long
DIGEST = re.compile("[0-9a-f]{16}")
_PACKAGE = Path(__file__).parents[1]
# Every module with code that is kept, and every module that such a module imports.
SOURCES = tuple(
    _PACKAGE / name
    for name in (
        "homes.py",
        "kernels/borrow.py",
        "kernels/cache.py",
        "kernels/compiled.py",
        "kernels/cpu.py",
        "kernels/frozen.py",
        "kernels/half.py",
        "kernels/optimizers.py",
        "kernels/unit.py",
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
        "server/order.py",
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

    With the runtime directory of the system's units, the one of their user, for that user. If none
    can be written, a temporary directory that this process removes at its end. Numba's files are
    pickles, so a directory that another user owns is never used.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    if not given and homes.of_the_system() and _is_ours(homes.CACHE):
        return homes.CACHE
    home = Path(given) / "gadei-ps" if given else platformdirs.user_cache_path("gadei-ps")
    with contextlib.suppress(OSError):
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home if _is_ours(home) else _temporary()


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid() and os.access(path, os.W_OK)
    except OSError:
        return False


@functools.cache
def _temporary() -> Path:
    path = Path(tempfile.mkdtemp(prefix="gadei-ps-cache-")) / "gadei-ps"
    path.mkdir(mode=0o700)
    atexit.register(remove_temporary)
    return path


def remove_temporary() -> None:
    """Removes the temporary directory, if there is one. At the end of a process."""
    if _temporary.cache_info().currsize:
        shutil.rmtree(_temporary().parent, ignore_errors=True)


def environment() -> dict[str, str]:
    """Variables by which a child keeps its code in the directory of this process."""
    if _temporary.cache_info().currsize:
        return {"NUMBA_CACHE_DIR": str(_temporary().parent)}
    return {}


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


class _Kept(caching.IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function."""

    def _load_index(self) -> dict[Any, str]:
        try:
            found: dict[Any, str] = super()._load_index()
        except Exception:  # whatever unpickling bytes of any kind raises
            return {}
        return found

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)
        except Exception as error:
            raise OSError(f"{name} is damaged") from error  # for which Numba compiles it again

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # before it gets its name


class Quick(caching.FunctionCache):  # type: ignore[misc]
    """The cache of a function that counts no references.

    Numba first prepares for compiling, which takes longer than to load a server's code. It does so
    again before it compiles.
    """

    def load_overload(self, signature: Any, target: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target)


_problems: list[str] = []


@contextlib.contextmanager
def _guarded(cache: caching.Cache) -> Iterator[None]:
    """Around loading and keeping the code of a function; what has failed is not there."""
    try:
        yield
    except OSError as error:
        _problems.append(str(error))


def has_failed() -> bool:
    """Whether code could not be loaded or kept."""
    return bool(_problems)


def tell(log: Any) -> None:
    """Warns if code could not be loaded or kept since this was called last."""
    if _problems:
        log.warning("compiled code cannot be kept for the next start", reason=_problems[-1])
        _problems.clear()


caching.IndexDataCacheFile = _Kept
caching.Cache._guard_against_spurious_io_errors = _guarded
numba.config.CACHE_DIR = str(directory())
