"""Guards of mappings (native/ps_guard.h), each of which ends with its own mapping.

The native table knows a guard by its address. But an address can be used again before a guard is
ended: Python unmaps without the interpreter's lock, and notifies weak references only afterwards.
So this module keeps the guards of this process too, and the end of an old one leaves a new one
alone.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from dataclasses import dataclass

from gadei_ps import _native

_guards: dict[int, _Guard] = {}
"""Guards by the address of their mapping."""
_turn = threading.RLock()  # the garbage collector may end a guard in the middle of a call


@dataclass(eq=False)
class _Guard:
    mapping: weakref.ref[mmap.mmap]
    address: int
    size: int
    word: int
    value: int
    owner: object

    def begin(self) -> None:
        with _turn:
            old = _guards.pop(self.address, None)
            if old is not None:
                _native.unguard(self.address)
            _native.guard(self.address, self.size, self.word, self.value)
            _guards[self.address] = self

    def end(self) -> None:
        """Nothing happens if that has been done, or if another mapping is at this address now."""
        with _turn:
            if _guards.get(self.address) is self:
                del _guards[self.address]
                _native.unguard(self.address)


def guard(memory: mmap.mmap, word: int, value: int, owner: object) -> None:
    """Store `value` (64 bits) at the address `word` if the memory of this mapping is lost.

    owner: whose memory the word is; it lives as long as the guard. Raises OSError.
    """
    made = _Guard(weakref.ref(memory), _native.address(memory), len(memory), word, value, owner)
    made.begin()
    weakref.finalize(memory, made.end).atexit = False


def close(memory: mmap.mmap) -> None:
    """Unmap it now, and end its guard before. Nothing happens if an array of it is left."""
    one = next((one for one in list(_guards.values()) if one.mapping() is memory), None)
    if one is not None:
        one.end()
    try:
        memory.close()
    except BufferError:
        if one is not None:
            one.begin()
