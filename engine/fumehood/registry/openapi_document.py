"""Read an OpenAPI document, follow its references, and convert its schemas to JSON Schema.

Host side, below `openapi`, which makes definitions of its operations. The document is hostile.
Invariants: a reference leads to another part of the same document, or is refused; schemas are
expanded within bounds, and texts lose invisible characters.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.tool import MAX_SCHEMA_DEPTH
from fumehood.protocol import strict_json
from fumehood.protocol.files import FileFault, read_values
from fumehood.registry.json_schema import MAX_SCHEMA_NODES, compile_pattern

MAX_DOCUMENT_BYTES = 16 << 20
"""Bytes of one OpenAPI document."""

MAX_DESCRIPTION = 500
"""Characters of a parameter's description. Longer ones are cut."""

_COPIED = frozenset(
    {
        "type", "enum", "const", "format", "default", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern", "minItems",
        "maxItems", "uniqueItems", "minProperties", "maxProperties", "required", "deprecated",
    }
)  # fmt: skip
_WITH_SCHEMA = frozenset({"items", "not", "additionalProperties", "contains"})
_WITH_SCHEMAS = frozenset({"anyOf", "oneOf", "prefixItems"})
_IGNORED = frozenset(
    {
        "title", "example", "examples", "xml", "externalDocs", "discriminator", "readOnly",
        "writeOnly", "nullable", "$comment", "$defs", "contentEncoding", "contentMediaType",
        "contentSchema",
    }
)  # fmt: skip
"""Keywords that are dropped silently, because they do not constrain arguments. Dropping any other
unsupported keyword is reported in a note."""

_STRUCTURE = _WITH_SCHEMAS | {"properties"}


class CannotImport(Exception):
    """The document, or one operation, cannot be imported. The message is for the operator."""


