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
from fumehood.budgets.settings import BudgetRule, RateLimitRule
from fumehood.core.call import CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.errors import RateLimited
from fumehood.executors.handle import CallHandle
from fumehood.testing import FakeWall
from support.asking import NO, YES, asking
from support.recording import Bench, bench

pytestmark = [pytest.mark.anyio, pytest.mark.row("P5")]

SUM = {"expression": "2 + 2"}
ONE = (RateLimitRule(tool="calculator", limit=1),)


def code(envelope: Envelope) -> str:
    return "OK" if envelope.error is None else envelope.error.code


async def called(b: Bench, name: str = "calculator", **options: Any) -> str:
    """Call the calculator and return the outcome's code."""
    return code(await b.engine.call(name, SUM, **options))


async def test_concurrent_calls_never_exceed_the_rate_limit(home: Path) -> None:
    rules = (RateLimitRule(tool="*", limit=7),)
    async with bench(home, rate_limits=rules) as b:
        codes: list[str] = []

        async def one() -> None:
            codes.append(await called(b))

        async with anyio.create_task_group() as group:
            for _ in range(30):
                group.start_soon(one)
        assert sorted(codes) == ["OK"] * 7 + ["RATE_LIMITED"] * 23
        assert len(b.wall.runs) == 7


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
        (standing,) = b.engine.budgets.standings()
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


async def test_cancelled_call_consumes_rate_only_if_it_was_running(home: Path) -> None:
    began, over = anyio.Event(), False

    async def meanwhile(*_: Any) -> None:
        began.set()
        if not over:
            await anyio.sleep_forever()

    rules = (RateLimitRule(tool="*", limit=1, max_wait_seconds=300),)
    async with bench(home, wall=FakeWall(meanwhile=meanwhile), rate_limits=rules) as b:
        answers: list[Envelope] = []
        running, waiting = CallHandle(), CallHandle()

        async def call(handle: CallHandle) -> None:
            body = CallBody(arguments=SUM)
            answers.append(await b.engine.run("calculator", body, b.engine.owner, handle))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(call, running)
                await began.wait()
                group.start_soon(call, waiting)
                await anyio.lowlevel.checkpoint()
                waiting.cancel()
                await waiting.over.wait()
                running.cancel()
            assert [code(one) for one in answers] == ["CANCELLED"] * 2
            assert len(b.wall.runs) == 1
            over = True
            b.clock.advance(60)
            assert await called(b) == "OK"  # at once: one call was counted, not two


@pytest.mark.row("A3")
async def test_approved_calls_consume_rate_when_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second call keeps its approval until the limit lets it run."""
    monkeypatch.setattr(scheduler, "LOOK_S", 0.02)
    async with asking(rate_limits=(RateLimitRule(tool="erase", limit=1),)) as desk:
        rates, refusals = desk.engine._made.state.rates, []
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
        with anyio.fail_after(20):
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
        assert refused.error is not None
        assert (refused.error.code, refused.error.retry_after_ms) == ("RATE_LIMITED", 60_000)
        assert refused.error.retryable
        desk.clock.advance(60)
        await desk.parked("b")


async def test_rate_limit_pattern_matching_no_tool_is_logged_at_start(home: Path) -> None:
    rules = (RateLimitRule(tool="calculater", limit=1), RateLimitRule(tool="calc*", limit=1))
    async with bench(home, rate_limits=rules) as b:
        named = b.log.named("rate_limit.covers_no_tool")
        assert named == [{"rate_limit": "calculater"}]
