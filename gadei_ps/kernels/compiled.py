"""How the code of the shard threads is compiled: without the GIL, kept on disk, like NumPy.

Numba makes each function ready to run by itself: it optimizes it, with all that it calls, makes
machine code of it and wrappers by which Python can call it. Most functions here only become a part
of others, with which they are optimized again. Of these it makes nothing but LLVM's code as it
comes from the types, and what is run is optimized once, as a whole. Only loops over weights are
optimized before they become a part, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import codegen, compiler, sigutils
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher, cpu_target

from gadei_ps.kernels import cache  # sets where Numba keeps compiled code

F = TypeVar("F", bound=Callable[..., Any])

# Without counts of references: nothing here owns memory.
HOW = {"nogil": True, "error_model": "numpy", "_nrt": False}
# Without what would make a function callable from Python.
PART = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_made: list[object] = []


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
        if options["_nrt"]:
            self.enable_caching()
        else:
            self._cache = cache.Quick(function)

    @property
    def _numba_type_(self) -> Any:
        return self.part._numba_type_


def _part(function: F, options: dict[str, Any]) -> F:
    how = _LoopPartCompiler if options.get("forceinline") else _PartCompiler
    made: F = numba.njit(pipeline_class=how, **options, **PART)(function)
    return made


def compiled(function: F, **more: Any) -> F:
    """Compiled to run without the GIL; the type checker sees the signature of the function.

    For what Python calls; the compiled code is kept on disk. more: options of `numba.njit`.
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


def address_of(signature: Any, function: Callable[..., None]) -> int:
    """The address of the function, compiled as a C function; it is never freed.

    Numba compiles a function's callees again as a part of it, and so on for each of its callers.
    What is called at its address is compiled once.
    """
    options = {"error_model": "numpy", "_nrt": False}
    typed = sigutils.normalize_signature(signature)
    made: Any = CFunc(function, typed, locals={}, options=options)
    made._cache = cache.Quick(function)
    made.compile()
    _made.append(made)
    return int(made.address)


def is_kept(signature: Any, function: Callable[..., Any]) -> bool:
    """Whether the cache has files of the function's code. They may be damaged: none is loaded.

    signature: as it is compiled for.
    """
    try:
        kept = cache.Quick(getattr(function, "py_func", function))
        key = kept._index_key(signature, cpu_target.target_context.codegen())
        name = kept._cache_file._load_index().get(key)
        return name is not None and Path(kept._cache_file._data_path(name)).exists()
    except (OSError, RuntimeError):  # there is no directory that can be read and written
        return False
