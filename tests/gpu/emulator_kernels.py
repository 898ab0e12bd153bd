"""kernels.cu as functions of the host."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build"


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
    """Return kernels as host functions: launch_NAME(blocks, threads, struct), size_NAME()."""
    pairs = re.findall(r"__global__ void (\w+)\(const (\w+) a\)", source)
    launchers = "".join(f"LAUNCHER({name}, {args})\n" for name, args in pairs)
    text = f'#include "{HERE / "host.hpp"}"\n{source}\n{launchers}'
    number = hashlib.sha256(text.encode() + (HERE / "host.hpp").read_bytes()).hexdigest()[:16]
    path = BUILD / f"kernels-{number}.so"
    if not path.exists():
        BUILD.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
            file.write(text)
            file.flush()
            made = path.with_suffix(f".{os.getpid()}")
            options = [
                "-std=c++17",
                "-O1",
                "-Wno-unknown-pragmas",
                "-fPIC",
                "-shared",
                "-ffp-contract=off",
                # As on a device, access to an address of wrong alignment ends it all.
                "-fsanitize=alignment",
                "-fsanitize-undefined-trap-on-error",
            ]
            subprocess.run(["g++", *options, "-o", made, file.name], check=True)
            made.rename(path)
    return ctypes.CDLL(str(path))
