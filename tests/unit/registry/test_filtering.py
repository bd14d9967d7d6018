"""Filtering: what suits an agent stays, and every other tool has its reason."""

from __future__ import annotations

from decimal import Decimal

import pytest

from fumehood.core.tool import ToolDefinition
from fumehood.registry.listing import filter_tools
from support.definitions import function_definition


def _tool(name: str, **fields: object) -> ToolDefinition:
    return function_definition(name=name, **fields)


TOOLS = (
    _tool("read_a", category="files", cost_per_use=Decimal("0.01")),
    _tool("read_b", category="web"),
    _tool("wipe", category="files", dangerous=True),
    _tool("off", category="files", is_active=False),
    _tool("plain"),
    _tool("dear", category="files", cost_per_use=Decimal(2)),
)


def _kept(**wishes: object) -> list[str]:
    return [tool.name for tool in filter_tools(TOOLS, **wishes).tools]


@pytest.mark.row("R2")
def test_dangerous_tools_are_left_out_unless_they_are_asked_for() -> None:
    assert _kept() == ["read_a", "read_b", "plain", "dear"]
    assert "wipe" in _kept(exclude_dangerous=False)


@pytest.mark.row("R2")
def test_categories_absent_mean_all_and_empty_ones_none() -> None:
    assert _kept(categories={"web"}) == ["read_b"]
    assert _kept(categories=set()) == []
    assert len(_kept(categories=None)) == 4


@pytest.mark.row("R2")
def test_tool_that_costs_just_as_much_stays() -> None:
    assert _kept(max_cost=Decimal("0.01")) == ["read_a", "read_b", "plain"]
    assert _kept(max_cost=Decimal("0.009")) == ["read_b", "plain"]
    assert _kept(max_cost=Decimal(0)) == ["read_b", "plain"]


@pytest.mark.row("R2")
def test_at_most_so_many_in_the_order_they_came() -> None:
    assert _kept(at_most=2) == ["read_a", "read_b"]
    assert _kept(at_most=0) == []


@pytest.mark.row("R2")
def test_every_tool_is_either_kept_or_has_a_reason() -> None:
    selection = filter_tools(TOOLS, categories={"files"}, max_cost=Decimal(1), at_most=5)
    assert [tool.name for tool in selection.tools] == ["read_a"]
    assert {each.name: each.reason for each in selection.left_out} == {
        "read_b": "its category is web",
        "wipe": "it is dangerous",
        "off": "it is disabled",
        "plain": "its category is none",
        "dear": "it costs 2 a use",
    }