def read_document(name: str, data: bytes) -> Any:
    """Parse JSON or YAML. The name's suffix decides which, or else the first character.

    Raises:
        CannotImport: the data is too large, or is not valid in that format.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CannotImport(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MB")
    is_yaml = name.endswith((".yaml", ".yml"))
    is_yaml |= not name.endswith(".json") and not data.lstrip().startswith(b"{")
    try:
        if is_yaml:
            return read_values("openapi.yaml", data, number_keys=True)
        return strict_json.loads(data)
    except (FileFault, strict_json.StrictJsonError) as error:
        raise CannotImport(str(error)) from None


class OpenApiDocument:
    """An OpenAPI document of version 3.0 or 3.1, with its internal references.

    Raises:
        CannotImport: the document is not OpenAPI 3.0 or 3.1. Methods raise it if a reference leads
            nowhere.
    """

    def __init__(self, document: Any) -> None:
        if not isinstance(document, dict):
            raise CannotImport("it is not an OpenAPI document: not an object")
        if "swagger" in document:
            raise CannotImport(
                "it is Swagger 2.0, which is not supported; convert it to OpenAPI 3 first"
            )
        version = str(document.get("openapi"))
        if not re.fullmatch(r"3\.[01](\.[0-9]{1,3})?", version):
            raise CannotImport("it is not a document of OpenAPI 3.0 or 3.1")
        self.document: JsonObject = document
        self.is_3_0 = version.startswith("3.0")

    def target(self, reference: str) -> Any:
        """Return the target of a reference within the document."""
        if not reference.startswith("#/"):
            raise CannotImport(f"{reference[:80]!a} refers to another document, which is not read")
        found: Any = self.document
        for step in reference[2:].split("/"):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and len(key) < 6:
                found = dict(enumerate(found)).get(int(key))
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise CannotImport(f"{reference[:80]!a} refers to nothing")
        return found

    def resolved(self, node: Any, kind: str) -> JsonObject:
        """Return `node` or, if it is a reference, the object that it leads to. `kind` names it in
        errors.
        """
        for _ in range(MAX_SCHEMA_DEPTH):
            if not isinstance(node, dict):
                raise CannotImport(f"{kind} is not an object")
            if not isinstance(node.get("$ref"), str):
                return node
            node = self.target(node["$ref"])
        raise CannotImport(f"{kind} refers in a circle")

    def table(self, *keys: str) -> JsonObject:
        """Return the object at these keys in the document, or an empty one."""
        found: Any = self.document
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


class Schemas:
    """Converts the schemas of one operation to JSON Schema without references."""

    def __init__(self, root: OpenApiDocument) -> None:
        self._root = root
        self._left = MAX_SCHEMA_NODES
        self.notes: list[str] = []

    def converted(self, node: Any, trail: tuple[str, ...] = ()) -> JsonObject:
        """Return the converted schema.

        `trail` has an entry for each level above it: the reference that was followed, or "".
        """
        self._left -= 1 + (len(node) if isinstance(node, dict) else 0)
        if self._left < 0:
            raise CannotImport(f"its schemas have more than {MAX_SCHEMA_NODES} parts")
        if len(trail) > MAX_SCHEMA_DEPTH:
            raise CannotImport(f"its schemas are nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        if not isinstance(node, dict):
            raise CannotImport("a schema is not an object")
        reference = node.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference, node, trail)
        return self._nullable(self._merged(self._keywords(node, trail), node, trail), node)

    def _referred(self, reference: str, node: JsonObject, trail: tuple[str, ...]) -> JsonObject:
        target = self._root.target(reference)
        if reference in trail:
            self.notes.append(f"the schema {reference[:80]!a} contains itself; it is cut there")
            kind = target.get("type") if isinstance(target, dict) else None
            return {"type": kind} if isinstance(kind, str) else {}
        schema = self.converted(target, (*trail, reference))
        if self._root.is_3_0:
            return schema  # OpenAPI 3.0 ignores keywords next to a reference
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return {**schema, **self._keywords(beside, trail)}

    def _keywords(self, node: JsonObject, trail: tuple[str, ...]) -> JsonObject:
        schema: JsonObject = {}
        below = (*trail, "")
        for key, value in node.items():
            if key in _COPIED:
                schema[key] = value
            elif key == "description":
                schema[key] = clean(value, MAX_DESCRIPTION)
            elif key in _WITH_SCHEMA:
                is_plain = isinstance(value, bool) and key == "additionalProperties"
                schema[key] = value if is_plain else self.converted(value, below)
            elif key in _WITH_SCHEMAS and isinstance(value, list):
                schema[key] = [self.converted(part, below) for part in value]
            elif key == "properties" and isinstance(value, dict):
                schema[key] = {
                    name: self.converted(part, below)
                    for name, part in value.items()
                    if not (isinstance(part, dict) and part.get("readOnly") is True)
                }
            elif key in _STRUCTURE:
                raise CannotImport(f"a schema's {key!a} is of a wrong type")
            elif key != "allOf" and key not in _IGNORED and not key.startswith("x-"):
                self.notes.append(f"without the keyword {key[:40]!a}: it is not supported")
        self._mend(schema, node)
        return schema

    def _mend(self, schema: JsonObject, node: JsonObject) -> None:
        """Adapt keywords that JSON Schema writes in another form, and drop unsupported patterns."""
        for bound in ("minimum", "maximum"):
            exclusive = f"exclusive{bound.title()}"
            is_bool = isinstance(schema.get(exclusive), bool)  # so in OpenAPI 3.0
            if is_bool and schema.pop(exclusive) and bound in schema:
                schema[exclusive] = schema.pop(bound)
        if schema.get("default", 0) is None:
            del schema["default"]
        if "required" in schema:
            declared, kept = node.get("properties", {}), schema.get("properties", {})
            names = texts(schema["required"])
            schema["required"] = [x for x in names if x in kept or x not in declared]
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            try:
                compile_pattern(pattern)
            except ValueError:
                del schema["pattern"]
                self.notes.append(f"without the pattern {pattern[:60]!a}: it is not supported")

    def _merged(self, schema: JsonObject, node: JsonObject, trail: tuple[str, ...]) -> JsonObject:
        """Return the schema with the parts of its `allOf`, merged into it if that is simple."""
        given = node.get("allOf")
        if not isinstance(given, list):
            return schema
        parts = [self.converted(part, (*trail, "")) for part in given]
        merged = schema
        for part in parts:
            together = _both(merged, part)
            if together is None:
                return {**schema, "allOf": parts}
            merged = together
        return merged

    def _nullable(self, schema: JsonObject, node: JsonObject) -> JsonObject:
        if not self._root.is_3_0 or node.get("nullable") is not True or not schema:
            return schema
        if not isinstance(schema.get("type"), str):
            return {"anyOf": [schema, {"type": "null"}]}
        enum = schema.get("enum")
        more = {"enum": [*enum, None]} if isinstance(enum, list) and None not in enum else {}
        return {**schema, "type": [schema["type"], "null"], **more}


def _both(one: JsonObject, other: JsonObject) -> JsonObject | None:
    """Return one schema equivalent to both together, or None if merging them is not simple."""
    both_have = "properties" in one and "properties" in other
    if both_have and any(
        part.get("additionalProperties", True) is not True for part in (one, other)
    ):
        return None
    both = dict(one)
    for key, value in other.items():
        if key not in both or key == "description":
            both.setdefault(key, value)
        elif key == "properties":
            clashes = both[key].keys() & value.keys()
            if any(both[key][name] != value[name] for name in clashes):
                return None
            both[key] = {**both[key], **value}
        elif key == "required" and isinstance(value, list) and isinstance(both[key], list):
            both[key] = [*both[key], *(name for name in value if name not in both[key])]
        elif both[key] != value:
            return None
    return both


# -- texts ---------------------------------------------------------------------------------


def texts(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def clean(value: Any, longest: int) -> str:
    """Return a text without control and invisible characters, except line breaks, cut to
    `longest`.
    """
    if not isinstance(value, str):
        return ""
    kept = value[: 4 * longest].expandtabs(2)
    return cut("".join(c for c in kept if c == "\n" or c.isprintable()).strip(), longest)


__all__ = [
    "MAX_DOCUMENT_BYTES",
    "CannotImport",
    "OpenApiDocument",
    "Schemas",
    "clean",
    "read_document",
    "texts",
]
