"""List every fault in an untrusted JSON Schema before it is used.

Host side, used by `definitions`. Nothing is fetched; a keyword that would be ignored, or whose cost
is unbounded, is a fault. The full check takes half a millisecond, too long for ten thousand tools,
so common schemas take a fast path. Invariant: the fast path accepts only schemas that the full
check accepts, and leaves all others to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from referencing.exceptions import Unresolvable

from fumehood.core.json_types import JsonObject
from fumehood.registry.json_schema import MAX_SCHEMA_NODES, compile_pattern, resolver_of

MAX_SCHEMA_DEPTH = 32
DIALECTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "http://json-schema.org/draft-07/schema",
)
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LOCAL_REFERENCE = re.compile(r"#(/(\$defs|definitions|properties)/[^/]+)*\Z")
_NOT_OFFERED = {
    "dependencies": "draft 2020-12 calls it dependentRequired and dependentSchemas",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
}
"""Keywords that would be ignored, or whose cost is unbounded."""


def schema_faults(schema: JsonObject, where: str) -> list[str]:
    """Every fault in the schema; empty if it is sound."""
    if not _is_small(schema):
        return [f"{where}: over {MAX_SCHEMA_NODES} nodes or {MAX_SCHEMA_DEPTH} levels"]
    if is_surely_sound(schema):
        return []
    faults = []
    dialect = schema.get("$schema", DIALECTS[0])
    if not isinstance(dialect, str) or dialect.rstrip("#") not in DIALECTS:
        faults.append(f"{where}: $schema is neither draft 2020-12 nor draft 7")
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    for error in meta.iter_errors(schema):
        path = ".".join([where, *map(str, error.absolute_path)])
        faults.append(f"{path}: not a valid JSON Schema: {error.message[:200]}")
    faults += [fault for node, path in _walk(schema, where) for fault in _node_faults(node, path)]
    if not faults:
        faults += _unresolvable(schema, where)
    return faults


def _walk(node: Any, path: str) -> Iterator[tuple[Any, str]]:
    yield node, path
    if isinstance(node, dict):
        for key, child in node.items():
            yield from _walk(child, f"{path}.{key}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _walk(child, f"{path}.{index}")


def _is_small(schema: JsonObject) -> bool:
    level: list[Any] = [schema]
    nodes = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        nodes += len(level)
        if nodes > MAX_SCHEMA_NODES:
            return False
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return True
    return False


def _node_faults(node: Any, path: str) -> Iterator[str]:
    if not isinstance(node, dict):
        return
    for keyword in REFERENCES:
        target = node.get(keyword)
        if isinstance(target, str) and not _LOCAL_REFERENCE.match(target):
            allowed = "(#, #/$defs/…, #/properties/…)"
            yield f"{path}.{keyword}: only references inside this schema {allowed} are followed"
    for keyword, instead in _NOT_OFFERED.items():
        if keyword in node and not path.endswith(("properties", "$defs", "definitions")):
            yield f"{path}.{keyword}: is not supported; {instead}"
    if isinstance(node.get("$id"), str):
        yield f"{path}.$id: a tool's schema must not have an $id"
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("patternProperties"), dict):
        patterns += list(node["patternProperties"])
    for pattern in patterns:
        try:
            compile_pattern(pattern)
        except ValueError as error:
            yield f"{path}: the pattern {pattern[:60]!a} is {error}"


def _unresolvable(schema: JsonObject, where: str) -> Iterator[str]:
    resolver = resolver_of(schema)
    for node, path in _walk(schema, where):
        if not isinstance(node, dict):
            continue
        for keyword in REFERENCES:
            if isinstance(node.get(keyword), str):
                try:
                    resolver.lookup(node[keyword])
                except (Unresolvable, ValueError):
                    yield f"{path}.{keyword}: has no target"


# -- the fast path for common schemas ------------------------------------------------------


_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}


def is_surely_sound(schema: Any) -> bool:
    """Whether a schema of bounded depth is certainly sound. False leaves it to the full check."""
    return isinstance(schema, dict) and all(
        keyword in _CHECKS and _CHECKS[keyword](said) for keyword, said in schema.items()
    )


def _is_text(said: Any) -> bool:
    return isinstance(said, str)


def _is_bool(said: Any) -> bool:
    return isinstance(said, bool)


def _is_type(said: Any) -> bool:
    if isinstance(said, list):
        return bool(said) and _are_names(said) and _TYPES.issuperset(said)
    return isinstance(said, str) and said in _TYPES


def _is_number(said: Any) -> bool:
    return isinstance(said, int | float) and not isinstance(said, bool)


def _is_count(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and said >= 0


def _is_scalar(said: Any) -> bool:
    # An object or array could contain something the full check looks for, such as a reference.
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
