"""The contract of every wall: one suite, run against each, the fake included."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from fumehood.model.errors import ENDING_ERRORS, EndedBy
from fumehood.model.identity import TrustDomain
from fumehood.model.limits import Limit, Limits
from fumehood.sandbox.process.interpreter import InterpreterWall
from fumehood.sandbox.wall import RunEnding, Wall
from fumehood.testing import FakeWall, SeenRun

pytestmark = pytest.mark.anyio

ME = TrustDomain("uid:1")
LIMITS = Limits(wall_s=5, cpu_s=5, memory_mb=64, output_bytes=65536)


def pretend(run: SeenRun) -> RunEnding:
    """What the interpreter answers, for the few programs of this suite."""
    isolation = "call" if run.fresh else "resident"
    if run.arguments["expression"] == "2 + 2":
        return RunEnding(EndedBy.OK, isolation, cpu_ms=0.1, result={"value": 4, "text": "4"})
    if run.limits.wall_s < 1:
        return RunEnding(EndedBy.WALL_TIME, isolation, cpu_ms=run.limits.wall_s * 1e3)
    return RunEnding(EndedBy.POLICY, isolation, claimed_kind="policy", claimed_message="no")


@pytest.fixture(params=["interpreter", "fake"])
async def wall(request: pytest.FixtureRequest) -> AsyncIterator[Wall]:
    if request.param == "fake":
        yield FakeWall(answer=pretend)
        return
    async with InterpreterWall() as running:
        yield running


async def run(
    wall: Wall, expression: str, limits: Limits = LIMITS, *, fresh: bool = False
) -> RunEnding:
    async with wall.lease(ME, fresh=fresh) as lease:
        assert lease.queue_ms >= 0
        return await lease.run("calculator", {"expression": expression}, limits)


@pytest.mark.row("S1", "S4")
async def test_wall_publishes_what_it_enforces_and_needs_no_more(wall: Wall) -> None:
    assert wall.required <= wall.enforced <= frozenset(Limit)
    assert wall.limits.default_wall_s <= wall.limits.max_wall_s


async def test_program_that_succeeds_has_a_result_and_no_error(wall: Wall) -> None:
    ending = await run(wall, "2 + 2")
    assert ending.ended_by is EndedBy.OK
    assert ending.result == {"value": 4, "text": "4"}
    assert ending.claimed_kind is None
    assert ending.cpu_ms is not None


async def test_program_that_breaks_a_rule_has_no_result(wall: Wall) -> None:
    ending = await run(wall, "open(1)")
    assert ending.ended_by is EndedBy.POLICY
    assert ending.result is None
    assert ending.claimed_message


@pytest.mark.row("P8")
async def test_program_over_its_time_is_ended_and_named(wall: Wall) -> None:
    limits = Limits(wall_s=0.1, cpu_s=0.1, memory_mb=64, output_bytes=65536)
    ending = await run(wall, "pow(7, 10**4200, 10**4200 + 7)", limits)
    assert ending.ended_by is EndedBy.WALL_TIME
    assert ENDING_ERRORS[ending.ended_by] is not None
    assert (await run(wall, "2 + 2")).ended_by is EndedBy.OK


@pytest.mark.row("S2")
async def test_fresh_lease_gets_a_process_that_has_run_nothing(wall: Wall) -> None:
    assert (await run(wall, "2 + 2")).isolation == "resident"
    assert (await run(wall, "2 + 2", fresh=True)).isolation == "call"


async def test_many_leases_at_once_are_all_served(wall: Wall) -> None:
    endings = []

    async def one() -> None:
        endings.append(await run(wall, "2 + 2"))

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(one)
    assert len(endings) == 100
    assert all(ending.ended_by is EndedBy.OK for ending in endings)
