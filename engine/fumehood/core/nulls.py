"""Removing nulls that stand for omitted arguments, and finding schemas that accept null.

Strict modes of model providers force such nulls, and generated clients send them.
"""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.tool import MAX_SCHEMA_DEPTH, target_of

MAX_BRANCHES = 50
"""Maximum number of branches of a union in which the branch for a value is searched. In a larger
union, the value is passed on unchanged."""


def without_nulls(arguments: JsonObject, parameters: JsonObject) -> JsonObject:
    """Return a call's arguments without the nulls that stand for omitted arguments.

    `parameters` is the tool's parameter schema. A null is removed if its parameter is optional and
    does not accept null.
    """
    value: JsonObject = _cleaned(arguments, parameters, parameters, {})
    return value


def takes_null(
    schema: Any, root: JsonObject, known: dict[int, bool], hops: int = MAX_SCHEMA_DEPTH
) -> bool:
    """Return whether a schema accepts null. If this is unclear because of unknown keywords, return
    True.

    References are resolved within `root`. At most `hops` levels of nested branches are examined; a
    more deeply nested branch counts as accepting null. `known` caches the results by the schema's
    `id()`.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or hops == 0:
        return schema is not False
    # Branches may share subschemas or contain themselves.
    if id(schema) not in known:
        known[id(schema)] = False  # containing itself does not make a union accept null
        known[id(schema)] = _looks_null(schema, root, known, hops - 1)
    return known[id(schema)]


def _looks_null(schema: JsonObject, root: JsonObject, known: dict[int, bool], hops: int) -> bool:
    if "type" in schema and "null" not in listed_types(schema["type"]):
        return False
    if "enum" in schema and None not in schema["enum"]:
        return False
    if "const" in schema and schema["const"] is not None:
        return False
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if branches and not any(takes_null(branch, root, known, hops) for branch in branches):
            return False
    return all(takes_null(branch, root, known, hops) for branch in schema.get("allOf", ()))


def _cleaned(value: Any, schema: Any, root: JsonObject, known: dict[int, bool]) -> Any:
    """Return `value` without the nulls that stand for omitted properties. `schema` describes
    `value`.

    Nulls are removed at any depth. References are resolved within `root`. `known` is the cache of
    `takes_null`.
    """
    schema = _branch_for(value, schema, root)
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        items = schema.get("items")
        if items is None:
            return value
        return [_cleaned(item, items, root, known) for item in value]
    if not isinstance(value, dict):
        return value
    properties, required = schema.get("properties", {}), schema.get("required", ())
    rest = schema.get("additionalProperties")
    kept: JsonObject = {}
    for name, item in value.items():
        said = properties.get(name, rest)
        is_optional = name in properties and name not in required
        if item is None and is_optional and not takes_null(said, root, known):
            continue
        kept[name] = _cleaned(item, said, root, known)
    return kept


def _branch_for(value: Any, schema: Any, root: JsonObject) -> Any:
    """Choose the branch of a union that describes `value`, and return it with its references
    resolved.

    A branch is chosen if `value` is an object or array, and exactly one branch allows this type. If
    no branch can be chosen, return the schema itself, also with its references resolved. Return
    None if unions are nested too deeply. References are resolved within `root`.
    """
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = resolved(schema, root)
        if kind is None or not isinstance(schema, dict):
            return schema
        if schema.keys() & {"properties", "items"}:
            return schema
        branches = [b for key in ("anyOf", "oneOf", "allOf") for b in schema.get(key, ())]
        if len(branches) > MAX_BRANCHES:
            return schema
        alike = [b for b in branches if kind in kinds_of(resolved(b, root))]
        if len(alike) != 1:
            return schema
        schema = alike[0]
    return None


def resolved(schema: Any, root: JsonObject) -> Any:
    """Follow the references of `schema` within the document `root`, and return the schema at their
    end. If there are too many references, return True (anything is valid). A schema without a
    reference is returned unchanged.
    """
    for _ in range(MAX_SCHEMA_DEPTH):
        target = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(target, str):
            return schema
        schema = target_of(target, root)
    return True


def kinds_of(schema: Any) -> set[str]:
    """Return the JSON types that a schema names or, if it names none, the types that its keywords
    imply.
    """
    if not isinstance(schema, dict):
        return set()
    if "type" in schema:
        return listed_types(schema["type"])
    named = {"properties": "object", "items": "array"}
    return {kind for keyword, kind in named.items() if keyword in schema}


def listed_types(kind: Any) -> set[str]:
    """Return the types that the keyword `type` names. Its value `kind` is a type or a list of
    types.
    """
    return set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
