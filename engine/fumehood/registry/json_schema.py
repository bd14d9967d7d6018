"""JSON Schema validation with a bounded cost, and the check of untrusted schemas for faults.

Host side, used by `pipeline/validate`, `pipeline/result` and `definitions`. Invariants: no schema,
pattern or argument makes a validation take unlimited time, and nothing is ever fetched. Patterns
run on RE2, which takes linear time. All other keywords of one validation share a limited number of
steps. If a keyword would be ignored or its cost is unbounded, it is a fault of its schema.

Objects with a few plain parameters are validated on a fast path, because a full validation costs
about twenty microseconds even if it finds nothing. The fast path accepts only documents that the
full validation would accept. The check of a schema also has a fast path, for common schemas,
because the full check takes half a millisecond. This fast path accepts only schemas that the full
check would accept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import re2
from jsonschema import Draft202012Validator, ValidationError, validators
from referencing.exceptions import Unresolvable

from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.tool import MAX_SCHEMA_DEPTH
from fumehood.protocol import strict_json

MAX_SCHEMA_NODES = 10_000
"""Maximum number of JSON values in one schema, counted at all levels together."""

DIALECT = re.compile(
    r"https?://json-schema\.org/(draft/2020-12/|draft/2019-09/|draft-0[467]/)?schema#?"
)
"""Accepted values of `$schema`. Schemas of all these drafts are read as draft 2020-12. Some
keywords have another meaning in an older draft, such as `exclusiveMinimum: true` or a list of
`items`. A schema that uses them is invalid in draft 2020-12, or the keyword is in `_NOT_OFFERED`.
Draft 3 is not accepted, because it has keywords that would be ignored."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
"""Keywords that refer to another schema."""

_LOCAL_REFERENCE = re.compile(r"#(/(\$defs|definitions|properties)/[^/]+)*\Z")
_NOT_OFFERED = {
    "$recursiveRef": "draft 2020-12 calls it $dynamicRef",
    "dependencies": "draft 2020-12 calls it dependentRequired and dependentSchemas",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
}
"""Refused keyword → remedy. The keyword is refused because it would be ignored, or because its cost
is unbounded."""

MAX_STEPS = 100_000
"""Maximum number of keyword evaluations for one document. A large, legitimate document needs a few
thousand evaluations."""

MAX_ERRORS = 20
"""Maximum number of violations reported for one document."""

UNKNOWN = "is not a parameter of this tool"
PATTERN_MEMORY_BYTES = 1 << 20
"""Memory that RE2 may use for one pattern. Patterns that need more are refused."""


class TooCostly(Exception):
    """The validation of a document took more steps than allowed."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A place where a document violates its schema, and what is wrong there.

    `path` contains the keys that lead to the place, joined by dots. The path of the document itself
    is "".
    """

    path: str
    message: str


class CompiledSchema:
    """A schema that is compiled for validation. It must not have faults (`schema_faults`)."""

    def __init__(self, schema: JsonObject) -> None:
        self._validator = _Validator(schema)
        self._accepts = plain_acceptor(schema)
        properties = schema.get("properties", {}) if self._accepts is not None else {}
        self._named = properties.keys()
        self._filled_in = {name for name, said in properties.items() if "default" in said}

    def is_plainly_right(self, document: JsonObject) -> bool:
        """Check quickly whether a document is valid and complete. If the result is False, the
        document may still be valid, and the full validation decides.

        A complete document has no unknown parameter. It has a value for every parameter with a
        default.
        """
        keys = document.keys()
        is_whole = keys <= self._named and self._filled_in <= keys
        return is_whole and self._accepts is not None and self._accepts(document)

    def violations(self, document: Any) -> list[Violation]:
        """Validate a document, and return at most `MAX_ERRORS` violations. The list is empty if the
        document is valid.

        Raises:
            TooCostly: the validation took more than `MAX_STEPS` steps, or recursed too deeply.
        """
        if self._accepts is not None and self._accepts(document):
            return []
        token = _STEPS.set([MAX_STEPS])
        try:
            found: list[Violation] = []
            for error in self._validator.iter_errors(document):
                found.extend(_describe(error))
                if len(found) >= MAX_ERRORS:
                    break
            return found[:MAX_ERRORS]
        except RecursionError:
            raise TooCostly from None
        finally:
            _STEPS.reset(token)


