"""What is wrong with the shape of a rule, in the words of whoever writes policies.

Host side, asked by `policy_file` and by the command line. Pydantic's own words are about Python's
types; here stands what has to be written instead. Words only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic_core import ErrorDetails

from fumehood.core.names import suggestion

Context = Mapping[str, Any]

MONEY = 'is no amount; write money as a string, such as "0.10"'
_PLAIN: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "decimal_parsing": MONEY,
    "decimal_type": MONEY,
    "dict_type": "must be a table",
    "finite_number": MONEY,
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "invalid-json-value": "can be no JSON value",
    "invalid_key": "its keys must be texts",
    "missing": "is missing",
    "model_type": "must be a table",
    "string_pattern_mismatch": "begins with a letter or digit, has only letters, digits and _ . - "
    "and at most 64 of them",
    "string_too_short": "must not be empty",
    "string_type": "must be a text",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
}
_OF_CONTEXT: Mapping[str, Callable[[Context], str]] = {
    "decimal_max_digits": lambda given: f"has more than {given['max_digits']} digits",
    "decimal_max_places": lambda given: f"has more than {given['decimal_places']} decimal places",
    "decimal_whole_digits": lambda given: f"has more than {given['whole_digits']} whole digits",
    "enum": lambda given: f"must be {given['expected']}",
    "greater_than_equal": lambda given: f"must be {given['ge']} or more",
    "less_than_equal": lambda given: f"must be {given['le']} or less",
    "literal_error": lambda given: _only(given["expected"]),
    "string_too_long": lambda given: f"has more than {given['max_length']} characters",
    "too_long": lambda given: f"has more than {given['max_length']} entries",
}


def plain_words(fault: ErrorDetails, known_keys: Collection[str]) -> str:
    """What must stand there instead; `known_keys` are those that a misspelt one may mean."""
    kind, place = fault["type"], fault["loc"]
    if kind == "extra_forbidden":
        return f"unknown key{suggestion(str(place[-1]), known_keys)}"
    if kind in _PLAIN:
        words = _PLAIN[kind]
    elif kind in _OF_CONTEXT:
        words = _OF_CONTEXT[kind](fault.get("ctx", {}))
    else:
        return fault["msg"].removeprefix("Value error, ")
    is_entry = bool(place) and isinstance(place[-1], int)
    return f"entry {place[-1] + 1} {words}" if is_entry else words  # type: ignore[operator]


def _only(expected: str) -> str:
    if expected == "True":
        return "can only be true; leave the key out instead"
    return f"must be {expected}"


__all__ = ["plain_words"]
