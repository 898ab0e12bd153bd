"""The C protocol as functions that compiled Python can call, and views of memory by address.

They are external symbols, not ctypes pointers: code that calls a symbol can be kept on disk, code
that holds a pointer of this process cannot. To the compiler each call is opaque, so it moves no
load or store of shared memory across one.
"""

from __future__ import annotations

import hashlib
import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from gadei_ps.kernels import engine

engine.symbols()

_WORD = ir.IntType(64)
_u64, _u32, _f64, _void = types.uint64, types.uint32, types.float64, types.void

get = types.ExternalFunction("ps_get", _u64(_u64))
put = types.ExternalFunction("ps_set", _void(_u64, _u64))
get32 = types.ExternalFunction("ps_get32", _u32(_u64))
put32 = types.ExternalFunction("ps_set32", _void(_u64, _u32))
fence = types.ExternalFunction("ps_full_fence", _void())
wake = types.ExternalFunction("ps_wake", _void(_u64))
bell = types.ExternalFunction("ps_bell", _void(_u64))
clock = types.ExternalFunction("ps_clock", _f64())
pass_on = types.ExternalFunction("ps_pass", _void(_u64, _u64, _u64))
release = types.ExternalFunction("ps_release", _void(_u64, _u64, _u64))
hand_out = types.ExternalFunction("ps_hand_out", _void(_u64, _u64, _u64))
spin_once = types.ExternalFunction("ps_spin_once", _void())
spin_on = types.ExternalFunction("ps_spin_on", _void(_f64))
cpu_here = types.ExternalFunction("ps_cpu", _u32())
thread_id = types.ExternalFunction("ps_thread_id", _u32())
lease_take = types.ExternalFunction("ps_lease_take", types.int32(_u64, _u64))
wide_awake = types.ExternalFunction("ps_wide_awake", _void(_u64, _u64))
shard_sleep = types.ExternalFunction(
    "ps_shard_sleep", _void(_u64, _u64, _u64, _u64, _u64, _u64, _u32, _u64)
)


@intrinsic
def mark(context: Any, address: Any, value: Any) -> Any:
    """Store as `put` does, but inlined, so that the loop around it is not slower.

    Stores before it are not moved after it. Stores after it are not moved before it in the order
    of this thread. That order is all that counts for the server that finds this memory after the
    thread has died, because a signal ends a thread between two instructions. So a fence for the
    compiler is enough. Between living threads the processor may still let a later store overtake
    this one (ARM does, x86 does not).
    """

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        word = builder.inttoptr(args[0], _WORD.as_pointer())
        builder.store_atomic(args[1], word, "release", 8)
        builder.fence("seq_cst", "singlethread")
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Have the processor fetch the cache line of an address, to be written soon. Never faults."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        # 1: for a write; 3: into all caches; 1: it is data.
        builder.call(fetch, [builder.inttoptr(args[0], pointer), number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.uint64), build


@intrinsic
def call(context: Any, function: Any, *args: Any) -> Any:
    """Call compiled code at its address, which differs from process to process."""
    given = types.StarArgTuple(args)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        words = [builder.extract_value(args[1], i) for i in range(len(given))]
        kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), words)
        return context.get_dummy_value()

    return types.void(types.uint64, given), build


def array_at(context: Any, builder: ir.IRBuilder, kind: types.Array, at: Any, count: Any) -> Any:
    """Build the header of an array of `count` items at an address. It has no owner."""
    item = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    size = context.get_constant(types.intp, item)
    array = context.make_array(kind)(context, builder)
    row = ir.Constant(ir.ArrayType(size.type, 1), ir.Undefined)
    array.data = builder.inttoptr(at, array.data.type)
    array.nitems, array.itemsize = count, size
    array.shape = builder.insert_value(row, count, 0)
    array.strides = builder.insert_value(row, size, 0)
    array.meminfo = ir.Constant(array.meminfo.type, None)
    array.parent = ir.Constant(array.parent.type, None)
    return array._getvalue()


def _view(dtype: types.Type) -> Any:
    """Make `view(address, count)` for compiled code: `count` items at an address as an array.

    An intrinsic costs nothing to compile where it is called.
    """
    kind = types.Array(dtype, 1, "C")

    @intrinsic
    def view(context: Any, address: Any, count: Any) -> Any:
        def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            return array_at(context, builder, kind, *args)

        return kind(types.uint64, types.intp), build

    return view


floats = _view(types.float32)
doubles = _view(types.float64)
halves = _view(types.uint16)
words = _view(types.uint64)


class _Structs(types.Type):  # type: ignore[misc]
    """Structs one after the other, of which compiled code holds the address alone.

    An array's header has seven words, which each call of Numba's copies, and each look into the
    array asks whether its index is negative: that took a third of the time to compile.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self.record = from_dtype(dtype)
        digest = hashlib.sha256(str(self.record).encode()).hexdigest()
        super().__init__(f"structs_{digest[:8]}")  # it becomes a part of long names


@register_model(_Structs)
class _Address(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _WORD)


@type_callable(operator.getitem)
def _item_type(context: Any) -> Any:
    return lambda array, index: array.record if isinstance(array, _Structs) else None


@lower_builtin(operator.getitem, _Structs, types.Integer)
def _item(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
    kind = context.get_value_type(signature.return_type)
    size = signature.return_type.size
    index = context.cast(builder, args[1], signature.args[1], types.intp)
    at = builder.add(args[0], builder.mul(index, _WORD(size)))
    return builder.inttoptr(at, kind)


def structs(dtype: np.dtype[np.void]) -> Any:
    """Make `view(address)` for compiled code: view(address)[i] is the i-th struct there."""
    kind = _Structs(dtype)

    @intrinsic
    def view(context: Any, address: Any) -> Any:
        return kind(types.uint64), lambda context, builder, signature, args: args[0]

    return view


@intrinsic
def address(context: Any, of: Any) -> Any:
    """Return the address of an array's first item, or of a view's."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if isinstance(of, _Structs):
            return args[0]
        return builder.ptrtoint(context.make_array(of)(context, builder, args[0]).data, _WORD)

    return types.uint64(of), build
