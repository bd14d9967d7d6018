"""Rate limits in an engine: consumed when a call starts, and only by calls that start."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood.approvals import scheduler
from fumehood.approvals.model import ApprovalState
from fumehood.budgets.in_engine import Spending
from fumehood.budgets.settings import BudgetRule, RateLimitRule
from fumehood.core.envelope import Envelope
from fumehood.core.errors import RateLimited
from support.asking import NO, YES, asking
from support.recording import Bench, bench
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.row("P5")]

SUM = {"expression": "2 + 2"}
ONE = (RateLimitRule(tool="calculator", limit=1),)


def code(envelope: Envelope) -> str:
    return "OK" if envelope.error is None else envelope.error.code


async def called(b: Bench, name: str = "calculator", **options: Any) -> str:
    """Call the calculator and return the outcome's code."""
    return code(await b.engine.call(name, SUM, **options))


async def test_call_refused_before_starting_consumes_no_rate(home: Path) -> None:
    budgets = (BudgetRule(name="b", tokens=100),)
    async with bench(home, rate_limits=ONE, budgets=budgets) as b:
        assert code(await b.engine.call("calculator", {})) == "INVALID_PARAMS"
        assert await called(b, isolation="session") == "INVALID_PARAMS"
        large = {"expression": " + ".join("1" * 300)}
        assert code(await b.engine.call("calculator", large)) == "QUOTA_EXCEEDED"
        assert await called(b) == "OK"
        assert await called(b) == "RATE_LIMITED"


async def test_rate_limited_call_consumes_no_budget(home: Path) -> None:
    budgets = (BudgetRule(name="b", calls=2),)
    async with bench(home, rate_limits=ONE, budgets=budgets) as b:
        for expected in ("OK", "RATE_LIMITED", "RATE_LIMITED"):
            assert await called(b) == expected
        (standing,) = b.engine.part(Spending).budgets.standings()
        assert (standing.spent, standing.held) == (1, 0)


async def test_replayed_answer_consumes_no_rate_and_refusal_frees_the_key(
    home: Path,
) -> None:
    async with bench(home, rate_limits=(RateLimitRule(tool="*", limit=2),)) as b:
        for _ in range(5):
            assert await called(b, idempotency_key="one") == "OK"
        assert await called(b, idempotency_key="two") == "OK"
        assert await called(b, idempotency_key="three") == "RATE_LIMITED"
        b.clock.advance(30)
        assert await called(b, idempotency_key="three") == "OK"
        assert len(b.wall.runs) == 3


@pytest.mark.row("A3")
async def test_approved_calls_consume_rate_when_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call keeps its approval until the limit lets it run."""
    monkeypatch.setattr(scheduler, "LOOK_S", 0.02)
    async with asking(rate_limits=(RateLimitRule(tool="erase", limit=1),)) as desk:
        rates, refusals = desk.engine.part(Spending).rates, []
        hold = rates.hold

        @functools.wraps(hold)
        async def watched(*arguments: Any) -> Any:
            try:
                return await hold(*arguments)
            except RateLimited as refused:
                refusals.append(refused.retry_after_ms)
                raise

        monkeypatch.setattr(rates, "hold", watched)
        first, second, denied = [await desk.parked(what) for what in "abc"]
        await desk.decide(denied, NO)
        await desk.decide(first)
        assert (await desk.ended(first)).success
        await desk.decide(second)
        with anyio.fail_after(DEADLINE_S):
            while len(refusals) < 3:
                await anyio.sleep(0.01)
        assert set(refusals) == {60_000}
        state = (await desk.engine.approvals.show(second)).state
        assert (state, desk.deeds.done) == (ApprovalState.APPROVED, ["a"])
        desk.clock.advance(60)
        assert (await desk.ended(second)).success
        assert desk.deeds.done == ["a", "b"]


@pytest.mark.row("A3")
async def test_rate_limited_call_is_refused_without_asking_for_approval() -> None:
    async with asking(rate_limits=(RateLimitRule(tool="erase", limit=1),)) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id, YES)
        assert (await desk.ended(approval_id)).success
        refused = await desk.ask("b")
        assert (refused.error.code, refused.error.retry_after_ms) == ("RATE_LIMITED", 60_000)
        assert refused.error.retryable
        desk.clock.advance(60)
        await desk.parked("b")
