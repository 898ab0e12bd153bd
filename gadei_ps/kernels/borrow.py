"""Arrays without an owner, for compiled loops that are too short for reference counts.

Numba counts references to an array's owner atomically around each slice and each call that it does
not see through. For 1024 values that took as long as the arithmetic (60 ns of 130).
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar, cast

from llvmlite import ir
from numba.extending import intrinsic

A = TypeVar("A")


class Borrow(Protocol):
    """See `borrow`."""

    def __call__(self, array: A, /) -> A:
        """Return the same array without its owner."""
        ...


@intrinsic
def _without_owner(context: Any, array: Any) -> tuple[Any, Any]:
    """Copy the array's header, not its values, and leave the owner out of it."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        header = context.make_array(array)(context, builder, args[0])
        header.meminfo = ir.Constant(header.meminfo.type, None)
        header.parent = ir.Constant(header.parent.type, None)
        return header._getvalue()

    return array(array), build


borrow = cast(Borrow, _without_owner)
"""Return the same array without its owner: neither it nor a slice of it is counted.

Only in compiled code, and only for an argument: the caller keeps that alive until the call is over.
Neither the result nor a slice of it may be returned or stored.
"""
