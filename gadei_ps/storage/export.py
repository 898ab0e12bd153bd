"""Weights as files for others: safetensors, NumPy, PyTorch."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import numpy as np

from gadei_ps.errors import UsageError
from gadei_ps.memory.layout import Role
from gadei_ps.storage import files
from gadei_ps.storage.snapshot import Snapshot

_Save = Callable[[IO[bytes]], None]
ALIASES: Final = "gadei_ps.aliases"
"""Key in a safetensors file's metadata: the second names of tensors that have two."""
ROLES: Final = "gadei_ps.roles"
"""There, too: which tensors are buffers or frozen."""
NO_TORCH: Final = "a .pt file needs PyTorch: pip install 'gadei-ps[torch]'"


def check(out: Path) -> None:
    """Raise UsageError for a file that cannot be written later: suffix, directory, library."""
    _format(out)
    folder = out.parent
    if not folder.is_dir():
        raise UsageError(f"{out}: there is no directory {folder}; make it first")
    if out.is_dir():
        raise UsageError(f"{out} is a directory; name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{out}: directory {folder} cannot be written to; choose another")
    if out.suffix == ".pt" and importlib.util.find_spec("torch") is None:
        raise UsageError(NO_TORCH)


def export(snapshot: Snapshot, out: Path) -> None:
    """Write the weights alone, whole or not at all, in the format that the suffix names.

    A tensor with aliases is there under each of its names.

    .safetensors; .npz for numpy.load; .pt for torch.load, a state_dict. An older file is replaced.
    Raises UsageError for another suffix or for names that the format cannot hold, CheckpointError
    for a file that cannot be written.
    """
    prepare = _format(out)
    try:
        save = prepare(snapshot)
        with files.replacing(out) as file:
            save(file)
    except ValueError as error:
        raise UsageError(f"{out}: {error}") from None
    except OSError as error:
        raise files.unwritten(out, "cannot be written", error) from None


def _format(out: Path) -> Callable[[Snapshot], _Save]:
    """Return the writer of files of this suffix. Raises UsageError for another one."""
    try:
        return _FORMATS[out.suffix]
    except KeyError:
        raise UsageError(f"{out}: name a file that ends in {', '.join(_FORMATS)}") from None


def _safetensors(snapshot: Snapshot) -> _Save:
    """The format holds no tensor under two names: the values are there once for each."""
    tensors, aliases = dict(snapshot.weight_tensors()), snapshot.model.aliases
    roles = {
        one.name: one.role.name.lower()
        for one in snapshot.model.every
        if one.role is not Role.PARAMETER
    }
    metadata = {ALIASES: json.dumps(aliases)} if aliases else {}
    metadata |= {ROLES: json.dumps(roles)} if roles else {}
    blocks = files.safetensors(
        tensors | {alias: tensors[name] for alias, name in aliases.items()}, metadata
    )

    def save(file: IO[bytes]) -> None:
        for block in blocks:
            file.write(block)

    return save


def _npz(snapshot: Snapshot) -> _Save:
    arrays = snapshot.arrays()
    arrays |= {alias: arrays[name] for alias, name in snapshot.model.aliases.items()}
    for name in arrays:
        if f"{name}.npy" in arrays:
            raise ValueError(f"numpy.load confuses {name!r} with {name + '.npy'!r}")

    def save(file: IO[bytes]) -> None:
        # Not numpy.savez: it takes names as keywords and has some of its own.
        with zipfile.ZipFile(file, "w") as archive:
            for name, values in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, values, allow_pickle=False)

    return save


def _torch(snapshot: Snapshot) -> _Save:
    try:
        import torch
    except ImportError:
        raise UsageError(NO_TORCH) from None
    dtype_of = {one.name: one.dtype for one in snapshot.model.every}
    state = {
        name: torch.from_numpy(values if values.flags.writeable else values.copy())
        for name, values in snapshot.arrays().items()
    }
    state = {
        name: one.view(torch.bfloat16) if dtype_of[name] == "BF16" else one
        for name, one in state.items()
    }
    state |= {alias: state[name] for alias, name in snapshot.model.aliases.items()}

    def save(file: IO[bytes]) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what it makes of the file's OSError
            cause = error.__cause__ or error.__context__
            if isinstance(cause, OSError):
                raise cause from None
            raise OSError(errno.EIO, str(error).partition("\n")[0]) from None

    return save


_FORMATS: Final = {".safetensors": _safetensors, ".npz": _npz, ".pt": _torch}
