"""Agents: their tools, their callers, and what is seen of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from fumehood.core.errors import (
    IdempotencyConflict,
    PermissionDenied,
    ResourceNotFound,
    ToolDisabled,
    Unauthorized,
)
from fumehood.core.identity import Principal, Scope
from fumehood.identity.agents import Agents, seen_by_agent
from fumehood.identity.model import MAX_CONFIGURED, Agent, Binding, Change
from fumehood.identity.principals import require_binding, require_caller
from fumehood.storage.changes import list_changes
from fumehood.storage.database import Database
from fumehood.storage.errors import WriteFailed
from support.definitions import function_definition
from support.identities import ADMIN, NOW, bind, make_agent

pytestmark = pytest.mark.anyio


@pytest.mark.row("R3")
def test_bound_argument_cannot_be_both_fixed_and_default() -> None:
    Binding(tool="act", fixed={"a": 1}, defaults={"b": 1})
    with pytest.raises(ValidationError, match="is fixed and has a default"):
        Binding(tool="act", fixed={"a": 1, "b": 1}, defaults={"b": 2})


@pytest.mark.row("R3", "T4")
@pytest.mark.parametrize(
    ("tool", "name"), [("act", "act"), ("act@1.2.0", "act"), ("act@1.2.0-rc.1+x", "act")]
)
def test_binding_names_a_tool_with_or_without_version(tool: str, name: str) -> None:
    assert Binding(tool=tool).tool_name == name


@pytest.mark.parametrize(
    "tool",
    ["", "1act", "act@", "act@1@2", "a b", "act\n", "*", "act*", "a" * 65, "act@" + "1" * 101],
)
def test_binding_must_name_a_tool_exactly(tool: str) -> None:
    with pytest.raises(ValidationError):
        Binding(tool=tool)


@pytest.mark.parametrize("field", ["fixed", "defaults"])
def test_number_of_bound_arguments_is_bounded(field: str) -> None:
    fits: dict[str, Any] = {str(n): n for n in range(MAX_CONFIGURED)}
    Binding(tool="act", **{field: fits})
    with pytest.raises(ValidationError):
        Binding(tool="act", **{field: {**fits, "more": 1}})


@pytest.mark.parametrize(
    "fields",
    [
        {"id": ""}, {"id": "a b"}, {"id": "-a"}, {"id": "a" * 129}, {"id": "a/b"}, {"id": 1},
        {"id": "a", "principals": ["a b"]}, {"id": "a", "principals": ["p"] * 101},
        {"id": "a", "principals": "uid:1"}, {"id": "a", "is_enabled": "yes"},
        {"id": "a", "description": "x" * 2001}, {"id": "a", "scopes": ["admin"]},
    ],
)  # fmt: skip
def test_malformed_agent_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Agent.model_validate(fields)
    assert Agent.model_validate({"id": "a", "principals": ["uid:1", "token:ci"]}).is_enabled


# -- Agents --------------------------------------------------------------------------------


@pytest.fixture
def agents(database: Database) -> Agents:
    return Agents(database)


@pytest.mark.row("R3", "D4")
async def test_only_named_principals_can_act_for_an_agent(agents: Agents) -> None:
    await make_agent(agents, "a", "uid:1", "alice")
    await make_agent(agents, "b", "uid:1")
    await make_agent(agents, "nobodys")
    assert agents.spoken_for_by("uid:1") == {"a", "b"}
    assert agents.spoken_for_by("alice") == {"a"}
    assert agents.spoken_for_by("uid:10") == agents.spoken_for_by("") == frozenset()


@pytest.mark.row("R3", "T4")
async def test_tool_is_bound_once_regardless_of_version(agents: Agents) -> None:
    await make_agent(agents, "a")
    for tool in ("act", "act@1.0.0", "act@2.0.0"):
        await bind(agents, "a", [tool])
    assert [binding.tool for binding in agents.bindings("a")] == ["act@2.0.0"]
    await agents.unbind("a", "act", by=ADMIN, now=NOW)
    assert agents.bindings("a") == []
    assert agents.binding("a", "act") is None


@pytest.mark.row("R3")
async def test_agents_and_bindings_survive_a_restart(agents: Agents, database: Database) -> None:
    await make_agent(agents, "a", "uid:1", description="Buys.", is_enabled=False)
    await bind(agents, "a", ["act@1.0.0"], fixed={"x": [1, {"y": None}]}, defaults={"z": "ü"})
    again = Agents(database)
    assert again.all() == agents.all()
    assert again.bindings("a") == agents.bindings("a")
    assert again.binding("a", "act") == Binding(
        tool="act@1.0.0", fixed={"x": [1, {"y": None}]}, defaults={"z": "ü"}
    )
    assert again.spoken_for_by("uid:1") == {"a"}


async def test_creating_an_existing_agent_is_a_conflict(agents: Agents) -> None:
    await make_agent(agents, "a", "uid:1")
    with pytest.raises(IdempotencyConflict):
        await make_agent(agents, "a", "uid:2")
    assert agents.get("a").principals == ("uid:1",)


@pytest.mark.row("R3")
async def test_updated_agent_keeps_its_tools(agents: Agents, database: Database) -> None:
    await make_agent(agents, "a", "uid:1")
    await bind(agents, "a", ["act"])
    await agents.update(Agent(id="a", principals=("uid:2",)), by=ADMIN, now=NOW)
    assert agents.spoken_for_by("uid:1") == frozenset()
    assert agents.spoken_for_by("uid:2") == {"a"}
    for known in (agents, Agents(database)):
        assert [binding.tool for binding in known.bindings("a")] == ["act"]


@pytest.mark.row("R3", "D4")
async def test_new_agent_inherits_nothing_from_a_deleted_one_of_its_name(
    agents: Agents, database: Database
) -> None:
    await make_agent(agents, "a", "uid:1")
    await bind(agents, "a", ["act", "other"])
    await agents.delete("a", by=ADMIN, now=NOW)
    assert agents.spoken_for_by("uid:1") == frozenset()
    await make_agent(agents, "a", "uid:2")
    for known in (agents, Agents(database)):
        assert known.bindings("a") == []
        assert known.spoken_for_by("uid:1") == frozenset()


@pytest.mark.row("D4")
async def test_concurrent_binding_and_deletion_leaves_no_binding(
    agents: Agents, database: Database
) -> None:
    for _ in range(20):
        await make_agent(agents, "a")

        async def try_to_bind() -> None:
            with contextlib.suppress(ResourceNotFound):
                await bind(agents, "a", ["act"])

        async with anyio.create_task_group() as group:
            group.start_soon(try_to_bind)
            group.start_soon(lambda: agents.delete("a", by=ADMIN, now=NOW))
        await make_agent(agents, "a")
        assert Agents(database).bindings("a") == agents.bindings("a") == []
        await agents.delete("a", by=ADMIN, now=NOW)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(Agent(id="x"), by=ADMIN, now=NOW),
        lambda a: a.delete("x", by=ADMIN, now=NOW),
        lambda a: a.bind("x", Binding(tool="act"), by=ADMIN, now=NOW),
        lambda a: a.unbind("x", "act", by=ADMIN, now=NOW),
        lambda a: a.unbind("there", "act", by=ADMIN, now=NOW),
    ],
)
async def test_changing_a_missing_agent_is_refused(
    agents: Agents, database: Database, change: Callable[[Agents], Awaitable[None]]
) -> None:
    await make_agent(agents, "there")
    with pytest.raises(ResourceNotFound):
        await change(agents)
    assert len(await database.read(lambda c: list_changes(c, 10))) == 1


@pytest.mark.row("R1")
async def test_agent_change_that_cannot_be_stored_has_no_effect(
    agents: Agents, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_agent(agents, "a", "uid:1")
    await bind(agents, "a", ["act"])

    async def full(job: Any) -> Any:
        raise WriteFailed("the disk is full")

    monkeypatch.setattr(database, "write", full)
    for change in (
        lambda: make_agent(agents, "b", "uid:1"),
        lambda: bind(agents, "a", ["other"]),
        lambda: agents.unbind("a", "act", by=ADMIN, now=NOW),
        lambda: agents.update(Agent(id="a"), by=ADMIN, now=NOW),
        lambda: agents.delete("a", by=ADMIN, now=NOW),
    ):
        with pytest.raises(WriteFailed):
            await change()
    assert [agent.id for agent in agents.all()] == ["a"]
    assert [binding.tool for binding in agents.bindings("a")] == ["act"]
    assert agents.spoken_for_by("uid:1") == {"a"}


@pytest.mark.row("R1")
async def test_agent_changes_are_audited_without_argument_values(
    agents: Agents, database: Database
) -> None:
    await make_agent(agents, "a", "uid:1")
    await bind(agents, "a", ["act"], fixed={"key": "PRIVATE-VALUE"}, defaults={"to": "PRIVATE-TOO"})
    await agents.unbind("a", "act", by=ADMIN, now=NOW)
    await agents.delete("a", by=ADMIN, now=NOW)
    rows = await database.read(lambda c: list_changes(c, 10))
    assert [row["action"] for row in rows] == [
        "agent.delete", "agent.unbind", "agent.bind", "agent.create"
    ]  # fmt: skip
    assert {row["principal_id"] for row in rows} == {"approver:owner"}
    assert rows[2]["details"] == {
        "tool": "act", "fixed": ["key"], "defaults": ["to"], "is_enabled": True
    }  # fmt: skip
    assert "PRIVATE" not in str(rows)
    assert [Change.model_validate(row).in_words for row in rows] == [
        "deleted agent a", "took the tool act from agent a", "gave agent a the tool act",
        "made agent a",
    ]  # fmt: skip


# -- What an agent sees of its tool --------------------------------------------------------

TOOL = function_definition(
    parameters={
        "type": "object",
        "required": ["text", "account", "lines"],
        "properties": {
            "text": {"type": "string"},
            "account": {"type": "string", "description": "Whose account."},
            "lines": {"type": "integer", "maximum": 5},
        },
    },
    input_examples=({"text": "a", "account": "x", "lines": 1},),
)


@pytest.mark.row("R3")
def test_fixed_argument_is_hidden_from_the_agent() -> None:
    seen = seen_by_agent(TOOL, Binding(tool="act", fixed={"account": "secret-account"}))
    assert seen.parameters["properties"].keys() == {"text", "lines"}
    assert seen.parameters["required"] == ["text", "lines"]
    assert "account" not in json.dumps(seen.model_dump(mode="json"))


@pytest.mark.row("R3")
@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_alternatives_do_not_demand_what_the_agent_may_not_give(keyword: str) -> None:
    both = {"properties": {"account": {"type": "string"}}, "required": ["account", "text"]}
    named: Any = {"account": {"type": "string"}, "text": {"type": "string"}}
    tool = function_definition(named, schema={keyword: [both]})
    seen = seen_by_agent(tool, Binding(tool="act", fixed={"account": "mine"})).parameters
    assert seen[keyword] == [{"properties": {}, "required": ["text"]}]
    assert seen["properties"].keys() == {"text"}
    assert tool.parameters[keyword] == [both]


@pytest.mark.row("R3")
def test_fixed_argument_behind_a_reference_at_the_root_is_hidden() -> None:
    named = {"account": {"type": "string"}, "text": {"type": "string"}}
    target = {"type": "object", "properties": named, "required": ["account", "text"]}
    tool = function_definition().model_copy(
        update={"parameters": {"type": "object", "$ref": "#/$defs/A", "$defs": {"A": target}}}
    )
    seen = seen_by_agent(tool, Binding(tool="act", fixed={"account": "mine"})).parameters
    assert (list(seen["properties"]), seen["required"]) == (["text"], ["text"])
    assert "$ref" not in seen


@pytest.mark.row("R3")
def test_argument_with_an_agent_default_is_optional() -> None:
    seen = seen_by_agent(TOOL, Binding(tool="act", defaults={"lines": 3}))
    assert seen.parameters["properties"]["lines"] == {
        "type": "integer",
        "maximum": 5,
        "default": 3,
    }
    assert seen.parameters["required"] == ["text", "account"]


# -- What a principal may do ---------------------------------------------------------------


@pytest.mark.row("D4")
@pytest.mark.parametrize("scopes", [set(), {Scope.APPROVE}, {Scope.ADMIN, Scope.APPROVE}])
def test_only_the_call_scope_permits_calls(scopes: set[Scope]) -> None:
    with pytest.raises(Unauthorized):
        require_caller(None)
    with pytest.raises(PermissionDenied):
        require_caller(Principal("approver:owner", frozenset(scopes)))
    caller = Principal("uid:1", frozenset({Scope.CALL}))
    assert require_caller(caller) is caller


@pytest.mark.row("R3")
def test_unbound_tool_is_denied_and_disabled_binding_is_disabled() -> None:
    with pytest.raises(PermissionDenied, match="has no tool 'act'"):
        require_binding("a", "act", None)
    with pytest.raises(ToolDisabled, match="disabled for the agent"):
        require_binding("a", "act", Binding(tool="act@1.0.0", is_enabled=False))
    binding = Binding(tool="act")
    assert require_binding("a", "act", binding) is binding
