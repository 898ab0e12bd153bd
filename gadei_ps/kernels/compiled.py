"""Compilation of the shard threads' code, by the public names of Numba and llvmlite.

Each shard has one thread of its own, which runs one compiled loop without the GIL until the server
ends. It is not an iteration of a `prange`: the job chooses the number of shards, Numba's own
threads do not survive a fork, and they meet at a barrier for each gradient, while a shard waits for
no other one. `docs/decisions/0001-nogil-threads.md` has the figures.

Numba translates a unit and all that it calls to LLVM's code, as text. LLVM alone does the
rest: it optimizes the unit as a whole and makes an object file, which a server loads without
Numba. Servers set NUMBA_OPT, so that Numba does not optimize each function before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import binding

from gadei_ps.kernels.engine import entry

F = TypeVar("F", bound=Callable[..., Any])

# Dividing by zero like NumPy: with a test for it no loop would be vectorized.
HOW = {"nogil": True, "error_model": "numpy"}
# Without what would make a function callable from Python.
PART = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
# Functions of Python and Numba, which only an error and an array with an owner need. Today: Py...,
# NRT_Free, NRT_MemInfo_call_dtor, numba_do_raise, numba_gil_ensure, numba_gil_release,
# numba_runtime_build_excinfo_struct and numba_unpickle. Numba's helpers of mathematics and arrays
# (math.frexp, complex powers, reshape) match, too: compiled code must not use them.
NOT_RUN = re.compile(r"^declare ([^@\n]*@(?:_?Py|numba_|NRT_).*\))[^)\n]*$", re.M)


def compiled(function: F, **more: Any) -> F:
    """Compile a function that Python can call; the type checker sees its own signature.

    For tests, and tools that measure. more: options of `numba.njit`.
    """
    made: F = numba.njit(**HOW, **more)(function)
    return made


def inner(function: F) -> F:
    """Compile a function as a part of compiled code, which alone can call it."""
    return compiled(function, **PART)


def inlined(function: F) -> F:
    """Compile a function into each caller: for what runs once a chunk, where a call is too slow."""
    return compiled(function, forceinline=True, **PART)


def machine_code(name: str, signature: Any, function: Callable[..., Any]) -> bytes:
    """Return the object file of a unit: a C function, with all that it calls.

    name: the unit's. signature: Numba's, of numbers or void. If the code raises an error, the
    process ends at once, because a shard's thread has nobody to report to.
    """
    made = numba.cfunc(signature, **HOW)(function)
    machine = _machine()
    # LLVM vectorizes a loop over weights before it knows how often a caller runs it; else it
    # unrolls it. So what is inlined is optimized by itself first.
    parts = binding.parse_assembly(made.inspect_llvm().replace("alwaysinline", "noinline"))
    _optimize(parts, machine)
    text = str(parts).replace("noinline", "alwaysinline")
    # Without their attributes: a function that is not run must be free to end the process.
    text = NOT_RUN.sub(r"define \1 { call void @llvm.trap() unreachable }", text)
    module = binding.parse_assembly(f"{text}\ndeclare void @llvm.trap()")
    module.get_function(made.native_name).name = entry(name)
    # Numba numbers the functions that a process compiles, so two processes may give one name to
    # different code. Only the entry is seen by others.
    for one in (*module.functions, *module.global_variables):
        if not one.is_declaration and one.name != entry(name):
            one.linkage = "internal"
    _optimize(module, machine)
    code: bytes = machine.emit_object(module)
    return code


def _optimize(module: Any, machine: Any) -> None:
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def _machine() -> Any:
    """Return LLVM's description of this processor, or of the one that Numba's settings name."""
    features = numba.config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=numba.config.CPU_NAME or binding.get_host_cpu_name(),
        features=features,
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )
