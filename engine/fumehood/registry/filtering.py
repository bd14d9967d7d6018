"""Which tools suit an agent, and why the others were left out (mission R2). Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from decimal import Decimal

from fumehood.core.tool import ToolDefinition


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A tool that was not chosen, and the first reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The tools that were chosen, in their order, and those that were not."""

    tools: tuple[ToolDefinition, ...]
    left_out: tuple[LeftOut, ...]


def filter_tools(
    tools: Iterable[ToolDefinition],
    *,
    categories: Collection[str] | None = None,
    exclude_dangerous: bool = True,
    max_cost: Decimal | None = None,
    at_most: int | None = None,
) -> Selection:
    """Choose among tools. Absent `categories` means all, an empty collection none.

    `max_cost` is compared with `cost_per_use`, and a tool that costs just as much stays.
    """
    kept: list[ToolDefinition] = []
    left_out: list[LeftOut] = []
    for tool in tools:
        reason = _reason_against(tool, categories, exclude_dangerous, max_cost)
        if reason is None and at_most is not None and len(kept) >= at_most:
            reason = f"more than {at_most} tools"
        if reason is None:
            kept.append(tool)
        else:
            left_out.append(LeftOut(tool.name, reason))
    return Selection(tuple(kept), tuple(left_out))


def _reason_against(
    tool: ToolDefinition,
    categories: Collection[str] | None,
    exclude_dangerous: bool,
    max_cost: Decimal | None,
) -> str | None:
    if not tool.is_active:
        return "it is switched off"
    if exclude_dangerous and tool.dangerous:
        return "it is dangerous"
    if categories is not None and tool.category not in categories:
        return f"its category is {tool.category or 'none'}"
    if max_cost is not None and tool.cost_per_use > max_cost:
        return f"it costs {tool.cost_per_use} a use"
    return None