def compile_pattern(pattern: str) -> Any:
    """Compile a pattern with RE2. Return None if the pattern is invalid, needs too much memory, or
    uses syntax that RE2 does not support (look-around, back-references).
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_MEMORY_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error:
        return None


# -- parameters ----------------------------------------------------------------------------


def without_wrong_defaults(schema: JsonObject) -> JsonObject:
    """Return a tool's schema without the defaults that violate it. The engine fills in the default
    of a parameter that a call omits, so a wrong default would make the call fail. The schema must
    have no faults.
    """
    properties = schema.get("properties", {})
    defaults = {
        name: said["default"]
        for name, said in properties.items()
        if isinstance(said, dict) and "default" in said
    }
    if not defaults:
        return schema
    referred = {key: value for key, value in schema.items() if key in ("$defs", "definitions")}
    compiled = CompiledSchema({**referred, "type": "object", "properties": properties})
    wrong = {name for name, value in defaults.items() if not _is_valid(compiled, {name: value})}
    if not wrong:
        return schema
    mended = {
        name: {key: value for key, value in said.items() if key != "default"}
        if name in wrong
        else said
        for name, said in properties.items()
    }
    return {**schema, "properties": mended}


def _is_valid(schema: CompiledSchema, document: JsonObject) -> bool:
    try:
        return not schema.violations(document)
    except TooCostly:
        return False


# -- the validator: jsonschema's, with a budget and three keywords made linear ------------

_STEPS: ContextVar[list[int]] = ContextVar("validation_steps")
_Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


def _spend(steps: int) -> None:
    budget = _STEPS.get(None)
    if budget is not None:
        budget[0] -= steps
        if budget[0] < 0:
            raise TooCostly


def _counted(keyword: _Keyword) -> _Keyword:
    def evaluate(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        sizes = (len(part) for part in (value, instance) if isinstance(part, list | dict))
        _spend(1 + sum(sizes))
        return keyword(validator, value, instance, schema)

    return evaluate


_compiled = lru_cache(maxsize=2 * MAX_SCHEMA_NODES)(compile_pattern)


def _matches(pattern: str, text: str) -> bool:
    return bool(_compiled(pattern).search(text))


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(pattern, instance):
        yield ValidationError("does not match the pattern")


def _properties(
    validator: Any, properties: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for name, subschema in properties.items():
        if name not in instance:
            continue
        if subschema is False:  # the library's own error does not name the property
            error = ValidationError("is not allowed")
            error.path.appendleft(name)
            yield error
        else:
            yield from validator.descend(instance[name], subschema, path=name, schema_path=name)


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        _spend(len(instance))
        for key, value in instance.items():
            if _matches(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    _spend(len(instance) * len(patterns))
    extras = [
        key
        for key in instance
        if key not in known and not any(_matches(pattern, key) for pattern in patterns)
    ]
    if isinstance(allowed, dict):
        for extra in extras:
            yield from validator.descend(instance[extra], allowed, path=extra)
    elif not allowed and extras:
        error = ValidationError("unknown parameters")
        error.extras = extras
        yield error


def _multiple_of(
    validator: Any, factor: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    """Yield an error if `instance` is a number and not a multiple of `factor`, the value of the
    keyword `multipleOf`. The check is exact: for example, 19.99 is a multiple of 0.01, and integers
    may have any size.
    """
    if isinstance(instance, bool) or not isinstance(instance, int | float):
        return
    if (Fraction(repr(instance)) / Fraction(repr(factor))).denominator != 1:
        yield ValidationError("is not a multiple")


def _unique_items(
    validator: Any, unique: bool, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not unique or not isinstance(instance, list):
        return
    seen = {strict_json.dumps(_canonical(item)) for item in instance}
    if len(seen) < len(instance):
        yield ValidationError("holds the same element twice")


def _canonical(value: Any) -> Any:
    """Convert a JSON value to a form that is the same for equal values: keys are sorted, and 1.0
    becomes 1.
    """
    if isinstance(value, dict):
        return {key: _canonical(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


# Keywords that apply other schemas or visit every element. The others cost no more than the length
# of the schema; leaving them uncounted keeps a typical call, with a few plain parameters, cheap.
_COUNTED = frozenset(
    {
        "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "items", "prefixItems",
        "contains", "properties", "propertyNames", "dependentSchemas", "enum", "const",
    }
)  # fmt: skip

_Validator: Any = validators.extend(
    Draft202012Validator,
    {
        **{
            name: _counted(function)
            for name, function in Draft202012Validator.VALIDATORS.items()
            if name in _COUNTED
        },
        "multipleOf": _multiple_of,
        "properties": _counted(_properties),
        "pattern": _pattern,
        "patternProperties": _counted(_pattern_properties),
        "additionalProperties": _counted(_additional_properties),
        "uniqueItems": _counted(_unique_items),
    },
)


# -- messages for violations ----------------------------------------------------------


def _describe(error: ValidationError) -> Iterator[Violation]:
    path = [str(part) for part in error.absolute_path]
    if error.validator == "required" and isinstance(error.instance, dict):
        # Each error of the validator names one missing key; that key ends the path.
        missing = next(
            (key for key in error.validator_value if f"{key!r} is a required" in error.message),
            None,
        )
        if missing is not None:
            yield Violation(".".join([*path, missing]), "is required")
            return
    if error.validator == "additionalProperties" and hasattr(error, "extras"):
        for extra in error.extras[:MAX_ERRORS]:
            yield Violation(".".join([*path, extra[:80]]), UNKNOWN)
        return
    if error.validator == "dependentRequired" and isinstance(error.instance, dict):
        needed = [n for names in error.validator_value.values() for n in names]
        missing = next((n for n in needed if f"{n!r} is a dep" in error.message), None)
        if missing is not None:
            yield Violation(".".join([*path, missing]), "is required by another parameter")
            return
    yield Violation(".".join(path), _words(error))


_SENTENCES: Mapping[str, str] = {
    "const": "must be {0}",
    "minimum": "must be at least {0}",
    "maximum": "must be at most {0}",
    "exclusiveMinimum": "must be greater than {0}",
    "exclusiveMaximum": "must be less than {0}",
    "multipleOf": "must be a multiple of {0}",
    "minLength": "must have at least {0} characters",
    "maxLength": "must have at most {0} characters",
    "minItems": "must have at least {0} elements",
    "maxItems": "must have at most {0} elements",
    "uniqueItems": "must not hold the same element twice",
    "pattern": "must match the pattern {0}",
    "anyOf": "matches none of the allowed forms",
    "oneOf": "must match exactly one of the allowed forms",
}


def _words(error: ValidationError) -> str:
    value = error.validator_value
    if error.validator == "type":
        wanted = value if isinstance(value, str) else " or ".join(value)
        return f"must be {wanted}, not {_kind(error.instance)}"
    if error.validator == "enum":
        return "must be one of " + ", ".join(_short(item) for item in value[:20])
    sentence = _SENTENCES.get(error.validator, "breaks a rule of the tool's schema")
    return sentence.format(_short(value))


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _short(value: Any) -> str:
    return cut(strict_json.dumps(value).decode(), 80)


# -- the fast path for plain objects -------------------------------------------------------


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
    """Return a function that quickly checks a document against the schema. Return None if the
    schema is not simple enough for this.

    The returned function takes a document and returns True only if it is valid. If it returns
    False, only the full validation can decide.
    """
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
    # Exactly these types: a bool is not a number, and 3.0 as an integer is left to the validator.
    types = _TYPES[kind]
    measured = {"string": ("minLength", "maxLength")}.get(kind, ("minimum", "maximum"))
    low, high = (schema.get(bound) for bound in measured)
    measure: Callable[[Any], Any] = len if kind == "string" else lambda value: value

    def accepts(value: Any) -> bool:
        if type(value) not in types:
            return False
        size = measure(value)
        return (low is None or size >= low) and (high is None or size <= high)

    return accepts


# -- faults of a schema ---------------------------------------------------------------------


def schema_faults(schema: JsonObject, where: str) -> list[str]:
    """Return the faults of a schema. Each fault is a text that begins with `where`. The list is
    empty if there are no faults.
    """
    if not _is_small(schema):
        return [f"{where}: over {MAX_SCHEMA_NODES} nodes or {MAX_SCHEMA_DEPTH} levels"]
    if is_surely_sound(schema):
        return []
    faults = []
    dialect = schema.get("$schema")
    if dialect is not None and not (isinstance(dialect, str) and DIALECT.fullmatch(dialect)):
        faults.append(f"{where}: $schema is not one of the drafts 4, 6, 7, 2019-09 and 2020-12")
    meta = Draft202012Validator(Draft202012Validator.META_SCHEMA)
    for error in meta.iter_errors(schema):
        path = ".".join([where, *map(str, error.absolute_path)])
        faults.append(f"{path}: not a valid JSON Schema: {error.message[:200]}")
    # References can only be looked up in a valid schema.
    resolver = None if faults else _Validator(schema)._resolver
    for node, path in _walk(schema, where):
        if isinstance(node, dict):
            faults += _node_faults(node, path, resolver)
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


def _node_faults(node: JsonObject, path: str, resolver: Any) -> Iterator[str]:
    for keyword in REFERENCES:
        if isinstance(node.get(keyword), str):
            yield from _reference_faults(node[keyword], f"{path}.{keyword}", resolver)
    for keyword, instead in _NOT_OFFERED.items():
        if keyword in node and not path.endswith(("properties", "$defs", "definitions")):
            yield f"{path}.{keyword}: is not supported; {instead}"
    if isinstance(node.get("$id"), str):
        yield f"{path}.$id: a tool's schema must not have an $id"
    patterns = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("patternProperties"), dict):
        patterns += list(node["patternProperties"])
    for pattern in patterns:
        if compile_pattern(pattern) is None:
            yield (
                f"{path}: the pattern {pattern[:60]!a} is not a pattern in RE2's syntax, which has "
                "no look-around and no back-references"
            )


def _reference_faults(target: str, path: str, resolver: Any) -> Iterator[str]:
    if not _LOCAL_REFERENCE.match(target):
        allowed = "(#, #/$defs/…, #/properties/…)"
        yield f"{path}: only references inside this schema {allowed} are followed"
        return
    if resolver is None:
        return
    try:
        resolver.lookup(target)
    except (Unresolvable, ValueError):
        yield f"{path}: has no target"


# -- schemas of other languages' encoders ------------------------------------------------------

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
})  # fmt: skip


def without_nils(schema: Any, levels: int = MAX_SCHEMA_DEPTH) -> Any:
    """Return a schema without the keywords whose value is empty in a way that JSON Schema does not
    allow, such as `null` for a missing list.

    At most `levels` levels of the schema are changed.
    """
    if schema in (None, []):
        return {}
    if not isinstance(schema, dict) or not levels:
        return schema
    found: JsonObject = {}
    for keyword, said in schema.items():
        # Tools in other programming languages write such values: Go writes `null` for a missing
        # list, PHP `[]` for an empty object, and Lua `{}` for an empty list. A value with which a
        # keyword compares arguments is no such value, for example in `const: null`.
        if _is_nil(keyword, said):
            continue
        if keyword in _MAPS and isinstance(said, dict):
            said = {name: without_nils(each, levels - 1) for name, each in said.items()}
        elif keyword in _LISTS and isinstance(said, list):
            said = [without_nils(each, levels - 1) for each in said]
        elif keyword in _SCHEMAS:
            said = without_nils(said, levels - 1)
        found[keyword] = said
    return found


def _is_nil(keyword: str, said: Any) -> bool:
    if keyword in ("const", "default"):
        return False
    if keyword in _LISTS | {"enum", "examples", "required"}:
        return said in (None, {})
    return said is None or (keyword in _MAPS | _SCHEMAS and said == [])


# -- the fast path for common schemas ------------------------------------------------------


_TYPE_NAMES = {"string", "integer", "number", "boolean", "array", "object", "null"}


def is_surely_sound(schema: Any) -> bool:
    """Return True if a quick check shows that the schema has no faults. If the result is False,
    only the full check (`schema_faults`) can decide.

    The caller must first check with `_is_small` that the schema is not nested too deeply.
    """
    return isinstance(schema, dict) and all(
        keyword in _CHECKS and _CHECKS[keyword](said) for keyword, said in schema.items()
    )


def _is_text(said: Any) -> bool:
    return isinstance(said, str)


def _is_bool(said: Any) -> bool:
    return isinstance(said, bool)


def _is_type(said: Any) -> bool:
    if isinstance(said, list):
        return bool(said) and _are_names(said) and _TYPE_NAMES.issuperset(said)
    return isinstance(said, str) and said in _TYPE_NAMES


def _is_number(said: Any) -> bool:
    return isinstance(said, int | float) and not isinstance(said, bool)


def _is_count(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool) and said >= 0


def _is_scalar(said: Any) -> bool:
    # An object or array could contain something that only the full check finds, such as a `$ref`.
    return said is None or isinstance(said, str | bool | int | float)


def _are_scalars(said: Any) -> bool:
    return isinstance(said, list) and all(map(_is_scalar, said))


def _are_names(said: Any) -> bool:
    return isinstance(said, list) and all(map(_is_text, said)) and len(set(said)) == len(said)


def _are_sound(said: Any) -> bool:
    return isinstance(said, dict) and all(map(is_surely_sound, said.values()))


def _is_pattern(said: Any) -> bool:
    return isinstance(said, str) and compile_pattern(said) is not None


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
