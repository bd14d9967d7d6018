"""Admit: the smallest limit, and no wall that cannot enforce what it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fumehood.call.admit import Plan, admit, make_plan
from fumehood.call.approve import ApprovedCall
from fumehood.call.authorise import PermittedCall
from fumehood.call.claim import ClaimedCall
from fumehood.call.resolve import ResolvedCall
from fumehood.call.validate import ValidatedCall
from fumehood.model.errors import InvalidParams, SandboxUnavailable, ShuttingDown
from fumehood.model.limits import Limit, WallLimits
from fumehood.model.tool import ToolDefinition
from fumehood.sandbox.host import Host
from fumehood.sandbox.wall import Walls
from fumehood.testing import FakeWall
from support.definitions import (
    OWNER,
    expression_document,
    function_definition,
    registered,
    request,
)

OFFERED = WallLimits(
    default_wall_s=5,
    max_wall_s=30,
    default_memory_mb=64,
    max_memory_mb=256,
    min_memory_mb=16,
    output_bytes=1000,
)


def _permitted(definition: ToolDefinition, **options: Any) -> PermittedCall:
    resolved = ResolvedCall(request(**options), registered(definition), ())
    return PermittedCall(ValidatedCall(resolved, {}, ()), OWNER)


def _expression(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate(expression_document(**fields))


def _plan(fields: Any = None, limits: WallLimits = OFFERED, **options: Any) -> Plan:
    wall = FakeWall(limits=limits)
    return make_plan(_permitted(_expression(**(fields or {})), **options), Walls(interpreter=wall))


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("defined", "option", "effective"),
    [
        (None, None, 5),
        (2, None, 2),
        (None, 3, 3),
        (2, 3, 2),
        (3, 2, 2),
        (600, None, 30),
        (None, 600, 30),
        (20, 600, 20),
    ],
)
def test_wall_time_is_the_smallest_of_definition_option_and_ceiling(
    defined: float | None, option: float | None, effective: float
) -> None:
    plan = _plan({"timeout_seconds": defined}, timeout_seconds=option)
    assert plan.limits.wall_s == effective
    assert plan.limits.cpu_s == effective


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("defined", "option", "effective"),
    [(None, None, 64), (32, None, 32), (None, 128, 128), (32, 128, 32), (9999, None, 256)],
)
def test_memory_is_the_smallest_of_definition_option_and_ceiling(
    defined: int | None, option: int | None, effective: int
) -> None:
    plan = _plan({"memory_limit_mb": defined}, memory_limit_mb=option)
    assert plan.limits.memory_mb == effective


@pytest.mark.row("T2")
def test_cpu_time_is_never_over_the_walls_own_limit() -> None:
    assert _plan(limits=replace(OFFERED, cpu_s=1.0)).limits.cpu_s == 1.0
    assert _plan(limits=replace(OFFERED, cpu_s=100.0)).limits.cpu_s == 5


def test_less_memory_than_anything_needs_is_refused_under_its_option() -> None:
    with pytest.raises(InvalidParams, match="at least 16") as caught:
        _plan(memory_limit_mb=15)
    assert caught.value.fields == ("options.memory_limit_mb",)
    assert _plan(memory_limit_mb=16).limits.memory_mb == 16


@pytest.mark.row("S4")
@pytest.mark.parametrize("missing", list(Limit))
def test_wall_that_cannot_enforce_a_limit_takes_no_call(missing: Limit) -> None:
    wall = FakeWall(required=frozenset(Limit), enforced=frozenset(Limit) - {missing})
    with pytest.raises(SandboxUnavailable, match=missing.value) as caught:
        make_plan(_permitted(_expression()), Walls(interpreter=wall))
    assert "This is a fake." in caught.value.message


@pytest.mark.row("S1")
def test_engine_without_the_wall_uses_no_other() -> None:
    with pytest.raises(SandboxUnavailable, match="no weaker one") as caught:
        make_plan(_permitted(_expression()), Walls(host=Host()))
    assert caught.value.may_retry is False


@pytest.mark.row("S1")
def test_function_of_the_host_has_no_memory_limit_and_refuses_one() -> None:
    walls = Walls(host=Host())
    plan = make_plan(_permitted(function_definition()), walls)
    assert (plan.placement.kind, plan.limits.memory_mb, plan.limits.wall_s) == ("host", None, 30)
    with pytest.raises(InvalidParams, match="could not be enforced"):
        make_plan(_permitted(function_definition(), memory_limit_mb=64), walls)


@pytest.mark.anyio
@pytest.mark.row("D6")
async def test_draining_engine_admits_nobody() -> None:
    approved = ApprovedCall(ClaimedCall(_permitted(_expression())), "rule")
    wall = FakeWall()
    with pytest.raises(ShuttingDown) as caught:
        async with admit(approved, Walls(interpreter=wall), is_draining=True):
            wall.runs.clear()
    assert caught.value.retry_after_ms is not None


@pytest.mark.anyio
@pytest.mark.parametrize(("isolation", "fresh"), [(None, False), ("call", True)])
async def test_isolation_of_the_call_asks_for_a_fresh_place(
    isolation: str | None, fresh: bool
) -> None:
    permitted = _permitted(_expression(), isolation=isolation)
    walls = Walls(interpreter=FakeWall())
    async with admit(ApprovedCall(ClaimedCall(permitted), ""), walls, is_draining=False) as held:
        assert held.lease.fresh is fresh  # type: ignore[attr-defined]
        assert held.lease.domain == permitted.trust_domain  # type: ignore[attr-defined]
        assert held.permitted is permitted
