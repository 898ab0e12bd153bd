"""Files that a command writes its result to."""

from __future__ import annotations

from pathlib import Path

from gadei_ps.errors import UsageError


def check(option: str, file: Path | None, suffix: str = "") -> None:
    """Raise UsageError if the file could not be written; for a command that takes long."""
    if file is None:
        return
    if not file.name.endswith(suffix):
        raise UsageError(f"{option} {file}: give a name that ends in {suffix}")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no directory {file.parent}; create it first")
    if file.is_dir():
        raise UsageError(f"{option} {file}: it is a directory; name a file")


def write(option: str, file: Path, text: str) -> None:
    """Write it whole, or not at all. Raises UsageError."""
    from gadei_ps.storage import files

    try:
        with files.replacing(file) as stream:
            stream.write(text.encode())
    except OSError as error:
        raise UsageError(f"{option} {file}: cannot be written ({error.strerror})") from None
