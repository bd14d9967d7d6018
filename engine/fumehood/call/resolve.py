"""Resolve: from a name to one version of one tool that may be called at all.

First stage. Takes a `CallRequest`, returns a `ResolvedCall`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from fumehood.model.call import CallRequest
from fumehood.model.errors import ToolDeprecated, ToolDisabled
from fumehood.model.tool import ToolDefinition
from fumehood.registry.index import RegisteredTool, ToolIndex


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call whose tool exists, is switched on and has not passed its sunset date."""

    request: CallRequest
    tool: RegisteredTool
    warnings: tuple[str, ...]


def resolve(request: CallRequest, registry: ToolIndex, today: date) -> ResolvedCall:
    """Find the tool.

    Raises:
        ToolNotFound: no such name or version.
        ToolDisabled: switched off, or host code that the operator did not allow.
        ToolDeprecated: the sunset date has passed.
    """
    tool = registry.get(request.tool)
    definition = tool.definition
    if not definition.is_active:
        raise ToolDisabled(f"The tool {definition.name} is switched off. Do not retry.")
    if tool.disabled_because is not None:
        raise ToolDisabled(f"The tool {definition.name} is disabled. {tool.disabled_because}")
    return ResolvedCall(request, tool, _deprecation(definition, today))


def _deprecation(definition: ToolDefinition, today: date) -> tuple[str, ...]:
    if definition.sunset_date is not None and definition.sunset_date < today:
        raise ToolDeprecated(
            f"{definition.name}@{definition.version} ended on {definition.sunset_date}."
            + (f" Use {definition.replacement} instead." if definition.replacement else ""),
            extra={
                "replacement": definition.replacement,
                "sunset_date": definition.sunset_date.isoformat(),
                "migration_guide": definition.migration_guide,
            },
        )
    if definition.deprecated or definition.sunset_date is not None:
        when = f", until {definition.sunset_date}" if definition.sunset_date else ""
        use = f"; use {definition.replacement}" if definition.replacement else ""
        return (f"{definition.name}@{definition.version} is deprecated{when}{use}",)
    return ()
