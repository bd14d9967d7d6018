"""What a condition can answer for the calls of one tool, as far as the tool's schema says.

Host side, asked by `policy_faults` and `policy_notices`. The rules see arguments that the schema
has let pass, so what it refuses no condition ever sees. Invariant: every answer that a call can get
is among those told; where a schema says more than is read here (unions, references, further
properties), all of them are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from fumehood.core.tool import ToolDefinition
from fumehood.policy.model import Condition, Predicate
from fumehood.policy.predicates import Answer, compile_predicate, kind_of

Answers = frozenset[Answer]
ANY: Answers = frozenset({True, False, None})

MAX_LISTED = 1_000
"""Values of one `enum` that are tried."""

_TEXT_QUESTIONS = frozenset({"prefix", "glob", "path_inside", "host_in"})
_READ_OTHERWISE = frozenset({"path_inside", "host_in"})
"""Questions that not every text has an answer to."""

_NOT_PLAIN = frozenset({
    "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
    "patternProperties", "additionalProperties", "prefixItems", "dependentSchemas",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """What a tool takes where a pointer leads."""

    schema: Mapping[str, Any] | None
    """None: nothing, the tool has no such parameter."""
    may_be_absent: bool


def answers_of(condition: Condition, tool: ToolDefinition) -> Answers:
    """Those that a call of this tool can get, and perhaps more."""
    place = place_of(tool, condition.segments)
    if place is None or "missing" in _innermost(condition).question:
        return ANY
    if place.schema is None:
        return frozenset({None})
    found = _of_value(condition, place.schema)
    return found | {None} if place.may_be_absent else found


def place_of(tool: ToolDefinition, segments: Sequence[str]) -> Place | None:
    """What the tool's parameters say of the place; None where that cannot be read off."""
    schema: Any = tool.parameters
    is_root, may_be_absent = True, False
    for segment in segments:
        if not isinstance(schema, Mapping) or not is_plain(schema):
            return None
        kind, properties = schema.get("type"), schema.get("properties", {})
        if segment != "*" and (is_root or kind == "object") and segment in properties:
            below = properties[segment]
            is_filled_in = is_root and isinstance(below, Mapping) and "default" in below
            may_be_absent |= segment not in schema.get("required", ()) and not is_filled_in
            schema = below
        elif kind == "array" and "items" in schema and (segment == "*" or segment.isdigit()):
            schema, may_be_absent = schema["items"], True
        else:
            # Further down, what is not named may be there all the same.
            is_nothing = is_root and segment != "*"
            return Place(None, may_be_absent=True) if is_nothing else None
        is_root = False
    if not isinstance(schema, Mapping) or not is_plain(schema):
        return None
    return Place(schema, may_be_absent)


def is_plain(schema: Mapping[str, Any]) -> bool:
    """Whether what it takes can be read off: keywords that say more are not followed."""
    return all(schema.get(key) is False for key in _NOT_PLAIN & schema.keys())


def takes_in_words(schema: Mapping[str, Any]) -> str:
    """What a plain schema takes."""
    listed = _listed(schema)
    if listed is not None:
        shown = ", ".join(ascii(value)[:40] for value in listed[:10])
        return f"one of {shown}{', …' if len(listed) > 10 else ''}"
    kinds = schema.get("type")
    names = " or ".join([kinds] if isinstance(kinds, str) else kinds or ["anything"])
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = [f"from {low}"] if low is not None else []
    bounds += [f"up to {high}"] if high is not None else []
    return " ".join([names, *bounds])


def _of_value(predicate: Predicate, schema: Mapping[str, Any]) -> Answers:
    """What it can answer of a value that is there."""
    listed = _listed(schema)
    if listed is not None:
        return frozenset(map(compile_predicate(predicate), listed))
    if predicate.not_ is not None:
        inner = _of_value(predicate.not_, schema)
        return frozenset(None if answer is None else not answer for answer in inner)
    kinds, wanted = _kinds(schema), _wanted_kinds(predicate)
    if kinds is None:
        return ANY
    found: set[Answer] = {None} if kinds - wanted else set()
    if kinds & wanted:
        found |= _of_kind(predicate, kinds, schema)
    return frozenset(found)


def _of_kind(
    predicate: Predicate, kinds: frozenset[str], schema: Mapping[str, Any]
) -> frozenset[Answer]:
    """What it can answer of a value of a kind that it is about."""
    (question,) = predicate.question
    if question in _READ_OTHERWISE:
        return ANY
    if question == "range":
        return _of_range(predicate, schema)
    if question in ("equals", "in"):
        fits = any(kind_of(v) in kinds and _is_within(v, schema) for v in _wanted(predicate))
        return frozenset({True, False}) if fits else frozenset({False})
    return frozenset({True, False})


def _of_range(predicate: Predicate, schema: Mapping[str, Any]) -> frozenset[Answer]:
    low, high = _bounds(schema)
    least = predicate.min if predicate.min is not None else -inf
    most = predicate.max if predicate.max is not None else inf
    found: set[Answer] = set()
    if least <= high and low <= most:
        found.add(True)
    if not (least <= low and high <= most):
        found.add(False)
    return frozenset(found) or ANY


def _is_within(value: Any, schema: Mapping[str, Any]) -> bool:
    if kind_of(value) != "number":
        return True
    low, high = _bounds(schema)
    return bool(low <= value <= high)


def _bounds(schema: Mapping[str, Any]) -> tuple[float, float]:
    """Both ends taken as included: at worst one number too many."""
    low = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    high = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    return (
        max((bound for bound in low if kind_of(bound) == "number"), default=-inf),
        min((bound for bound in high if kind_of(bound) == "number"), default=inf),
    )


def _kinds(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The kinds of value that it takes, as the predicates name them; None: not said."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        return None
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _wanted_kinds(predicate: Predicate) -> frozenset[str]:
    (question,) = predicate.question
    if question in _TEXT_QUESTIONS:
        return frozenset({"string"})
    return (
        frozenset({"number"})
        if question == "range"
        else frozenset(map(kind_of, _wanted(predicate)))
    )


def _wanted(predicate: Predicate) -> Sequence[Any]:
    return (predicate.equals,) if predicate.one_of is None else predicate.one_of


def _listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """The values that it takes, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) and len(listed) <= MAX_LISTED else None


def _innermost(predicate: Predicate) -> Predicate:
    return predicate.not_ if predicate.not_ is not None else predicate


__all__ = ["ANY", "Place", "answers_of", "is_plain", "place_of", "takes_in_words"]
