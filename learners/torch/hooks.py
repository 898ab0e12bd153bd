"""Hooks of ours: they keep no object alive, and a module's copies and files do not have them.

torch.save(model) writes all that a module's attributes hold. With hooks as torch registers them,
the file would need gadei-ps where it is loaded, and torch.load with weights_only=True would refuse
it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

PRE, POST = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
"""Attributes in which torch keeps them, by the number of the handle that removes one."""


OURS = "_gadei_ps_hook"
"""Attribute of the functions that weakly() returns."""


def weakly(method: Callable[..., None], *first: object) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives, without holding it.

    first: arguments before those of the call.

    For hooks of autograd, through which no collector finds a circle, and for the end of Python.
    """
    method_of = weakref.WeakMethod(method)

    def call(*arguments: object) -> None:
        if (bound := method_of()) is not None:
            bound(*first, *arguments)

    setattr(call, OURS, True)
    return call


def reads_gradient(parameter: torch.Tensor) -> bool:
    """Return whether hooks of the script, which it has registered, see the parameter's gradient."""
    registered = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(not hasattr(hook, OURS) for some in registered for hook in (some or {}).values())


class Hooks(OrderedDict[int, Any]):
    """A module's hooks of one kind, and ours. Copied and pickled, it is a dict of the module's own.

    owner: whose they are.
    """

    def __init__(self, own: OrderedDict[int, Any], owner: Callable[[], Any]) -> None:
        super().__init__(own)
        self.owner = owner
        self.ours: set[int] = set()
        self._own = own
        self._had = frozenset(own)

    def values(self) -> Any:
        """Return the hooks without those removed since, by handles that know the dict before."""
        self._own.values()  # which may be of this class
        for number in self._had - self._own.keys():
            self.pop(number, None)
        return super().values()

    def before(self) -> OrderedDict[int, Any]:
        """Return the dict before; or one without ours, if others were added, whose handles know
        this."""
        self.values()
        for number in self.ours:
            self.pop(number, None)
        self.ours.clear()
        return self._own if self.keys() == self._own.keys() else self

    def _items(self) -> Iterator[tuple[int, Any]]:
        self.values()
        return ((number, hook) for number, hook in self.items() if number not in self.ours)

    def __reduce__(self) -> tuple[Any, tuple[()], None, None, Iterable[tuple[int, Any]]]:
        return OrderedDict, (), None, None, self._items()


def add(
    module: torch.nn.Module,
    owner: Callable[[], Any],
    name: str,
    register: Callable[[], torch.utils.hooks.RemovableHandle],
) -> Callable[[], None]:
    """Register a hook that torch keeps in the attribute `name`; return a function that ends it."""
    kept = vars(module)  # setattr() of a compiled module sets those of the one within it
    if isinstance(own := kept[name], Hooks):  # of an owner that did not end it
        own = own.before()
    hooks = kept[name] = Hooks(own, owner)
    handle = register()
    hooks.ours.add(handle.id)

    def end() -> None:
        handle.remove()
        if kept[name] is hooks:
            kept[name] = hooks.before()

    return end


def owner(module: torch.nn.Module) -> Any:
    """Return the owner of the hooks that the module has, or None."""
    hooks = vars(module).get(PRE)
    return hooks.owner() if isinstance(hooks, Hooks) and hooks.ours else None
