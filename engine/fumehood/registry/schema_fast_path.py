"""A quick yes for the commonest sound schemas: what the meta-schema would say at length.

Host side, asked by `schema_faults` before the full check, which takes half a millisecond a
schema: too much where ten thousand tools are read. Invariant: it says yes only to what the
full check would accept; everything else, right or wrong, is the full check's to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fumehood.registry.json_schema import compile_pattern

_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


def is_surely_sound(schema: Any) -> bool:
    """Whether a schema of bounded depth is sound beyond doubt."""
    return isinstance(schema, dict) and all(
        keyword in _CHECKS and _CHECKS[keyword](said) for keyword, said in schema.items()
    )


def _is_text(said: Any) -> bool:
    return isinstance(said, str)


def _is_bool(said: Any) -> bool:
    return isinstance(said, bool)


def _is_type(said: Any) -> bool:
    return isinstance(said, str) and said in _TYPES


def _is_number(said: Any) -> bool:
    return isinstance(said, int | float) and not isinstance(said, bool)


def _is_count(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and said >= 0


def _is_scalar(said: Any) -> bool:
    # What has parts could hold what the full check looks for, a reference for example.
    return said is None or isinstance(said, str | bool | int | float)


def _are_scalars(said: Any) -> bool:
    return isinstance(said, list) and all(map(_is_scalar, said))


def _are_names(said: Any) -> bool:
    return isinstance(said, list) and all(map(_is_text, said)) and len(set(said)) == len(said)


def _are_sound(said: Any) -> bool:
    return isinstance(said, dict) and all(map(is_surely_sound, said.values()))


def _is_pattern(said: Any) -> bool:
    if not isinstance(said, str):
        return False
    try:
        compile_pattern(said)
    except ValueError:
        return False
    return True


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "title": _is_text,
    "description": _is_text,
    "$comment": _is_text,
    "format": _is_text,
    "deprecated": _is_bool,
    "default": _is_scalar,
    "const": _is_scalar,
    "enum": _are_scalars,
    "examples": _are_scalars,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_number,
    "exclusiveMaximum": _is_number,
    "minLength": _is_count,
    "maxLength": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "uniqueItems": _is_bool,
    "pattern": _is_pattern,
    "required": _are_names,
    "properties": _are_sound,
    "items": is_surely_sound,
    "additionalProperties": lambda said: isinstance(said, bool) or is_surely_sound(said),
}
