"""Resolve: only a tool that exists, is enabled and is not past its sunset is found."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from fumehood.core.errors import (
    PermissionDenied,
    ToolDeprecated,
    ToolDisabled,
    ToolNotFound,
)
from fumehood.core.identity import Principal, Scope
from fumehood.identity.agents import Agents
from fumehood.pipeline.resolve import ResolvedCall, resolve
from fumehood.registry.index import Source, ToolIndex
from fumehood.storage.database import open_database
from support.definitions import answer_nothing, function_definition, request
from support.identities import bind, make_agent


def today() -> datetime:
    return datetime(2026, 1, 15, 23, 59, tzinfo=UTC)


def tomorrow() -> datetime:
    return datetime(2026, 1, 16, tzinfo=UTC)


NO_AGENTS = Agents(open_database(None))


def _index(disabled_because: str | None = None, **fields: Any) -> ToolIndex:
    index = ToolIndex()
    index.register(
        function_definition(**fields),
        Source.PROGRAM,
        function=answer_nothing,
        disabled_because=disabled_because,
    )
    return index


@pytest.mark.parametrize("asked", ["axt", "atc", "act_"])
def test_misspelt_tool_name_gets_a_suggestion(asked: str) -> None:
    with pytest.raises(ToolNotFound, match="Did you mean 'act'"):
        resolve(request(asked), _index(), NO_AGENTS, today)


@pytest.mark.parametrize("principal", [None, Principal("uid:1", frozenset({Scope.APPROVE}))])
def test_suggestion_is_withheld_from_callers_without_call_scope(
    principal: Principal | None,
) -> None:
    with pytest.raises(ToolNotFound) as refused:
        resolve(request("axt", principal=principal), _index(), NO_AGENTS, today)
    assert "'act'" not in str(refused.value)


def test_disabled_host_function_is_refused_with_the_reason() -> None:
    with pytest.raises(ToolDisabled, match="Because it is so"):
        resolve(request(), _index("Because it is so."), NO_AGENTS, today)


@pytest.mark.row("T4")
def test_tool_is_refused_after_its_sunset_date_and_warns_before() -> None:
    index = _index(sunset_date="2026-01-15", replacement="act_2", migration_guide="Rename.")
    assert resolve(request(), index, NO_AGENTS, today).warnings == (
        "act@1.0.0 is deprecated, until 2026-01-15; use act_2",
    )
    with pytest.raises(ToolDeprecated) as caught:
        resolve(request(), index, NO_AGENTS, tomorrow)
    assert "Use act_2 instead." in caught.value.message
    assert caught.value.extra == {
        "replacement": "act_2",
        "sunset_date": "2026-01-15",
        "migration_guide": "Rename.",
    }


@pytest.mark.row("T4")
def test_deprecated_tool_without_sunset_date_runs_with_a_warning() -> None:
    resolved = resolve(request(), _index(deprecated=True), NO_AGENTS, today)
    assert resolved.warnings == ("act@1.0.0 is deprecated",)


# -- for an agent --------------------------------------------------------------------------

SPEAKER = Principal("uid:1", frozenset({Scope.CALL}), frozenset({"a", "gone", "off"}))
VERSIONS = ("1.0.0", "1.1.0", "2.0.0")


async def _agents(*tools: str, **fields: Any) -> Agents:
    agents = Agents(open_database(None))
    await make_agent(agents, "a", "uid:1")
    await make_agent(agents, "off", "uid:1", is_enabled=False)
    await make_agent(agents, "others", "uid:2")
    await bind(agents, "a", tools, **fields)
    return agents


async def _resolve(
    tool: str, agents: Agents, agent_id: str = "a", principal: Principal | None = SPEAKER
) -> ResolvedCall:
    index = ToolIndex()
    for version in VERSIONS:
        index.register(
            function_definition(version=version), Source.PROGRAM, function=answer_nothing
        )
    index.register(function_definition(name="other"), Source.PROGRAM, function=answer_nothing)
    call = request(tool, principal=principal, agent_id=agent_id)
    return resolve(call, index, agents, today)


@pytest.mark.anyio
@pytest.mark.row("R3", "T4")
@pytest.mark.parametrize(
    ("bound", "asked", "found"),
    [
        ("act", "act", "2.0.0"),
        ("act", "act@1.0.0", "1.0.0"),
        ("act@1.1.0", "act", "1.1.0"),
        ("act@1.1.0", "act@1.1.0", "1.1.0"),
    ],
)
async def test_agents_tool_resolves_to_its_bound_version(
    bound: str, asked: str, found: str
) -> None:
    agents = await _agents(bound)
    resolved = await _resolve(asked, agents)
    assert resolved.tool.definition.version == found
    assert resolved.binding == agents.binding("a", "act")


@pytest.mark.anyio
@pytest.mark.row("R3")
@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("other", "has no tool"),
        ("other@1.0.0", "has no tool"),
        ("nothing@9.9.9", "has no tool"),
        ("act@2.0.0", r"act@1\.1\.0, no other version"),
    ],
)
async def test_tool_or_version_not_bound_to_agent_is_refused(tool: str, says: str) -> None:
    with pytest.raises(PermissionDenied, match=says):
        await _resolve(tool, await _agents("act@1.1.0"))


@pytest.mark.anyio
@pytest.mark.row("R3")
async def test_name_suggestions_for_agent_include_only_its_own_enabled_tools() -> None:
    agents = await _agents("act")
    with pytest.raises(PermissionDenied, match="Did you mean 'act'"):
        await _resolve("actt", agents)
    with pytest.raises(PermissionDenied) as refused:
        await _resolve("othr", agents)
    assert "'other'" not in str(refused.value)
    with pytest.raises(PermissionDenied) as refused:
        await _resolve("actt", await _agents("act", is_enabled=False))
    assert "'act'" not in str(refused.value)


@pytest.mark.anyio
@pytest.mark.row("R3")
async def test_disabled_binding_disables_the_tool_only_for_its_agent() -> None:
    agents = await _agents("act", is_enabled=False)
    with pytest.raises(ToolDisabled, match="for the agent"):
        await _resolve("act", agents)
    assert resolve(request(), _index(), agents, today).binding is None
