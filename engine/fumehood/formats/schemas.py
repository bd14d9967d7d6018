"""Converts a tool's parameters to a provider's JSON Schema dialect, and converts a call's arguments
back.

In a strict mode, the provider forces the arguments of every call to match the schema, but supports
only a part of JSON Schema. An unsupported constraint becomes a note in the description, and a
`Loss` is reported. (The engine checks the arguments in any case.) If the schema cannot be
expressed, the tool is exported without strict mode. Invariants: after `restored`, arguments that
match the converted schema have the tool's own names. If the conversion closes an object, so that it
accepts only the properties that it names, this is always reported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.nulls import kinds_of, listed_types, resolved, takes_null, without_nulls
from fumehood.core.tool import MAX_SCHEMA_DEPTH, ToolDefinition, with_own_root
from fumehood.formats.model import Loss

UNION_KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "enum")
"""Keywords that no provider accepts at the root of a tool's schema."""

AT_ROOT = "no provider takes it at the root; the engine checks it"
FROM_ROOT = "move it into a property, or split the tool"

_SILENT = frozenset(
    {"$schema", "$comment", "$id", "$anchor", "examples", "deprecated", "readOnly", "writeOnly"}
)
_ANNOTATIONS = _SILENT | {"title", "description", "default"}
_REWRITTEN = frozenset({"allOf", "const", "oneOf", "anyOf", "$ref"})
"""Keywords that `_plain` may replace by a simpler form, and keywords next to which a strict schema
allows no others."""

_NOTED = frozenset(
    {
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems",
        "minProperties", "maxProperties",
    }
)  # fmt: skip
"""Constraints that can be replaced by a note in the property's description."""

_KINDS: Mapping[Any, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
}  # fmt: skip


