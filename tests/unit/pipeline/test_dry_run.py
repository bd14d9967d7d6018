"""Rehearse: a dry run says what would happen and why, and takes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.tool import ToolDefinition
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.dry_run import dry_run
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.sandbox.wall import Walls
from fumehood.testing import FakeWall
from support.definitions import (
    OWNER,
    by_default,
    expression_document,
    registered,
    request,
    rest_document,
)

pytestmark = pytest.mark.anyio


async def _rehearse(
    wall: FakeWall | None = None, fields: Any = None, **options: Any
) -> dict[str, Any]:
    definition = ToolDefinition.model_validate(expression_document(**(fields or {})))
    resolved = ResolvedCall(request(**options), registered(definition), ())
    permitted = PermittedCall(
        ValidatedCall(resolved, {"expression": "1"}, ()), OWNER, by_default(definition)
    )
    outcome = await dry_run(permitted, Walls(interpreter=wall) if wall else Walls())
    assert outcome.is_dry_run
    data: dict[str, Any] = outcome.data
    return data


@pytest.mark.row("P12", "S1")
async def test_dry_run_says_where_how_and_at_what_cost() -> None:
    wall = FakeWall()
    said = await _rehearse(wall, {"cost_per_use": "0.25"}, timeout_seconds=2)
    assert (said["dry_run"], said["would_run"], said["refused_with"]) == (True, True, None)
    assert said["placement"]["kind"] == "interpreter"
    assert "'expression'" in said["placement"]["why"]
    assert said["limits"]["timeout_seconds"] == 2
    assert said["limits"]["enforced"] == sorted(wall.enforced)
    assert said["approval"] == {"required": False}
    assert said["cost"] == {"per_use": "0.250000"}
    assert said["arguments"] == {"expression": "1"}
    assert wall.runs == []


@pytest.mark.row("P12", "A1")
async def test_dry_run_of_a_dangerous_call_names_the_rule() -> None:
    said = await _rehearse(FakeWall(), {"dangerous": True})
    assert (said["would_run"], said["refused_with"]) == (False, "REQUIRES_HUMAN_APPROVAL")
    assert said["approval"] == {"required": True, "approvers": [], "quorum": 1}
    assert "dangerous" in said["policy"]["rule"]


@pytest.mark.row("P12", "S1")
async def test_dry_run_tells_of_a_wall_that_is_not_there() -> None:
    said = await _rehearse(None)
    assert (said["would_run"], said["refused_with"]) == (False, "SANDBOX_UNAVAILABLE")
    assert said["placement"]["kind"] is None
    assert said["limits"] is None


@pytest.mark.row("P12", "S1", "T5")
@pytest.mark.parametrize(("kind", "executor"), [("REST", "http"), ("MCP", "mcp")])
async def test_dry_run_says_that_an_executor_is_not_there_yet(kind: str, executor: str) -> None:
    document = rest_document() if kind == "REST" else expression_document(type="MCP", executor=None)
    document = {key: value for key, value in document.items() if value is not None}
    resolved = ResolvedCall(request(), registered(ToolDefinition.model_validate(document)), ())
    permitted = PermittedCall(
        ValidatedCall(resolved, {}, ()), OWNER, by_default(resolved.tool.definition)
    )
    said = (await dry_run(permitted, Walls(interpreter=FakeWall()))).data
    assert said["refused_with"] == "SANDBOX_UNAVAILABLE"
    assert f"no executor '{executor}'" in said["placement"]["why"]


@pytest.mark.row("P12", "S4")
async def test_dry_run_tells_of_a_limit_that_cannot_be_enforced() -> None:
    said = await _rehearse(FakeWall(enforced=frozenset()))
    assert said["refused_with"] == "SANDBOX_UNAVAILABLE"
    assert "The interpreter is unavailable; nothing ran." in said["placement"]["why"]
