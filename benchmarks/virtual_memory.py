"""Counts the memory that each stage of a virtual worker holds, while it trains."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

THREADS = "gadei-stage-"


class Meter(TorchDispatchMode):
    """Bytes of all storages that a thread's operations have read or made, and that still exist.

    A storage counts once, from then until it is freed, whichever thread frees it. So what two
    stages use counts for both.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._lock = threading.RLock()  # freeing may interrupt this very thread

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for each operation, forward and backward."""
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, found)):
            if isinstance(one, torch.Tensor):
                self._add(one.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        with self._lock:
            known = self._known.get(key)
            if known is not None and known() is storage:
                return

            def freed(ref: object) -> None:
                with self._lock:
                    self._now -= size
                    if self._known.get(key) is ref:
                        del self._known[key]

            self._known[key] = weakref.ref(storage, freed)
            self._now += size
            self.peak = max(self.peak, self._now)


class Meters:
    """One for each stage, by its number."""

    def __init__(self) -> None:
        self.of: dict[int, Meter] = defaultdict(Meter)
        self._entered = threading.local()

    def watch(self, layers: Iterable[nn.Module]) -> None:
        """Count the stages that compute these layers, each from its first forward pass on."""
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self._count())

    def _count(self) -> None:
        name = threading.current_thread().name
        if name.startswith(THREADS) and not hasattr(self._entered, "meter"):
            self._entered.meter = self.of[int(name.removeprefix(THREADS))]
            self._entered.meter.__enter__()  # until the thread ends: backward passes count too
