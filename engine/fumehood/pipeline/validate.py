"""Validate: coerce the arguments to the tool's schema, or report every violation.

Second stage. Takes a `ResolvedCall`, returns a `ValidatedCall` with the effective arguments (after
coercion and defaults), which all later stages use.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from fumehood.core.call import CallRequest
from fumehood.core.errors import ArgumentsRefused, EngineError, InvalidParams, ToolDisabled
from fumehood.core.json_types import JsonObject
from fumehood.core.names import MAX_NAME_CHARACTERS, listed, nearest
from fumehood.core.tool import parameter_names
from fumehood.identity.model import Binding
from fumehood.pipeline.coerce import coerce, is_marked, refuses_unknown
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.registry.arguments import argument_faults
from fumehood.registry.index import RegisteredTool
from fumehood.registry.json_schema import UNKNOWN, TooCostly, Violation

MISFIT = (
    "The agent's configuration of this tool is invalid. The operator must fix it. Do not retry."
)
"""The error message if an argument that the agent's configuration fixes does not fit the tool. The
message does not name the argument, because fixed arguments are hidden from the caller."""


@dataclass(frozen=True, slots=True)
class ValidatedCall:
    """A call whose arguments satisfy the tool's schema."""

    resolved: ResolvedCall
    arguments: JsonObject
    warnings: tuple[str, ...]

    @property
    def request(self) -> CallRequest:
        return self.resolved.request

    @property
    def tool(self) -> RegisteredTool:
        return self.resolved.tool

    @property
    def binding(self) -> Binding | None:
        """The agent's configuration of the tool, or None if the call is not for an agent."""
        return self.resolved.binding

    @property
    def shown_arguments(self) -> JsonObject:
        """The arguments that the caller may see. The agent's fixed arguments are omitted."""
        binding = self.resolved.binding
        if binding is None or not binding.fixed:
            return self.arguments
        return {name: v for name, v in self.arguments.items() if name not in binding.fixed}


def validate(resolved: ResolvedCall) -> ValidatedCall:
    """Coerce and check the arguments.

    Raises:
        InvalidParams: the arguments are invalid; `fields` lists the path of each violation.
        ToolDisabled: an argument fixed by the agent's configuration does not fit the tool.
    """
    tool = resolved.tool.definition
    given = resolved.request.arguments
    is_plain = resolved.binding is None and resolved.tool.arguments.is_plainly_right(given)
    is_plain = is_plain and not is_marked(given, tool)
    if is_plain and not argument_faults(tool.executor, given):  # nothing to coerce: most calls
        return ValidatedCall(resolved, dict(given), resolved.warnings)
    fixed = resolved.binding.fixed if resolved.binding is not None else {}
    arguments, warnings = coerce(_given(resolved), tool)
    if fixed:
        arguments |= copy.deepcopy(fixed)
    try:
        violations = resolved.tool.arguments.violations(arguments)
    except TooCostly:
        raise InvalidParams(
            "The arguments are too large to check. Send fewer or flatter ones."
        ) from None
    if refuses_unknown(tool):
        known = parameter_names(tool.parameters)
        violations += [
            Violation(name[:MAX_NAME_CHARACTERS], UNKNOWN)
            for name in arguments
            if name not in known
        ]
    if not violations:
        violations = [Violation(*fault) for fault in argument_faults(tool.executor, arguments)]
    if fixed and any(_is_below(violation.path, fixed) for violation in violations):
        raise ToolDisabled(MISFIT)
    if violations:
        raise InvalidParams(_sentence(violations, _visible(resolved)), fields=_fields(violations))
    return ValidatedCall(resolved, arguments, (*resolved.warnings, *warnings))


def mask_fixed_arguments(error: EngineError | None, validated: ValidatedCall) -> EngineError | None:
    """Return `ToolDisabled` if `error` is about an argument that the agent's configuration fixes.
    Otherwise return `error` unchanged.

    The caller of a tool must not see its fixed arguments. An error about one can come from a host
    function whose own parameter types refuse the argument.
    """
    binding = validated.binding
    if binding is None or not isinstance(error, ArgumentsRefused):
        return error
    return ToolDisabled(MISFIT) if any(_is_below(f, binding.fixed) for f in error.fields) else error


def _given(resolved: ResolvedCall) -> JsonObject:
    """Merge the agent's defaults with the caller's arguments. The caller's arguments take
    precedence.

    Raises:
        InvalidParams: the caller gave an argument that the agent's configuration fixes. Fixed
            arguments are hidden, so the message is the same as for an unknown parameter.
    """
    arguments, binding = resolved.request.arguments, resolved.binding
    if binding is None:
        return arguments
    taken = [name for name in arguments if name in binding.fixed]
    if taken:
        violations = [Violation(name[:MAX_NAME_CHARACTERS], UNKNOWN) for name in taken]
        raise InvalidParams(_sentence(violations, _visible(resolved)), fields=_fields(violations))
    return {**copy.deepcopy(binding.defaults), **arguments}


def _visible(resolved: ResolvedCall) -> list[str]:
    """Return the names of the parameters that the caller may know. Required parameters come
    first.
    """
    parameters = resolved.tool.definition.parameters
    fixed = resolved.binding.fixed if resolved.binding is not None else {}
    required = parameters.get("required", ())
    visible = [name for name in parameters.get("properties", {}) if name not in fixed]
    return sorted(visible, key=lambda name: name not in required)


def _is_below(path: str, fixed: JsonObject) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in fixed)


def _fields(violations: list[Violation]) -> list[str]:
    return list(dict.fromkeys(violation.path for violation in violations))


def _sentence(violations: list[Violation], visible: Sequence[str]) -> str:
    """Describe the violations in one text. For an unknown parameter, suggest a similar name, or
    list all `visible` names.
    """
    parts, has_strange = [], False
    for violation in violations[:5]:
        near = nearest(violation.path, visible) if violation.message == UNKNOWN else []
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        parts.append(f"{violation.path or 'arguments'} {violation.message}{meant}")
        has_strange |= violation.message == UNKNOWN and "." not in violation.path and not near
    more = f"; and {len(violations) - 5} more" if len(violations) > 5 else ""
    known = f" {_named(visible)}" if has_strange else ""
    return f"The arguments are wrong: {'; '.join(parts)}{more}.{known}"


def _named(visible: Sequence[str]) -> str:
    if not visible:
        return "It has no parameters."
    return f"Its parameters: {listed([repr(name[:MAX_NAME_CHARACTERS]) for name in visible])}."
