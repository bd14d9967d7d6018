"""Discovery: one faulty package leaves the others in, and host code waits for the operator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fumehood import ToolDefinition, tool
from fumehood.registry.discover import LoadFault, discover
from fumehood.registry.index import Source, ToolIndex
from support.definitions import expression_document


@dataclass
class Offer:
    """Stands for an installed entry point."""

    value: str
    offered: Any
    distribution: str | None = "someones-tools"

    @property
    def module(self) -> str:
        return self.value.split(":")[0]

    @property
    def dist(self) -> Any:
        return None if self.distribution is None else SimpleNamespace(name=self.distribution)

    def load(self) -> Any:
        if isinstance(self.offered, Exception):
            raise self.offered
        return self.offered


def _found(*offers: Offer) -> Iterable[EntryPoint]:
    return cast("Iterable[EntryPoint]", offers)


def _expression(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate(expression_document(**fields))


@tool(sandboxed=False)
async def on_the_host() -> None:
    """Run in the engine's process."""


def _names(index: ToolIndex) -> list[str]:
    return [tool.definition.name for tool in index]


@pytest.mark.row("R4")
def test_package_that_fails_to_load_leaves_the_others_in() -> None:
    index = ToolIndex()
    faults = discover(
        index,
        (),
        _found(
            Offer("a:tool", ImportError("no module named x")),
            Offer("b:tool", _expression(name="b")),
            Offer("c:tool", ZeroDivisionError("oops")),
            Offer("d:tool", _expression(name="d")),
        ),
    )
    assert _names(index) == ["b", "d"]
    assert faults == [
        LoadFault("a:tool", "ImportError: no module named x"),
        LoadFault("c:tool", "ZeroDivisionError: oops"),
    ]


@pytest.mark.row("R4")
@pytest.mark.parametrize("offered", [None, 5, "text", object, lambda: None, {"name": "a"}])
def test_what_is_no_tool_is_left_out_with_the_reason(offered: Any) -> None:
    index = ToolIndex()
    faults = discover(index, (), _found(Offer("a:tool", offered)))
    assert _names(index) == []
    assert len(faults) == 1
    assert "neither a ToolDefinition nor made by @tool" in faults[0].reason


@pytest.mark.row("R4")
def test_one_entry_point_may_bring_several_tools_and_only_the_wrong_ones_stay_out() -> None:
    index = ToolIndex()
    offered = [_expression(name="a"), 5, _expression(name="a"), _expression(name="b")]
    faults = discover(index, (), _found(Offer("pack:tools", offered)))
    assert _names(index) == ["a", "b"]
    assert len(faults) == 2
    assert {fault.entry_point for fault in faults} == {"pack:tools"}


@pytest.mark.row("R4", "S1")
def test_host_tool_is_disabled_until_the_operator_names_it() -> None:
    index = ToolIndex()
    assert discover(index, (), _found(Offer("a:tool", on_the_host))) == []
    assert "host_tools" in str(index.get("on_the_host").disabled_because)
    allowed = ToolIndex()
    discover(allowed, ("on_the_host",), _found(Offer("a:tool", on_the_host)))
    assert allowed.get("on_the_host").disabled_because is None


@pytest.mark.row("S1")
@pytest.mark.parametrize("named", ["on_the", "on_the_host_", "*", "on_*", "ON_THE_HOST", ""])
def test_host_tools_are_named_exactly(named: str) -> None:
    index = ToolIndex()
    discover(index, (named,), _found(Offer("a:tool", on_the_host)))
    assert index.get("on_the_host").disabled_because is not None


@pytest.mark.row("S1")
def test_sandboxed_tool_needs_no_permission() -> None:
    index = ToolIndex()
    discover(index, (), _found(Offer("a:tool", _expression())))
    assert index.get("sums").disabled_because is None


@pytest.mark.row("R4")
@pytest.mark.parametrize("kind", ["REST", "MCP"])
def test_entry_point_brings_no_tools_of_other_kinds(kind: str) -> None:
    index = ToolIndex()
    definition = ToolDefinition.model_validate({"name": "a", "description": "b", "type": kind})
    faults = discover(index, (), _found(Offer("a:tool", definition)))
    assert _names(index) == []
    assert "only BUILTIN and NATIVE tools" in faults[0].reason


@pytest.mark.row("R1", "R4")
def test_builtin_tools_come_first_whatever_the_order() -> None:
    index = ToolIndex()
    faults = discover(
        index,
        (),
        _found(
            Offer("aaa:sums", _expression(version="9.0.0")),
            Offer("fumehood_tools.sums:sums", _expression(), distribution="fumehood"),
        ),
    )
    assert index.get("sums").source is Source.BUILTIN
    assert [fault.entry_point for fault in faults] == ["aaa:sums"]


@pytest.mark.row("R1", "R4")
@pytest.mark.parametrize(
    ("value", "distribution"),
    [
        ("fumehood_tools.sums:sums", "someones-tools"),
        ("fumehood_tools.sums:sums", None),
        ("fumehood_tools_more.sums:sums", "fumehood"),
        ("other:sums", "fumehood"),
    ],
)
def test_another_package_cannot_call_itself_built_in(value: str, distribution: str | None) -> None:
    index = ToolIndex()
    discover(index, (), _found(Offer(value, _expression(), distribution=distribution)))
    assert index.get("sums").source is Source.ENTRY_POINT


@pytest.mark.row("R4")
def test_type_builtin_is_refused_from_another_package() -> None:
    index = ToolIndex()
    faults = discover(index, (), _found(Offer("a:b", _expression(type="BUILTIN"))))
    assert _names(index) == []
    assert "BUILTIN" in faults[0].reason


@pytest.mark.row("R4")
def test_package_that_exits_while_it_is_loaded_leaves_the_others_in() -> None:
    class Exits(Offer):
        def load(self) -> Any:
            raise SystemExit(1)

    index = ToolIndex()
    faults = discover(
        index, (), _found(Exits("a:tool", None), Offer("b:tool", _expression(name="b")))
    )
    assert _names(index) == ["b"]
    assert [fault.entry_point for fault in faults] == ["a:tool"]
