"""Registrations: REST and MCP only, in the database before anybody sees them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fumehood.core.errors import (
    EngineError,
    IdempotencyConflict,
    PermissionDenied,
    ToolNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.registry.definitions import InvalidDefinition
from fumehood.registry.index import Source, ToolIndex
from fumehood.registry.registrations import Registrations
from fumehood.storage import changes
from fumehood.storage.database import Database, open_database
from fumehood.storage.errors import WriteFailed
from support.definitions import answer_nothing, function_definition

pytestmark = pytest.mark.anyio

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


def index_with_act() -> ToolIndex:
    index = ToolIndex()
    index.register(function_definition(), Source.PROGRAM, function=answer_nothing)
    return index


@pytest.mark.row("R1", "T4")
async def test_registered_versions_stand_side_by_side_and_again_after_a_start(
    database: Database,
) -> None:
    index = index_with_act()
    registrations = Registrations(index, database)
    await registrations.register(rest(), **BY)
    await registrations.register(rest(version="1.1.0"), **BY)
    assert index.get("get_weather").definition.version == "1.1.0"
    assert index.get("get_weather@1.0.0").source is Source.API
    again = index_with_act()
    assert Registrations(again, database).load_faults == []
    assert [t.definition.version for t in again.versions("get_weather")] == ["1.1.0", "1.0.0"]


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
        (rest(requires_auth=True), InvalidDefinition),
        ([], InvalidDefinition),
    ],
    ids=["native", "builtin", "unsandboxed", "others-name", "bad-name", "not-enforced", "list"],
)
async def test_what_may_not_be_registered_leaves_no_trace(
    database: Database, document: Any, error: type[EngineError]
) -> None:
    index = index_with_act()
    registrations = Registrations(index, database)
    with pytest.raises(error):
        await registrations.register(document, **BY)
    assert [tool.definition.name for tool in index] == ["act"]
    assert Registrations(ToolIndex(), database).load_faults == []
    assert await database.read(lambda c: changes.list_changes(c, 10)) == []


@pytest.mark.row("R1")
async def test_same_version_twice_is_a_conflict_and_replacing_it_is_not(
    database: Database,
) -> None:
    index = index_with_act()
    registrations = Registrations(index, database)
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
async def test_tools_of_other_sources_can_be_switched_but_not_changed(database: Database) -> None:
    index = index_with_act()
    registrations = Registrations(index, database)
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


@pytest.mark.row("R1")
async def test_deleted_version_is_gone_and_its_switch_with_it(database: Database) -> None:
    index = index_with_act()
    registrations = Registrations(index, database)
    await registrations.register(rest(), **BY)
    await registrations.switch("get_weather", None, is_active=False, **BY)
    await registrations.delete("get_weather", "1.0.0", **BY)
    with pytest.raises(ToolNotFound):
        index.get("get_weather")
    await registrations.register(rest(), **BY)
    assert index.get("get_weather").definition.is_active is True


@pytest.mark.row("R1", "A7")
async def test_every_change_is_recorded_with_who_made_it(database: Database) -> None:
    registrations = Registrations(index_with_act(), database)
    await registrations.register(rest(), **BY)
    await registrations.switch("get_weather", None, is_active=False, **BY)
    await registrations.delete("get_weather", "1.0.0", **BY)
    rows = await database.read(lambda c: changes.list_changes(c, 10))
    assert [row["action"] for row in rows] == ["tool.delete", "tool.deactivate", "tool.register"]
    assert {row["principal_id"] for row in rows} == {"approver:owner"}


@pytest.mark.row("D6")
async def test_change_that_cannot_be_written_is_seen_by_nobody(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(job: object) -> None:
        raise WriteFailed("database or disk is full")

    index = index_with_act()
    registrations = Registrations(index, database)
    monkeypatch.setattr(database, "write", full)
    with pytest.raises(WriteFailed):
        await registrations.register(rest(), **BY)
    with pytest.raises(WriteFailed):
        await registrations.switch("act", None, is_active=False, **BY)
    assert [tool.definition.name for tool in index] == ["act"]
    assert index.get("act").definition.is_active is True
