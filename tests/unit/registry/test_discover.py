"""Tools from packages and over the API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest

from fumehood import ToolDefinition, tool
from fumehood.core.errors import (
    EngineError,
    IdempotencyConflict,
    PermissionDenied,
    ToolNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.registry.definitions import InvalidDefinition, check_definition
from fumehood.registry.discover import LoadFault, discover
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.storage import changes
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import WriteFailed
from support.definitions import answer_nothing, expression_document, function_definition

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Installed:
    """Stands for an installed distribution."""

    name: str


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
        return None if self.distribution is None else Installed(self.distribution)

    def load(self) -> Any:
        if isinstance(self.offered, BaseException):
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
def test_package_that_fails_to_load_does_not_exclude_others() -> None:
    index = ToolIndex()
    faults = discover(
        index,
        (),
        _found(
            Offer("a:tool", ImportError("no module named x")),
            Offer("b:tool", _expression(name="b")),
            Offer("c:tool", ZeroDivisionError("oops")),
            Offer("d:tool", _expression(name="d")),
            Offer("e:tool", SystemExit(1)),
            Offer("f:tool", _expression(name="f")),
        ),
    )
    assert _names(index) == ["b", "d", "f"]
    assert faults == [
        LoadFault("a:tool", "ImportError: no module named x"),
        LoadFault("c:tool", "ZeroDivisionError: oops"),
        LoadFault("e:tool", "SystemExit: 1"),
    ]


@pytest.mark.row("R4")
def test_invalid_tools_of_an_entry_point_are_left_out_alone() -> None:
    index = ToolIndex()
    offered = [_expression(name="a"), object, _expression(name="a"), _expression(name="b")]
    faults = discover(index, (), _found(Offer("pack:tools", offered)))
    assert _names(index) == ["a", "b"]
    assert len(faults) == 2
    assert "neither a ToolDefinition nor made by @tool" in faults[0].reason
    assert {fault.entry_point for fault in faults} == {"pack:tools"}


@pytest.mark.row("R4", "S1")
def test_host_tool_of_a_package_is_disabled_until_the_operator_allows_it() -> None:
    index = ToolIndex()
    assert discover(index, (), _found(Offer("a:tools", [on_the_host, _expression()]))) == []
    assert "host_tools" in str(index.get("on_the_host").disabled_because)
    assert index.get("sums").disabled_because is None  # the twin: it runs in a sandbox
    allowed = ToolIndex()
    discover(allowed, ("on_the_host",), _found(Offer("a:tool", on_the_host)))
    assert allowed.get("on_the_host").disabled_because is None


@pytest.mark.row("S1")
@pytest.mark.parametrize("named", ["on_the", "on_the_host_", "*", "on_*", "ON_THE_HOST", ""])
def test_allowed_host_tools_match_exactly(named: str) -> None:
    index = ToolIndex()
    discover(index, (named,), _found(Offer("a:tool", on_the_host)))
    assert index.get("on_the_host").disabled_because is not None


@pytest.mark.row("R4")
@pytest.mark.parametrize("kind", ["REST", "MCP"])
def test_entry_point_cannot_bring_rest_or_mcp_tools(kind: str) -> None:
    index = ToolIndex()
    definition = ToolDefinition.model_validate({"name": "a", "description": "b", "type": kind})
    faults = discover(index, (), _found(Offer("a:tool", definition)))
    assert _names(index) == []
    assert "only BUILTIN and NATIVE tools" in faults[0].reason


@pytest.mark.row("R1")
def test_definition_of_every_built_in_tool_is_valid() -> None:
    """The engine does not check them at its start."""
    index = ToolIndex()
    assert discover(index, ()) == []
    built_in = [tool.definition for tool in index if tool.source is Source.BUILTIN]
    assert len(built_in) > 10
    for definition in built_in:
        if definition.executor != "http":  # the operator sets the endpoint of search_web
            check_definition(definition)


@pytest.mark.row("R1", "R4")
def test_builtin_tools_take_precedence_in_any_order() -> None:
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
def test_package_cannot_claim_to_be_built_in(value: str, distribution: str | None) -> None:
    index = ToolIndex()
    discover(index, (), _found(Offer(value, _expression(), distribution=distribution)))
    assert index.get("sums").source is Source.ENTRY_POINT


# -- Registrations -------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADMIN = Principal("approver:owner", frozenset({Scope.ADMIN}))
BY = {"by": ADMIN, "now": NOW}


def rest(**fields: Any) -> dict[str, Any]:
    return {
        "name": "get_weather",
        "type": "REST",
        "description": "Get the weather of a city.",
        "endpoint": "https://weather.example/v1",
        "method": "GET",
        "parameters": {"properties": {"city": {"type": "string"}}},
        **fields,
    }


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = open_database(tmp_path / "state.db")
    yield database
    database.close()


@pytest.fixture
def index() -> ToolIndex:
    return index_with_act()


@pytest.fixture
def registrations(index: ToolIndex, database: Database) -> Registrations:
    return Registrations(index, database)


def index_with_act() -> ToolIndex:
    index = ToolIndex()
    index.register(function_definition(), Source.PROGRAM, function=answer_nothing)
    return index


@pytest.mark.row("R1")
@pytest.mark.parametrize(
    ("document", "error"),
    [
        (rest(type="NATIVE", endpoint=None, method=None), InvalidDefinition),
        (
            rest(type="BUILTIN", executor="expression", endpoint=None, method=None),
            InvalidDefinition,
        ),
        (rest(sandboxed=False), InvalidDefinition),
        (rest(name="act", version="2.0.0"), InvalidDefinition),
        (rest(name="bad name"), InvalidDefinition),
        (rest(executor="function"), InvalidDefinition),
        ([], InvalidDefinition),
    ],
    ids=["native", "builtin", "unsandboxed", "others-name", "bad-name", "executor", "list"],
)
async def test_refused_registration_leaves_no_trace(
    index: ToolIndex,
    registrations: Registrations,
    database: Database,
    document: Any,
    error: type[EngineError],
) -> None:
    with pytest.raises(error):
        await registrations.register(document, **BY)
    assert [tool.definition.name for tool in index] == ["act"]
    assert Registrations(ToolIndex(), database).load_faults == []
    assert await database.read(lambda c: changes.list_changes(c, 10)) == []


@pytest.mark.row("R1")
async def test_registering_an_existing_version_is_a_conflict_unless_replaced(
    index: ToolIndex,
    registrations: Registrations,
) -> None:
    await registrations.register(rest(), **BY)
    with pytest.raises(IdempotencyConflict):
        await registrations.register(rest(description="Another."), **BY)
    await registrations.replace("get_weather", "1.0.0", rest(description="Another."), **BY)
    assert index.get("get_weather").definition.description == "Another."
    with pytest.raises(InvalidDefinition):
        await registrations.replace("get_weather", "1.0.0", rest(version="2.0.0"), **BY)
    with pytest.raises(ToolNotFound):
        await registrations.replace("get_weather", "9.0.0", rest(version="9.0.0"), **BY)


@pytest.mark.row("R1")
async def test_tools_of_other_sources_can_be_disabled_but_not_changed(
    index: ToolIndex, registrations: Registrations, database: Database
) -> None:
    with pytest.raises(PermissionDenied):
        await registrations.replace("act", "1.0.0", rest(name="act"), **BY)
    with pytest.raises(PermissionDenied):
        await registrations.delete("act", "1.0.0", **BY)
    await registrations.switch("act", None, is_active=False, **BY)
    assert index.get("act").definition.is_active is False
    again = index_with_act()
    Registrations(again, database)
    assert again.get("act").definition.is_active is False
    await registrations.switch("act", "1.0.0", is_active=True, **BY)
    assert index.get("act").definition.is_active is True
    for name, version in (("nobody", None), ("act", "9.9.9")):
        with pytest.raises(ToolNotFound):
            await registrations.switch(name, version, is_active=False, **BY)


@pytest.mark.row("R1", "A7")
async def test_deleted_tool_is_gone_with_its_disabled_state_and_every_change_has_its_author(
    index: ToolIndex, registrations: Registrations, database: Database
) -> None:
    await registrations.register(rest(), **BY)
    await registrations.switch("get_weather", None, is_active=False, **BY)
    await registrations.delete("get_weather", "1.0.0", **BY)
    with pytest.raises(ToolNotFound):
        index.get("get_weather")
    rows = await database.read(lambda c: changes.list_changes(c, 10))
    assert [row["action"] for row in rows] == ["tool.delete", "tool.deactivate", "tool.register"]
    assert {row["principal_id"] for row in rows} == {"approver:owner"}
    await registrations.register(rest(), **BY)
    assert index.get("get_weather").definition.is_active is True


@pytest.mark.row("D6")
async def test_registry_change_that_cannot_be_stored_has_no_effect(
    index: ToolIndex,
    registrations: Registrations,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(job: object) -> None:
        raise WriteFailed("database or disk is full")

    monkeypatch.setattr(database, "write", full)
    with pytest.raises(WriteFailed):
        await registrations.register(rest(), **BY)
    with pytest.raises(WriteFailed):
        await registrations.switch("act", None, is_active=False, **BY)
    assert [tool.definition.name for tool in index] == ["act"]
    assert index.get("act").definition.is_active is True
