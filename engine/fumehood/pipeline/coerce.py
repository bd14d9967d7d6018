"""Coercion of arguments, with a warning for each change. Part of the stage `validate`.

The offline policy commands also use this module, so it must not import the engine's services.
Coercion corrects wrong types that models often send. It is limited to top-level properties that
have one plain type. Arguments of strict tools are not coerced. Neither are arguments of dangerous
tools, because a human approves exactly the arguments that were sent. Numbers are clamped to their
bounds only for read-only tools.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import cut
from fumehood.core.tool import ToolDefinition, parameter_names
from fumehood.protocol.strict_json import BYTE_ORDER_MARK
from fumehood.registry.arguments import source_of, without_empty_twins

_INTEGER = re.compile(r"^[+-]?\d{1,300}$", re.ASCII)
_NUMBER = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?$", re.ASCII)
_NUMBERS: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float)}
_BOOLEANS = {
    "true": True, "yes": True, "y": True, "on": True, "1": True,
    "false": False, "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip


def coerce(arguments: JsonObject, tool: ToolDefinition) -> tuple[JsonObject, tuple[str, ...]]:
    """Convert arguments to the types in the tool's schema. Return the converted arguments, and a
    warning for each change. If a value cannot be converted, it stays unchanged.

    These changes have no warning:

    * A missing parameter gets its default.
    * The byte order mark of a program is removed.
    * If two parameters exclude each other and one is empty, the empty one is left out.
    """
    arguments = without_empty_twins(tool.executor, arguments)
    if is_marked(arguments, tool):
        # Not in the sandbox, because policies and approvers must see the program as it runs.
        source = source_of(tool.executor)
        arguments = {**arguments, source: arguments[source].removeprefix(BYTE_ORDER_MARK)}
    properties: JsonObject = tool.parameters.get("properties", {})
    forgiving = not tool.strict and not tool.dangerous
    known = cache(lambda: parameter_names(tool.parameters))
    effective: JsonObject = {}
    warnings: list[str] = []
    for name, value in arguments.items():
        schema = properties.get(name)
        if schema is None:
            if forgiving and _drops_unknown(tool.parameters) and name not in known():
                warnings.append(f"unknown parameter {_shown(name)} was dropped")
                continue
            effective[name] = value
            continue
        if forgiving and isinstance(schema, dict):
            value, notes = _coerce_value(name, value, schema, clamp=tool.read_only)
            warnings += notes
        effective[name] = value
    for name, schema in properties.items():
        if name not in effective and isinstance(schema, dict) and "default" in schema:
            # A copy: the tool may modify its arguments, and the definition must not change.
            effective[name] = copy.deepcopy(schema["default"])
    return effective, tuple(warnings)


def is_marked(arguments: JsonObject, tool: ToolDefinition) -> bool:
    """Whether the program in the arguments begins with a byte order mark."""
    program = arguments.get(source_of(tool.executor))
    return isinstance(program, str) and program.startswith(BYTE_ORDER_MARK)


def refuses_unknown(tool: ToolDefinition) -> bool:
    """Whether a call is refused if it has a parameter that the tool's schema does not name."""
    return (tool.strict or tool.dangerous) and _drops_unknown(tool.parameters)


def _drops_unknown(parameters: JsonObject) -> bool:
    # If the schema has its own rules for unknown parameters, those apply.
    return "additionalProperties" not in parameters and "patternProperties" not in parameters


def _coerce_value(
    name: str, value: Any, schema: JsonObject, *, clamp: bool
) -> tuple[Any, list[str]]:
    kind = schema.get("type")
    if not isinstance(kind, str):
        return value, []
    coerced = _to_kind(value, kind)
    notes = []
    if type(coerced) is not type(value):
        notes.append(f"{name}: {_kind_name(value)} was read as {kind}")
    # A value of another type is refused, not moved to the nearest bound.
    if clamp and kind in _NUMBERS and type(coerced) in _NUMBERS[kind]:
        clamped = _clamp(coerced, schema)
        if clamped != coerced:
            notes.append(f"{name}: {_shown(coerced)} is out of range, {_shown(clamped)} was used")
            coerced = clamped
    return coerced, notes


def _to_kind(value: Any, kind: str) -> Any:
    if kind == "string":
        return value
    text = value.strip() if isinstance(value, str) else None
    if kind == "integer":
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if text is not None and _INTEGER.match(text):
            return int(text)
    elif kind == "number":
        if text is not None and _NUMBER.match(text):
            number = float(text)
            return number if abs(number) != float("inf") else value
    elif kind == "boolean" and text is not None:
        return _BOOLEANS.get(text.lower(), value)
    return value


def _clamp(value: Any, schema: JsonObject) -> Any:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and _is_number(low) and value < low:
        return low
    if high is not None and _is_number(high) and value > high:
        return high
    return value


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS["number"]


def _kind_name(value: Any) -> str:
    return {str: "a string", float: "a number", int: "an integer"}.get(type(value), "a value")


def _shown(value: Any) -> str:
    return cut(ascii(value), 60)
