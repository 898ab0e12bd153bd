"""Hooks of ours in a torch module, which its copies and its files do not have.

torch.save(model) writes all that a module's attributes hold. With hooks as torch registers them,
the file would need gadei-ps where it is loaded, and torch.load with weights_only=True would refuse
it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

PRE, POST = "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"
"""Attributes in which torch keeps them, by the number of the handle that removes one."""


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
        """Return the hooks without those that were removed since, by handles that know the dict
        before."""
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
    before: Callable[..., None],
    after: Callable[..., None],
) -> Callable[[], None]:
    """Call before and after around each load_state_dict() of the module; return a function that
    ends this.

    before has the arguments of torch's register_load_state_dict_pre_hook, after those of its
    register_load_state_dict_post_hook.
    """
    kept = vars(module)  # setattr() of a compiled module sets those of the one within it
    for name in (PRE, POST):
        if isinstance(own := kept[name], Hooks):  # of an owner that did not end it
            own = own.before()
        kept[name] = Hooks(own, owner)
    handles = {
        PRE: module.register_load_state_dict_pre_hook(before),  # type: ignore[no-untyped-call]
        POST: module.register_load_state_dict_post_hook(after),  # type: ignore[no-untyped-call]
    }
    for name, handle in handles.items():
        kept[name].ours.add(handle.id)

    def end() -> None:
        for name in (PRE, POST):
            if isinstance(hooks := kept[name], Hooks):
                kept[name] = hooks.before()

    return end


def owner(module: torch.nn.Module) -> Any:
    """Return the owner of the hooks that the module has, or None."""
    hooks = vars(module).get(PRE)
    return hooks.owner() if isinstance(hooks, Hooks) and hooks.ours else None
