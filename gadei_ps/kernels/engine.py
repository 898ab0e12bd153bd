"""Loading of object files into this process, by LLVM and without Numba.

LLVM ends the process if a symbol is missing; a test shows which ones the code needs. The code stays
for as long as the process lives. No thread is left behind, and forks have the code.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
import threading
from pathlib import Path
from typing import Any

from llvmlite import binding

from gadei_ps import _native

_lock = threading.Lock()
MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp .*/libllvmlite\.so$")


def entry(unit: str) -> str:
    """Return the name of a unit's C function, the only one that others may see."""
    return f"gadei_ps_{unit.replace('-', '_')}"


@functools.cache
def symbols() -> None:
    """Make the functions of the C extension known to LLVM, so that compiled code can call them."""
    binding.load_library_permanently(_native.__file__)


@functools.cache
def _engine() -> Any:
    symbols()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    machine = target.create_target_machine(jit=True)
    return binding.create_mcjit_compiler(binding.parse_assembly(""), machine)


def load(unit: str, code: bytes) -> int:
    """Load a unit's object file and return the address of its C function."""
    with _lock:
        engine = _engine()
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return int(engine.get_function_address(entry(unit)))


def give_back() -> None:
    """Free the memory of LLVM's own code, some 30 MB, which is not needed between two loads.

    Only pages that are mapped from its file and never written are freed: the kernel reads them
    from the file when they run again. LLVM's constants stay, because those that hold addresses
    were written.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if found := MAPPED.match(line):
                begin, end = (int(one, 16) for one in found.groups())
                libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)
