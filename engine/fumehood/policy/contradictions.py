"""Two conditions on one argument that no value satisfies.

Host side, asked by `policy_faults` and `policy_notices`. In doubt there is none: two that are told
apart here exclude each other for every value there is. What is in doubt (`policy_predicates`)
satisfies both for a rule that denies or asks, so such a rule can match all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fumehood.core.workspace_path import absolute_path
from fumehood.policy.decision import Verdict
from fumehood.policy.model import Condition, Predicate, Rule
from fumehood.policy.predicates import compile_predicate


def exclude(one: Condition, other: Condition, rule: Rule) -> bool:
    """Whether the rule is faulty for them: it can never hold, or was surely not meant."""
    if "*" in one.segments and rule.decision is not Verdict.ALLOW:
        return False  # different elements may be meant
    questions = one.question | other.question
    is_allow = rule.decision is Verdict.ALLOW
    if "missing" in questions:  # what is missing is in doubt for the others
        return is_allow and "not" not in questions and len(questions) == 2
    if is_allow:
        return no_value_satisfies(one, other)
    if questions <= {"equals", "in"} or questions == {"range"}:
        return no_value_satisfies(one, other)
    return False


def no_value_satisfies(one: Predicate, other: Predicate) -> bool:
    """Whether both can never be answered with yes of the same value."""
    return _apart(one, other) or _apart(other, one)


def _apart(one: Predicate, other: Predicate) -> bool:
    if one.question <= {"equals", "in"}:
        ask = compile_predicate(other)
        return not any(ask(value) for value in _wanted(one))
    if other.not_ is not None:
        return _is_part(one, other.not_)
    if one.question != other.question:
        return False
    (question,) = one.question
    if question == "range":
        return one.max is not None and other.min is not None and one.max < other.min
    if question in _BEGINNINGS:
        first, second = _BEGINNINGS[question](one), _BEGINNINGS[question](other)
        return not (_begins(first, second) or _begins(second, first))
    return False


def _is_part(one: Predicate, of: Predicate) -> bool:
    """Whether every value that satisfies `one` satisfies the other."""
    if one.question != of.question or one.not_ is not None:
        return False
    (question,) = one.question
    if question == "range":
        is_above = of.min is None or (one.min is not None and one.min >= of.min)
        is_below = of.max is None or (one.max is not None and one.max <= of.max)
        return is_above and is_below
    if question in _BEGINNINGS:
        return _begins(_BEGINNINGS[question](one), _BEGINNINGS[question](of))
    return question not in ("equals", "in", "missing") and _written(one) == _written(of)


def _begins(text: Sequence[str], with_: Sequence[str]) -> bool:
    return text[: len(with_)] == with_


_BEGINNINGS: dict[str, Callable[[Predicate], Sequence[str]]] = {
    "prefix": lambda predicate: predicate.prefix or "",
    "path_inside": lambda predicate: absolute_path(predicate.path_inside or "") or (),
}


def _wanted(predicate: Predicate) -> Sequence[Any]:
    return (predicate.equals,) if predicate.one_of is None else predicate.one_of


def _written(predicate: Predicate) -> str:
    said = predicate.model_dump(mode="json", exclude={"argument"}, exclude_unset=True)
    return json.dumps(said, sort_keys=True)


__all__ = ["exclude", "no_value_satisfies"]
