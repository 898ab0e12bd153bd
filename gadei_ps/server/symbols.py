"""The C protocol as functions that compiled Python can call, and views of memory by address.

They are external symbols, not ctypes pointers: code that calls a symbol can be kept on disk, code
that holds a pointer of this process cannot. To the compiler each call is opaque, so it moves no
load or store of shared memory across one.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gadei_ps import _native

llvmlite.binding.load_library_permanently(_native.__file__)

_u64, _u32, _f64, _void = types.uint64, types.uint32, types.float64, types.void

get = types.ExternalFunction("ps_get", _u64(_u64))
put = types.ExternalFunction("ps_set", _void(_u64, _u64))
get32 = types.ExternalFunction("ps_get32", _u32(_u64))
put32 = types.ExternalFunction("ps_set32", _void(_u64, _u32))
fence = types.ExternalFunction("ps_full_fence", _void())
wake = types.ExternalFunction("ps_wake", _void(_u64))
bell = types.ExternalFunction("ps_bell", _void(_u64))
clock = types.ExternalFunction("ps_clock", _f64())
release = types.ExternalFunction("ps_release", _void(_u64, _u64, _u64))
hand_out = types.ExternalFunction("ps_hand_out", _void(_u64, _u64, _u64))
spin_once = types.ExternalFunction("ps_spin_once", _void())
spin_on = types.ExternalFunction("ps_spin_on", _void(_f64))
cpu_here = types.ExternalFunction("ps_cpu", _u32())
thread_id = types.ExternalFunction("ps_thread_id", _u32())
lease_take = types.ExternalFunction("ps_lease_take", types.int32(_u64, _u64))
wide_awake = types.ExternalFunction("ps_wide_awake", _void(_u64, _u64))
shard_sleep = types.ExternalFunction(
    "ps_shard_sleep", _void(_u64, _u64, _u64, _u64, _u64, _u32, _u64)
)


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    """An integer address as a void pointer."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), build


@intrinsic
def mark(context: Any, address: Any, value: Any) -> Any:
    """Stores as `put` does, but inlined, so that the loop around it is not slower.

    Stores before it are not moved after it. Stores after it are not moved before it in the order
    of this thread. That order is all that counts for the server that finds this memory after the
    thread has died, because a signal ends a thread between two instructions. So a fence for the
    compiler is enough. Between living threads the processor may still let a later store overtake
    this one (ARM does, x86 does not).
    """

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store_atomic(args[1], word, "release", 8)
        builder.fence("seq_cst", "singlethread")
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def call(context: Any, function: Any, *args: Any) -> Any:
    """Calls compiled code at its address, which differs from process to process."""
    given = types.StarArgTuple(args)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        words = cgutils.unpack_tuple(builder, args[1])
        kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), words)
        return context.get_dummy_value()

    return types.void(types.uint64, given), build


@njit(nogil=True, cache=True, inline="always")
def floats(address: int, count: int) -> Any:
    """`count` float32 values at an address."""
    return carray(_pointer(np.uint64(address)), (count,), np.float32)


@njit(nogil=True, cache=True, inline="always")
def doubles(address: int, count: int) -> Any:
    """`count` float64 values at an address."""
    return carray(_pointer(np.uint64(address)), (count,), np.float64)


@njit(nogil=True, cache=True, inline="always")
def halves(address: int, count: int) -> Any:
    """`count` 16-bit values at an address."""
    return carray(_pointer(np.uint64(address)), (count,), np.uint16)


@njit(nogil=True, cache=True, inline="always")
def words(address: int, count: int) -> Any:
    """`count` 64-bit words at an address."""
    return carray(_pointer(np.uint64(address)), (count,), np.uint64)


def structs(dtype: np.dtype[np.void], count: int = 1) -> Any:
    """A compiled function `view(address)`: `count` structs at an address as an array."""

    @njit(nogil=True, cache=True, inline="always")
    def view(address: int) -> Any:
        return carray(_pointer(np.uint64(address)), (count,), dtype)

    return view