_ENCODER = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The part of JSON Schema that a provider accepts.

    - `keywords`: constraints that are kept.
    - `formats`: values of the keyword `format` that are kept.
    - `is_strict`: whether each object must be closed, so that it accepts only the properties that
      it names. If a strict dialect cannot express a part of a schema, this is a fault, otherwise a
      loss.
    - `requires_all`: whether every property must be required. An optional property must then accept
      null.
    - `has_type_lists`: whether `type` can be a list of types.
    - `has_recursion`: whether a schema can contain itself.
    - `property_name`: matches the names of properties that are accepted. A property with another
      name gets an alias. None accepts every name.
    - `max_levels`: maximum levels of nesting.

    Limits on the number of characters are not checked. Definitions of tools are always smaller than
    the providers' limits.
    """

    keywords: frozenset[str]
    formats: frozenset[str] | None = None
    is_strict: bool = False
    requires_all: bool = False
    has_type_lists: bool = True
    has_recursion: bool = True
    property_name: re.Pattern[str] | None = None
    max_levels: int = MAX_SCHEMA_DEPTH


@dataclass(slots=True)
class Fitted:
    """A converted schema. If it has `faults`, it cannot be used in strict mode."""

    schema: JsonObject
    losses: list[Loss] = field(default_factory=list)
    faults: list[Loss] = field(default_factory=list)


def fit(tool: ToolDefinition, dialect: Dialect) -> Fitted:
    """Convert the schema of a tool's parameters to `dialect`, which is the part of JSON Schema that
    a provider accepts.
    """
    return _Fitting(tool, dialect).run()


def without_unions(tool: ToolDefinition) -> Fitted:
    """Return the schema of a tool's parameters without the keywords that no provider accepts at its
    root (`UNION_KEYWORDS`).

    Each of these keywords is recorded as a loss. `$schema` is also removed. If a property is
    required but not described, it gets a schema. Everything else is unchanged.
    """
    given = with_own_root(tool.parameters)
    kept = {k: v for k, v in given.items() if k not in UNION_KEYWORDS and k != "$schema"}
    losses = [
        Loss(tool=tool.name, where=f"parameters.{keyword}", what=AT_ROOT, change=FROM_ROOT)
        for keyword in UNION_KEYWORDS
        if keyword in given
    ]
    properties = {**kept.get("properties", {}), **_undescribed(kept)}
    return Fitted({"type": "object", **kept, "properties": properties}, losses)


def alias_of(name: str, allowed: re.Pattern[str] | None) -> str:
    """Return the name under which the provider gets the property `name`.

    If `name` matches `allowed`, or `allowed` is None, this is `name` itself. Otherwise, it is an
    alias that is derived from `name`.
    """
    if allowed is None or allowed.fullmatch(name):
        return name
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)[:48]
    mark = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"p_{plain}_{mark}"


def aliased(arguments: JsonObject, parameters: JsonObject, dialect: Dialect) -> JsonObject:
    """Return a call's arguments with the parameter names that the model sees.

    If the provider refuses a parameter's name, the parameter has an alias, which replaces its name.
    `parameters` is the schema of the tool's parameters. `restored` is the reverse of this function.
    """
    aliases = _aliases(parameters, dialect.property_name)
    renamed: JsonObject = _renamed(arguments, aliases) if aliases else arguments
    return renamed


def restored(arguments: JsonObject, parameters: JsonObject, dialect: Dialect) -> JsonObject:
    """Convert the arguments of a model's call to arguments of the tool. `parameters` is the schema
    of the tool's parameters.

    Aliases are replaced by the names of the parameters. In strict mode, a model cannot omit an
    optional parameter, and sends null instead. Such nulls are removed.

    Raises:
        InvalidParams: a parameter is given twice, by its name and by its alias.
    """
    aliases = _aliases(parameters, dialect.property_name)
    if aliases:
        arguments = _renamed(arguments, {alias: name for name, alias in aliases.items()})
    return without_nulls(arguments, parameters)


def _undescribed(schema: JsonObject) -> JsonObject:
    """Return schemas for the properties that `schema` requires but does not describe: name →
    schema.

    If `schema` forbids properties that it does not describe, return {}.
    """
    more = schema.get("additionalProperties", True)
    if more is False:
        return {}
    properties = schema.get("properties", {})
    # Providers refuse a name in `required` that is missing in `properties`.
    lost = [name for name in schema.get("required", ()) if name not in properties]
    return dict.fromkeys(lost, more if isinstance(more, dict) else {})


class _Fitting:
    """The state of one conversion of a schema. `fit` creates this object and calls `run` once."""

    def __init__(self, tool: ToolDefinition, dialect: Dialect) -> None:
        self._tool = tool.name
        self._root = tool.parameters
        self._dialect = dialect
        self._kept = dialect.keywords | {"title", "description", "type"}
        self._formats = dialect.formats or ()
        self._result = Fitted({})
        self._nulls: dict[int, bool] = {}

    def run(self) -> Fitted:
        """Convert the root schema and its definitions, and return the result."""
        root, result = dict(with_own_root(self._root)), self._result
        for keyword in UNION_KEYWORDS:
            if keyword in root:
                self._miss(f"parameters.{keyword}", AT_ROOT, FROM_ROOT)
                del root[keyword]
        definitions = {**root.pop("definitions", {}), **root.pop("$defs", {})}
        result.schema = self._node({"type": "object", "properties": {}, **root}, "parameters", 1)
        if definitions:
            result.schema["$defs"] = {
                name: self._node(schema, f"parameters.$defs.{name}", 2)
                for name, schema in definitions.items()
            }
        return result

    def _miss(self, where: str, what: str, change: str) -> None:
        """Record that the dialect cannot express a part of the schema. If the dialect is strict,
        the record is a fault, otherwise a loss.

        `where` is the place of this part in the schema. `what` says what cannot be expressed.
        `change` says what the tool's author can do about it.
        """
        if not self._dialect.is_strict:
            self._lose(where, what, change)
            return
        what = f"strict is false: {what}"
        self._result.faults.append(Loss(tool=self._tool, where=where, what=what, change=change))

    def _lose(self, where: str, what: str, change: str) -> None:
        self._result.losses.append(Loss(tool=self._tool, where=where, what=what, change=change))

    def _node(self, schema: Any, where: str, level: int) -> JsonObject:
        if level > self._dialect.max_levels:
            words = f"it is nested over {self._dialect.max_levels} levels"
            self._miss(where, words, "flatten the schema")
            return {}
        schema = self._plain(schema, where)
        made: JsonObject = {}
        notes: list[str] = []
        kept = self._kept
        for keyword, said in schema.items():
            if keyword in kept or (keyword == "format" and said in self._formats):
                made[keyword] = said
            elif keyword in ("$ref", "anyOf", "items", "enum"):
                self._part(made, keyword, said, where, level)
            elif keyword in _NOTED or keyword == "default":
                notes.append(self._note(keyword, said, where))
            elif keyword not in _SILENT and keyword not in _PLACED:
                self._miss(
                    f"{where}.{keyword}", f"{keyword} cannot be expressed",
                    "say it without that keyword, or in the description",
                )  # fmt: skip
        self._typed(made, schema, where)
        if "object" in listed_types(made.get("type")):
            self._object(made, schema, where, level)
        if notes:
            said, note = made.get("description"), "; ".join(notes)
            made["description"] = f"{said} ({note})" if said else note
        return made

    def _part(self, made: JsonObject, keyword: str, said: Any, where: str, level: int) -> None:
        """Convert `said`, the value of a keyword that contains schemas or enumerated values, and
        add the result to `made`.

        `made` is the converted schema. `where` is the schema's place in the tool's parameters, and
        `level` is its depth.
        """
        if keyword == "$ref":
            made[keyword] = self._reference(said, where)
        elif keyword == "anyOf":
            made[keyword] = [
                self._node(branch, f"{where}.anyOf.{i}", level) for i, branch in enumerate(said)
            ]
        elif keyword == "enum":
            made[keyword] = self._enum(said, where)
        elif isinstance(said, dict):
            made[keyword] = self._node(said, f"{where}.items", level + 1)

    def _note(self, keyword: str, said: Any, where: str) -> str:
        """Return a note for the schema's description, in place of a keyword that is not supported.
        Unless the keyword is `default`, also record a loss.

        `said` is the keyword's value. `where` is the place of the schema in the tool's parameters.
        """
        if keyword != "default":
            self._lose(
                f"{where}.{keyword}",
                f"{keyword} is only a note in the description; the engine checks it",
                "use an enum, or expect INVALID_PARAMS for other values",
            )
        return f"{keyword}: {_short(said)}"

    def _plain(self, schema: Any, where: str) -> JsonObject:
        """Return a simpler schema that accepts the same values as `schema`. If the dialect is
        strict, also check the unions in `schema`.

        If `schema` is a boolean, return {}. The value False, which accepts nothing, is recorded as
        not expressible. `where` is the place of `schema` in the tool's parameters.
        """
        if not isinstance(schema, dict):
            if schema is not True:
                self._miss(where, "it takes no value", "leave the parameter out")
            return {}
        if schema.keys().isdisjoint(_REWRITTEN):
            return schema
        plain = dict(schema)
        alone = plain.get("allOf")
        if isinstance(alone, list) and len(alone) == 1 and isinstance(alone[0], dict):
            del plain["allOf"]
            if not (plain.keys() & alone[0].keys()) - _ANNOTATIONS:
                plain = {**alone[0], **plain}
            else:
                plain["allOf"] = alone
        if "const" in plain and "enum" not in plain:
            plain["enum"] = [plain.pop("const")]
        if "oneOf" in plain and "anyOf" not in plain:
            plain["anyOf"] = plain.pop("oneOf")
        if self._dialect.is_strict:
            self._check_union(plain, where)
        return plain

    def _check_union(self, schema: JsonObject, where: str) -> None:
        """Check the unions and references in a schema. Each violation of these rules is recorded:

        * A union or a reference has no other constraints next to it.
        * If every property must be required, only one branch of a union accepts objects, and only
          one accepts arrays.

        `where` is the place of the schema in the tool's parameters.
        """
        for keyword in ("anyOf", "$ref"):
            if keyword in schema and schema.keys() - _ANNOTATIONS - {keyword, "$defs"}:
                self._miss(where, f"{keyword} has other rules beside it", "move them into it")
        branches = [kinds_of(resolved(b, self._root)) for b in schema.get("anyOf", ())]
        for kind in ("object", "array") if self._dialect.requires_all else ():
            if sum(kind in kinds for kinds in branches) > 1:  # a null could belong to each
                words = f"a union has several {kind}s"
                self._miss(f"{where}.anyOf", words, "take one of them, or split the tool")

    def _reference(self, target: str, where: str) -> str:
        target = target.replace("#/definitions/", "#/$defs/", 1)
        if target != "#" and not re.fullmatch(r"#/\$defs/[^/]+", target):
            self._miss(f"{where}.$ref", "it refers to a property", "move the target into $defs")
        elif not self._dialect.has_recursion and (target == "#" or ".$defs." in where):
            words = "a definition that refers to another one may contain itself"
            self._miss(f"{where}.$ref", words, "write its levels out")
        return target

    def _enum(self, values: list[Any], where: str) -> list[Any]:
        if any(isinstance(value, dict | list) for value in values):
            self._miss(f"{where}.enum", "it has objects or arrays", "use texts as its values")
        return list(values)

    def _typed(self, made: JsonObject, schema: JsonObject, where: str) -> None:
        """Ensure that the converted schema `made` has a type that the dialect accepts. `schema` is
        the schema before the conversion.

        If `made` has no type, the type is determined from `schema`. If the dialect does not accept
        the type, this is recorded at the place `where`. In a strict dialect, an unknown type is
        also recorded, and an array whose items have no schema.
        """
        dialect = self._dialect
        if "enum" in made and not dialect.has_type_lists:
            made.pop("type", None)
        elif made.keys().isdisjoint(("type", "anyOf", "$ref")):
            kinds = {_KINDS[type(v)] for v in made.get("enum", ()) if type(v) in _KINDS}
            kinds |= kinds_of(schema)
            if kinds:
                made["type"] = kinds.pop() if len(kinds) == 1 else sorted(kinds)
            elif dialect.is_strict:
                self._miss(where, "it takes values of any type", "say its type")
        if isinstance(made.get("type"), list) and not dialect.has_type_lists:
            self._miss(f"{where}.type", "it has several types", "use anyOf")
        is_array = "array" in listed_types(made.get("type"))
        if dialect.is_strict and is_array and not isinstance(schema.get("items"), dict):
            self._miss(where, "its items may be anything", "say their type in items")

    def _object(self, made: JsonObject, schema: JsonObject, where: str, level: int) -> None:
        dialect = self._dialect
        properties = {**schema.get("properties", {}), **_undescribed(schema)}
        required = [name for name in schema.get("required", ()) if isinstance(name, str)]
        more = schema.get("additionalProperties")
        if "patternProperties" in schema:
            self._miss(
                f"{where}.patternProperties", "names by pattern cannot be expressed",
                "name them in properties",
            )  # fmt: skip
        if dialect.is_strict:
            self._close(schema, where, is_root=level == 1)
        made["properties"] = {
            alias_of(name, dialect.property_name): self._property(
                name, said, f"{where}.properties.{name}", level, is_required=name in required
            )
            for name, said in properties.items()
        }
        if lost := [name for name in required if name not in properties]:
            words = f"{lost[0][:80]} is required, and the object does not take it"
            self._lose(f"{where}.required", words, "name it in properties")
            required = [name for name in required if name in properties]
        if dialect.requires_all:
            required = list(properties)
        if required or dialect.is_strict:
            made["required"] = [alias_of(name, dialect.property_name) for name in required]
        if dialect.is_strict or more is not None:
            is_schema = isinstance(more, dict) and not dialect.is_strict
            made["additionalProperties"] = (
                self._node(more, f"{where}.additionalProperties", level + 1)
                if is_schema
                else more is True and not dialect.is_strict
            )

    def _close(self, schema: JsonObject, where: str, *, is_root: bool) -> None:
        """Check whether the object that `schema` describes can be closed, so that it accepts only
        the properties that it names. Faults and losses are recorded at the place `where`.

        * If the schema allows other properties, the object cannot be closed.
        * If the schema does not say whether it allows others, closing the object is a loss. If it
          also names no properties, the object cannot be closed.
        * If the schema requires a property that it does not name, the object cannot be closed.

        The second rule does not apply to the root schema, because the engine accepts no unknown
        parameters.
        """
        properties, more = schema.get("properties", {}), schema.get("additionalProperties")
        if more not in (None, False) or (more is None and not properties and not is_root):
            self._miss(
                where, "the object takes fields of any name",
                "name them in properties and say additionalProperties: false",
            )  # fmt: skip
        elif more is None and not is_root:
            words = "fields that are not named cannot be sent"
            self._lose(where, words, "say additionalProperties: false, or name them")
        if set(schema.get("required", ())) - properties.keys():
            words = "it requires what properties do not name"
            self._miss(f"{where}.required", words, "name it there")

    def _property(
        self, name: str, said: Any, where: str, level: int, *, is_required: bool
    ) -> JsonObject:
        made = self._node(said, where, level + 1)
        if is_required or not self._dialect.requires_all:
            return made
        if not takes_null(said, self._root, self._nulls):
            return _with_null(made)
        if not (isinstance(said, dict) and said.get("default", 0) is None):
            words = f"{name[:80]} cannot be left out: null is sent as null"
            self._lose(where, words, "make it required, or let it take no null")
        return made


_PLACED = frozenset(
    {
        "properties", "required", "additionalProperties", "patternProperties", "items",
        "$defs", "definitions",
    }
)  # fmt: skip
"""Keywords that other methods than `_node` convert."""


def _with_null(made: JsonObject) -> JsonObject:
    """Return a converted schema that also accepts null."""
    if "$ref" in made:
        words = {key: said for key, said in made.items() if key in ("title", "description")}
        return {"anyOf": [{"$ref": made["$ref"]}, {"type": "null"}], **words}
    if "anyOf" in made:
        return {**made, "anyOf": [*made["anyOf"], {"type": "null"}]}
    widened = dict(made)
    if "enum" in made:
        widened["enum"] = [*made["enum"], None]
    widened["type"] = [*_in_order(made.get("type")), "null"]
    return widened


def _in_order(kind: Any) -> list[str]:
    return list(kind) if isinstance(kind, list) else [kind] if isinstance(kind, str) else []


def _aliases(schema: JsonObject, allowed: re.Pattern[str] | None) -> dict[str, str]:
    """Return the aliases of all property names in a schema that the provider does not accept: name
    → alias.

    `allowed` matches the names that the provider accepts. All levels of the schema are searched.
    """
    found: dict[str, str] = {}
    waiting: list[Any] = [] if allowed is None else [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name in _names_in(node):
                alias = alias_of(name, allowed)
                if alias is not name:
                    found[name] = alias
            waiting += [child for child in node.values() if isinstance(child, dict | list)]
        else:
            waiting += [child for child in node if isinstance(child, dict | list)]
    return found


def _names_in(node: JsonObject) -> list[str]:
    """Return the property names in one object of a schema: the keys of its `properties`, and the
    names in its `required`.

    `node` is any JSON object inside a schema. If it is not a schema itself, these two fields may be
    missing or have other types, and are then ignored.
    """
    properties, required = node.get("properties"), node.get("required")
    names = [*properties] if isinstance(properties, dict) else []
    more = required if isinstance(required, list) else ()
    return names + [name for name in more if isinstance(name, str)]


def with_aliases(node: Any, allowed: re.Pattern[str]) -> Any:
    """Return a schema in which each property name that the provider refuses is replaced by its
    alias.

    `allowed` matches the names that the provider accepts. `node` is the schema, or any JSON value
    inside it.
    """
    if isinstance(node, list):
        return [with_aliases(child, allowed) for child in node]
    if not isinstance(node, dict):
        return node
    made: JsonObject = {}
    for keyword, said in node.items():
        if keyword == "properties" and isinstance(said, dict):
            made[keyword] = {
                alias_of(name, allowed): with_aliases(child, allowed)
                for name, child in said.items()
            }
        elif keyword == "required" and isinstance(said, list):
            made[keyword] = [alias_of(str(name), allowed) for name in said]
        elif keyword in ("enum", "const", "default", "examples"):
            made[keyword] = said
        else:
            made[keyword] = with_aliases(said, allowed)
    return made


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(value, dict):
        return [_renamed(item, names) for item in value] if isinstance(value, list) else value
    made = {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if len(made) < len(value):
        raise InvalidParams(
            "A parameter is given twice: by its name and by its alias.", fields=["arguments"]
        )
    return made


def _short(said: Any) -> str:
    text = str(said) if type(said) is int else _ENCODER.encode(said)
    return cut(text, 200)
