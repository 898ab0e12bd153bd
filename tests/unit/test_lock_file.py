"""Files that a process keeps locked while it lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from gadei_ps.job import paths
from gadei_ps.job.lock_file import LockFile


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return paths.lock_path("a-job")


def test_one_has_it_at_a_time(path: Path) -> None:
    lock = LockFile(path)
    with pytest.raises(BlockingIOError):
        LockFile(path)
    lock.close()
    LockFile(path, create=False).release()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        LockFile(path, create=False)


def test_a_file_of_another_owner_is_not_removed(path: Path) -> None:
    """A program that cleans directories has removed the first one."""
    lock = LockFile(path)
    path.unlink()
    assert not lock.is_named()
    other = LockFile(path)
    lock.release()
    assert path.exists()
    with pytest.raises(BlockingIOError):
        LockFile(path)
    other.release()
    assert not path.exists()


def test_a_removed_file_is_replaced(path: Path) -> None:
    lock = LockFile(path)
    path.unlink()
    lock.replace(LockFile(path))
    assert lock.is_named()
    with pytest.raises(BlockingIOError):
        LockFile(path)
    lock.release()
