"""The colours of plots: each contender has its own, the same in every plot."""

from __future__ import annotations

from collections.abc import Iterable

SYNC = {
    "asp": "tab:blue",
    "bsp": "tab:green",
    "ssp": "tab:orange",
    "elastic-bsp": "tab:purple",
    "cutoff:by=order": "tab:brown",
    "cutoff:by=sampled": "tab:cyan",
    "cutoff": "tab:olive",
    "wsp": "tab:pink",
}
"""Colours by synchronization model, with or without its parameters."""
_FURTHER = (
    "tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive",
    "tab:cyan", "tab:gray", "navy", "goldenrod", "darkgreen", "violet", "peru", "teal", "slategray",
    "yellowgreen", "skyblue", "indigo", "black",
)  # fmt: skip
"""No red: that is for gadei-ps beside other programs."""


def colours(names: Iterable[str], fixed: dict[str, str] = SYNC) -> dict[str, str]:
    """Return a colour for each name of one plot; no two names share one.

    A name has its colour in `fixed`, or that of the part before its parameters. If another name of
    this plot has that one, or there is none, it takes the next that is free. With more names than
    colours, colours repeat.
    """
    found: dict[str, str] = {}
    for name in names:
        own = fixed.get(name) or fixed.get(name.partition(":")[0])
        if own is None or own in found.values():
            taken = {*found.values(), *fixed.values()}
            free = [one for one in _FURTHER if one not in taken]
            free = free or [one for one in _FURTHER if one not in found.values()]
            own = free[0] if free else _FURTHER[len(found) % len(_FURTHER)]
        found[name] = own
    return found
