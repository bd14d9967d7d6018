"""A quick yes for the commonest schema: an object of a few plain parameters.

Host side, asked before `json_schema`, which costs a call some twenty microseconds even
where there is nothing to object to. Invariant: it says yes only to what the validator would
accept; everything else, right or wrong, is the validator's to judge and to explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fumehood.core.json_types import JsonObject

Acceptor = Callable[[Any], bool]

_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OBJECT_KEYWORDS = {"type", "properties", "required", "additionalProperties"} | _SAYS_NOTHING
_BOUNDS = {
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum"},
    "number": {"minimum", "maximum"},
    "boolean": set[str](),
}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def plain_acceptor(schema: JsonObject) -> Acceptor | None:
    """A function that says yes to what is surely valid; None where the schema says more."""
    properties = schema.get("properties", {})
    if (
        schema.get("type") != "object"
        or not schema.keys() <= _OBJECT_KEYWORDS
        or not isinstance(schema.get("additionalProperties", True), bool)
        or not isinstance(properties, dict)
    ):
        return None
    acceptors = {name: _property_acceptor(said) for name, said in properties.items()}
    if None in acceptors.values():
        return None
    required = frozenset(schema.get("required", ()))
    is_open = schema.get("additionalProperties", True)

    def accepts(document: Any) -> bool:
        if type(document) is not dict or not required <= document.keys():
            return False
        for name, value in document.items():
            accepts_value = acceptors.get(name)
            if accepts_value is None:
                if not is_open:
                    return False
            elif not accepts_value(value):
                return False
        return True

    return accepts


def _property_acceptor(schema: Any) -> Acceptor | None:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        return None
    if not schema.keys() <= {"type"} | _BOUNDS[kind] | _SAYS_NOTHING:
        return None
    # Exactly these types: a bool is no number here, and 3.0 is left to the validator.
    types = _TYPES[kind]
    measured = {"string": ("minLength", "maxLength")}.get(kind, ("minimum", "maximum"))
    low, high = (schema.get(bound) for bound in measured)
    measure: Callable[[Any], Any] = len if kind == "string" else _itself

    def accepts(value: Any) -> bool:
        if type(value) not in types:
            return False
        size = measure(value)
        return (low is None or size >= low) and (high is None or size <= high)

    return accepts


def _itself(value: Any) -> Any:
    return value
