"""How the code of the shard threads is compiled: without the GIL, dividing by zero like NumPy.

Numba makes each function ready to run by itself: it optimizes it, with all that it calls, makes
machine code of it and wrappers by which Python can call it. Most functions here only become a part
of others, with which they are optimized again. Of these it makes nothing but LLVM's code as it
comes from the types, and what is run is optimized once, as a whole. Only loops over weights are
optimized before they become a part, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba.core import codegen, compiler, sigutils, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher

from gadei_ps.kernels import elf, engine
from gadei_ps.kernels.numba_cache import Quick
from gadei_ps.kernels.store import Code

F = TypeVar("F", bound=Callable[..., Any])

# Without counts of references: nothing here owns memory.
HOW = {"nogil": True, "error_model": "numpy", "_nrt": False}
# Without what would make a function callable from Python.
PART = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
ENTRY = "gadei_ps_"


class _NotRun:
    """The part of Numba's code generator that a function needs to be run by itself."""

    def set_env(self, name: str, env: object) -> None:
        """Nothing: code that does not run reads no environment."""


class _Part(codegen.JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that does not run by itself, as its callers link it: as it is."""

    codegen = _NotRun()

    def finalize(self) -> None:
        self._raise_if_finalized()
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # Numba's word for a function that is not there


class _LoopPart(_Part):
    """The same, optimized: LLVM vectorizes a loop before it knows how often a caller runs it."""

    finalize = codegen.JITCodeLibrary.finalize

    def _finalize_final_module(self) -> None:
        self._finalized = True


class _PartCompiler(compiler.Compiler):  # type: ignore[misc]
    """Compiles a part."""

    library = _Part

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        super().__init__(typing, target, library or self.library(target.codegen(), "part"), *rest)


class _LoopPartCompiler(_PartCompiler):
    library = _LoopPart


class _Entry(CPUDispatcher):  # type: ignore[misc]
    """A function that Python calls. In compiled code that calls it, it is a part like others."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(function, targetoptions={"nopython": True, **options})
        self.part: Any = _part(function, options)
        self._cache = Quick(function)

    @property
    def _numba_type_(self) -> Any:
        return self.part._numba_type_


def _part(function: F, options: dict[str, Any]) -> F:
    how = _LoopPartCompiler if options.get("forceinline") else _PartCompiler
    made: F = numba.njit(pipeline_class=how, **options, **PART)(function)
    return made


def compiled(function: F, **more: Any) -> F:
    """Compiled to run without the GIL; the type checker sees the signature of the function.

    For what tests, and tools that measure, call from Python; Numba keeps the code on disk. more:
    options of `numba.njit`.
    """
    made: F = _Entry(function, HOW | more)
    return made


def inner(function: F) -> F:
    """Compiled as a part of other compiled code, which alone can call it."""
    return _part(function, HOW)


def viewing(function: F) -> F:
    """The same, for what returns an array: Numba wants counts of references there."""
    return _part(function, HOW | {"_nrt": True})


def inlined(function: F) -> F:
    """Compiled into each caller: for what runs once a chunk, where a call would be too slow."""
    return _part(function, HOW | {"forceinline": True})


class _Whole(codegen.JITCodeLibrary):  # type: ignore[misc]
    """All code of a unit. It is not loaded: LLVM is only asked for its object file.

    Others see the entry alone. Numba numbers the functions that a process compiles, so two
    processes may give one name to different code; what is hidden cannot be taken for another.
    """

    entry = ""

    def _optimize_final_module(self) -> None:
        module = self._final_module
        for one in (*module.functions, *module.global_variables):
            if not one.is_declaration and one.name != self.entry:
                one.linkage = "internal"
        super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def object(self) -> bytes:
        made: bytes = self.codegen._tm.emit_object(self._final_module)
        return made


def machine_code(name: str, signature: Any, function: Callable[..., Any]) -> Code:
    """The code of a unit, compiled: a C function, with all that it calls.

    name: the unit's. signature: Numba's, of numbers or void. Numba compiles a function's callees
    again as a part of it, and so on for each of its callers. What is called at its address is
    compiled once. If the code raises an error, the process ends at once: there is nobody to tell.
    """
    engine.symbols()
    made: Any = _part(function, HOW)
    made.compile(signature)
    typed = sigutils.normalize_signature(signature)[0]
    result = made.overloads[typed]
    whole = _Whole(result.target_context.codegen(), name)
    whole.entry = ENTRY + name.replace("-", "_")
    whole.add_ir_module(_entry(whole.entry, result.target_context, result.fndesc))
    whole.add_linking_library(result.library)
    with global_compiler_lock:
        whole.finalize()
        file = whole.object()
    return Code(whole.entry, tuple(sorted(elf.symbols(file).undefined)), file)


def _entry(name: str, context: Any, called: Any) -> ir.Module:
    """A C function that calls another one as Numba's functions call one another."""
    module = context.create_module(name)
    kind = context.call_conv.get_function_type(called.restype, called.argtypes)
    function = ir.Function(module, kind, called.llvm_func_name)
    given = [context.get_value_type(one) for one in called.argtypes]
    nothing = called.restype == types.none
    result = ir.VoidType() if nothing else context.get_value_type(called.restype)
    entry = ir.Function(module, ir.FunctionType(result, given), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    status, value = context.call_conv.call_function(
        builder, function, called.restype, called.argtypes, entry.args
    )
    with builder.if_then(status.is_error, likely=False):
        trap = module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), ()))
        builder.call(trap, ())
    if nothing:
        builder.ret_void()
    else:
        builder.ret(value)
    return module
