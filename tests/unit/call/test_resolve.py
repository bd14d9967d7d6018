"""Resolve: only a tool that exists, is switched on and has not ended is found."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from fumehood.call.resolve import resolve
from fumehood.model.errors import ToolDeprecated, ToolDisabled, ToolNotFound
from fumehood.registry.agents import Agents
from fumehood.registry.index import Source, ToolIndex
from fumehood.store.database import open_database
from support.definitions import answer_nothing, function_definition, request

TODAY = date(2026, 1, 15)
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


def test_a_tool_is_found_without_warnings() -> None:
    resolved = resolve(request(), _index(), NO_AGENTS, TODAY)
    assert resolved.tool.definition.name == "act"
    assert resolved.warnings == ()


def test_unknown_tool_is_refused_with_what_to_do() -> None:
    with pytest.raises(ToolNotFound, match="List the tools"):
        resolve(request("other"), _index(), NO_AGENTS, TODAY)


def test_tool_that_is_switched_off_is_refused() -> None:
    with pytest.raises(ToolDisabled, match="switched off"):
        resolve(request(), _index(is_active=False), NO_AGENTS, TODAY)


def test_host_code_that_nobody_allowed_is_refused_with_the_reason() -> None:
    with pytest.raises(ToolDisabled, match="Because it is so"):
        resolve(request(), _index("Because it is so."), NO_AGENTS, TODAY)


@pytest.mark.row("T4")
def test_tool_ends_the_day_after_its_sunset_date() -> None:
    index = _index(sunset_date="2026-01-15", replacement="act_2", migration_guide="Rename.")
    assert resolve(request(), index, NO_AGENTS, TODAY).warnings == (
        "act@1.0.0 is deprecated, until 2026-01-15; use act_2",
    )
    with pytest.raises(ToolDeprecated) as caught:
        resolve(request(), index, NO_AGENTS, date(2026, 1, 16))
    assert "Use act_2 instead." in caught.value.message
    assert caught.value.extra == {
        "replacement": "act_2",
        "sunset_date": "2026-01-15",
        "migration_guide": "Rename.",
    }


@pytest.mark.row("T4")
def test_deprecated_tool_without_an_end_still_runs_with_a_warning() -> None:
    resolved = resolve(request(), _index(deprecated=True), NO_AGENTS, TODAY)
    assert resolved.warnings == ("act@1.0.0 is deprecated",)
