"""Validate: coerce the arguments to the tool's schema, or report every violation.

Second stage. Takes a `ResolvedCall`, returns a `ValidatedCall` with the effective arguments (after
coercion and defaults), which all later stages use. Coercion corrects errors of form that models
make, with a warning for each, and only in top-level properties of one plain type. A strict tool
gets no coercion; nor does a dangerous one, because a human approves exactly the arguments that were
sent. Numbers are clamped to their bounds only for tools that only read.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from types import UnionType
from typing import Any

from fumehood.core.errors import ArgumentsRefused, EngineError, InvalidParams, ToolDisabled
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.executors.program_arguments import program_faults
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.registry.definitions import unenforced_options
from fumehood.registry.json_schema import TooCostly, Violation

MISFIT = (
    "This agent's own configuration of the tool does not fit it. Its operator must mend it. "
    "Do not retry."
)
"""Does not name the argument: fixed arguments are hidden from the caller."""

_INTEGER = re.compile(r"^[+-]?\d{1,300}$", re.ASCII)
_NUMBER = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?$", re.ASCII)
_BOOLEANS = {
    "true": True, "yes": True, "y": True, "on": True, "1": True,
    "false": False, "no": False, "n": False, "off": False, "0": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValidatedCall:
    """A call whose arguments satisfy the tool's schema."""

    resolved: ResolvedCall
    arguments: JsonObject
    warnings: tuple[str, ...]

    @property
    def shown_arguments(self) -> JsonObject:
        """The arguments that the caller may see: without those that its agent fixes."""
        binding = self.resolved.binding
        if binding is None or not binding.fixed:
            return self.arguments
        return {name: v for name, v in self.arguments.items() if name not in binding.fixed}


def validate(resolved: ResolvedCall) -> ValidatedCall:
    """Coerce and check the arguments, and refuse options that this version cannot enforce.

    Raises:
        InvalidParams: with every offending path in `fields`.
        ToolDisabled: an argument fixed by the agent's configuration does not fit the tool.
    """
    _refuse_unenforced(resolved)
    tool = resolved.tool.definition
    fixed = resolved.binding.fixed if resolved.binding is not None else {}
    arguments, warnings = coerce(_given(resolved), tool)
    arguments |= copy.deepcopy(fixed)
    try:
        violations = resolved.tool.arguments.violations(arguments)
    except TooCostly:
        raise InvalidParams(
            "The arguments are too large to check. Send fewer or flatter ones."
        ) from None
    if refuses_unknown(tool):
        known = tool.parameters.get("properties", {})
        violations += [
            Violation(name[:80], "is not a parameter of this tool")
            for name in arguments
            if name not in known
        ]
    if not violations:
        violations = [Violation(*fault) for fault in program_faults(tool.executor, arguments)]
    if fixed and any(_is_below(violation.path, fixed) for violation in violations):
        raise ToolDisabled(MISFIT)
    if violations:
        raise InvalidParams(_sentence(violations), fields=_fields(violations))
    return ValidatedCall(resolved, arguments, (*resolved.warnings, *warnings))


def mask_fixed_arguments(error: EngineError | None, validated: ValidatedCall) -> EngineError | None:
    """Hide an error about a fixed argument: a function's own types may refuse one, too."""
    binding = validated.resolved.binding
    if binding is None or not isinstance(error, ArgumentsRefused):
        return error
    return ToolDisabled(MISFIT) if any(_is_below(f, binding.fixed) for f in error.fields) else error


def _given(resolved: ResolvedCall) -> JsonObject:
    """The caller's arguments on top of its agent's defaults.

    Fixed arguments are hidden from the caller, so giving one is an unknown parameter.
    """
    arguments, binding = resolved.request.arguments, resolved.binding
    if binding is None:
        return arguments
    taken = [name for name in arguments if name in binding.fixed]
    if taken:
        violations = [Violation(name[:80], "is not a parameter of this tool") for name in taken]
        raise InvalidParams(_sentence(violations), fields=_fields(violations))
    return {**copy.deepcopy(binding.defaults), **arguments}


def _is_below(path: str, fixed: JsonObject) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in fixed)


def _refuse_unenforced(resolved: ResolvedCall) -> None:
    refused = unenforced_options(resolved.request.options)
    if refused:
        words = "; ".join(f"{name} ({promise})" for name, promise in refused)
        raise InvalidParams(
            f"These options are not enforced by this version: {words}. Leave them out.",
            fields=[f"options.{name}" for name, _ in refused],
        )


def _fields(violations: list[Violation]) -> list[str]:
    return list(dict.fromkeys(violation.path for violation in violations))


def _sentence(violations: list[Violation]) -> str:
    shown = "; ".join(f"{v.path or 'arguments'} {v.message}" for v in violations[:5])
    more = f"; and {len(violations) - 5} more" if len(violations) > 5 else ""
    return f"The arguments are wrong: {shown}{more}."


# -- coercion ------------------------------------------------------------------------------


def coerce(arguments: JsonObject, tool: ToolDefinition) -> tuple[JsonObject, tuple[str, ...]]:
    """The arguments in the types of the tool's schema, with a warning for each change.

    Defaults of missing parameters are filled in without a warning. A value that cannot be coerced
    is left for validation to refuse.
    """
    properties: JsonObject = tool.parameters.get("properties", {})
    forgiving = not tool.strict and not tool.dangerous
    effective: JsonObject = {}
    warnings: list[str] = []
    for name, value in arguments.items():
        schema = properties.get(name)
        if schema is None:
            if forgiving and _drops_unknown(tool.parameters):
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


def refuses_unknown(tool: ToolDefinition) -> bool:
    """Whether every parameter that the schema does not name is an error."""
    return (tool.strict or tool.dangerous) and _drops_unknown(tool.parameters)


def _drops_unknown(parameters: JsonObject) -> bool:
    # A schema with rules of its own for further parameters decides by itself.
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
    kinds: dict[str, type | UnionType] = {"integer": int, "number": int | float}
    if clamp and kind in kinds and _is_number(coerced) and isinstance(coerced, kinds[kind]):
        clamped = _clamp(coerced, schema)
        if clamped != coerced:
            notes.append(f"{name}: {_shown(coerced)} is out of range, {_shown(clamped)} was used")
            coerced = clamped
    return coerced, notes


def _to_kind(value: Any, kind: str) -> Any:
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
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind_name(value: Any) -> str:
    return {str: "a string", float: "a number", int: "an integer"}.get(type(value), "a value")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"
