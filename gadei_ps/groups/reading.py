"""Rules of exchange by name, from text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from gadei_ps.groups.outer import Outer
from gadei_ps.groups.rules import Mix, Replace, Rule
from gadei_ps.sync.parameters import SpecError, converted, short_repr, split

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
    error, keys = partial(_error, rule), list(rule.parameters)
    given = split(re.split("[:,]", rest), keys, error, len(keys)) if colon else {}
    make: Callable[..., Rule] = rule
    return make(**converted(rule.parameters, given, error))


def _error(rule: type[Rule], what: str) -> SpecError:
    return SpecError(f"{rule.name}: {what}; allowed: {' or '.join(rule.forms)}")
