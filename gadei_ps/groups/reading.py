"""Rules of exchange by name, from text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from gadei_ps.groups.outer import Outer
from gadei_ps.groups.rules import Mix, Replace, Rule
from gadei_ps.sync.parameters import SpecError, converted, short_repr

_RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Replace, Mix, Outer)}


def parse(text: str) -> Rule:
    """Make a rule from text: `replace`, `mix:0.5`, `outer:0.7:0.9`, `outer:rate=0.7,delay=4`.

    Values may stand without their keys, in the order of the rule's parameters. Raises SpecError, in
    one line that names the bad parameter and the allowed forms.
    """
    name, colon, rest = text.strip().partition(":")
    rule = _RULES.get(name)
    if rule is None:
        forms = ", ".join(one.forms[0] for one in _RULES.values())
        raise SpecError(f"unknown rule {short_repr(name)}; write one of {forms}")
    given: dict[str, str] = {}
    keys = list(rule.parameters)
    for place, item in enumerate(re.split("[:,]", rest) if colon else []):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            if not key or place >= len(keys) or place != len(given):
                raise _error(rule, f"cannot read {short_repr(item)}")
            key, value = keys[place], key
        if key not in rule.parameters:
            raise _error(rule, f"unknown parameter {short_repr(key)}")
        if key in given:
            raise _error(rule, f"{key} is given twice")
        given[key] = value
    make: Callable[..., Rule] = rule
    return make(**converted(rule.parameters, given, partial(_error, rule)))


def _error(rule: type[Rule], what: str) -> SpecError:
    return SpecError(f"{rule.name}: {what}; allowed: {' or '.join(rule.forms)}")
