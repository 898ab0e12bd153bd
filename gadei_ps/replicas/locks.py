"""Files that a process keeps locked while it lives, so that others see whether it does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gadei_ps.errors import JobInUse
from gadei_ps.job import paths


class Lock:
    """A locked file, until release() or the end of this process."""

    def __init__(self, path: Path, taken: str, create: bool = True) -> None:
        """Lock the file. Raises FileNotFoundError; JobInUse(taken) if another process has it."""
        self._path = path
        while True:
            self._fd = paths.open_lock(path, create=create)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._fd), path.stat()):
                    return
            except BlockingIOError:
                os.close(self._fd)
                raise JobInUse(taken) from None
            except FileNotFoundError:
                pass  # the one before has just ended, and has removed its file
            os.close(self._fd)

    def close(self) -> None:
        """Unlock the file, which stays."""
        os.close(self._fd)

    def release(self) -> None:
        """Unlock and remove the file."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
