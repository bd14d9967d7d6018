"""Retries: which failures are retried, how often and when, and how the answer reports it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood import ToolError
from fumehood.call_options import CallBody, CallOptions
from fumehood.core.errors import (
    ERROR_CODES,
    MAX_MESSAGE_CHARACTERS,
    EngineError,
    RateLimited,
    UpstreamTimeout,
)
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import CallHandle, ToolRun
from fumehood.pipeline.retry import (
    FREE_RETRIES,
    LEAST_ATTEMPT_S,
    Attempts,
    Retries,
    delay_s,
    most_retries,
)
from fumehood.streams.events import ResultEvent, RetryingEvent
from fumehood.testing import ManualClock
from support.answers import code_of, error_of
from support.upstreams import gone, unsent, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("P6")]

SECONDS = st.floats(0, 1000)
SLOW = UpstreamTimeout("The service did not answer.")
BUSY = RateLimited("The service has too many calls.", retry_after_ms=1)


# -- delays --------------------------------------------------------------------------------


@given(
    retry=st.integers(0, 9),
    retry_after_ms=st.none() | st.integers(0, 10**6),
    left_s=SECONDS,
    drawn=st.floats(0, 1),
)
def test_delay_is_retry_after_plus_doubling_jitter_within_the_deadline(
    retry: int, retry_after_ms: int | None, left_s: float, drawn: float
) -> None:
    asked_s = (retry_after_ms or 0) / 1000
    jitter_s = min(10, 0.2 * 2**retry)
    delay = delay_s(retry, retry_after_ms, left_s, lambda low, high: low + drawn * (high - low))
    if asked_s + drawn * jitter_s + LEAST_ATTEMPT_S > left_s:
        assert delay is None
    else:
        assert delay == pytest.approx(asked_s + drawn * jitter_s)


# -- the table -----------------------------------------------------------------------------


def definition(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate(weather(**fields))


@pytest.mark.parametrize(
    ("error", "most"),
    [
        (gone(), 3),
        (SLOW, 2),
        (BUSY, 3),
        (ToolError("LATER", "Later.", retryable=True), 3),
        (ToolError("NEVER", "Never."), 0),
        (gone(retryable=False), 0),
    ],
)
def test_number_of_retries_follows_the_error_and_the_definition(
    error: EngineError, most: int
) -> None:
    assert most_retries(definition(retry_count=10), error) == most
    assert most_retries(definition(retry_count=1), error) == min(most, 1)
    assert most_retries(definition(retry_count=0), error) == 0


@pytest.mark.parametrize("code", sorted(ERROR_CODES.keys() - {"NETWORK_ERROR", "RATE_LIMITED"}))
def test_no_other_error_is_retried(code: str) -> None:
    error = ERROR_CODES[code]("It failed.", retryable=True)
    assert most_retries(definition(retry_count=10), error) == 0


def test_tool_that_may_have_acted_is_retried_only_if_idempotent() -> None:
    once = definition(idempotent=False)
    assert most_retries(once, gone()) == 0
    assert most_retries(once, BUSY) == 0
    assert most_retries(once, unsent(gone())) == 3
    assert most_retries(definition(), gone()) == 3


def test_retries_per_tool_are_limited_regardless_of_failing_calls() -> None:
    clock = ManualClock()
    retries = Retries(clock, uniform=lambda low, high: low)

    def retried(calls: int) -> int:
        count = 0
        for _ in range(calls):
            retries.begin(definition())
            attempts = Attempts()
            if retries.next_delay_s(definition(), gone(), attempts, 100) is not None:
                assert attempts.warning is None
                count += 1
            else:
                assert attempts.warning is not None
        return count

    assert retried(FREE_RETRIES) == FREE_RETRIES
    assert retried(190) == 20
    clock.advance(60)
    assert retried(FREE_RETRIES) == FREE_RETRIES


# -- calls ---------------------------------------------------------------------------------


async def test_transient_failure_is_retried_and_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, weather(cost_per_use="0.5")) as made:
        made.upstream.scripts["weather"] = [gone(), SLOW]
        envelope = await made.call()
        first = await made.call()
    assert envelope.data == {"answer": "fine"}
    assert envelope.metadata.retry_count == 2
    assert envelope.metadata.performance.network_ms == 30
    assert envelope.metadata.usage.cost == "0.500000"
    assert first.metadata.retry_count == 0
    told = made.bench.log.named("call.retrying")
    assert [(one["retry"], one["code"]) for one in told] == [(1, "NETWORK_ERROR"), (2, "TIMEOUT")]
    assert {one["call_id"] for one in told} == {envelope.metadata.call_id}


async def test_retry_after_beyond_deadline_is_returned_to_the_caller(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, weather()) as made:
        made.upstream.scripts["weather"] = [
            RateLimited("Too many.", retry_after_ms=5_000),
            RateLimited("Too many.", retry_after_ms=1),
        ]
        late = await made.call(timeout_seconds=5)
        assert made.upstream.asked() == 1
        in_time = await made.call(timeout_seconds=5)
    assert (code_of(late), error_of(late).retry_after_ms) == ("RATE_LIMITED", 5000)
    assert late.metadata.retry_count == 0
    assert in_time.success
    assert in_time.metadata.retry_count == 1


async def test_all_attempts_share_one_deadline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream_bench(home, monkeypatch, weather()) as made:

        async def take_four_seconds(run: ToolRun) -> EngineError:
            made.bench.clock.advance(4)
            return gone()

        made.upstream.scripts["weather"] = [take_four_seconds] * 3
        envelope = await made.call(timeout_seconds=10)
        assert [run.limits.wall_s for run in made.upstream.runs] == [10, 6, 2]
    assert code_of(envelope) == "NETWORK_ERROR"


@pytest.mark.row("D2")
async def test_cancelled_call_is_not_retried(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with upstream_bench(home, monkeypatch, weather()) as made:
        engine, reached = made.bench.engine, anyio.Event()

        async def reach(run: ToolRun) -> EngineError:
            reached.set()  # the call then waits for minutes
            return gone(retry_after_ms=300_000)

        made.upstream.scripts["weather"] = [gone(), reach]
        handle = CallHandle()
        body = CallBody(arguments={"city": "Oslo"}, options=CallOptions(timeout_seconds=600))
        with anyio.fail_after(120):
            task = asyncio.create_task(engine.run("weather", body, engine.owner, handle))
            await reached.wait()
            handle.cancel()
            envelope = await task
        assert made.upstream.asked() == 2
    assert code_of(envelope) == "CANCELLED"
    assert envelope.metadata.retry_count == 1


@pytest.mark.row("D2")
async def test_failed_attempts_are_streamed_without_details(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = f"{'x' * (MAX_MESSAGE_CHARACTERS - 20)} ghp_{'a' * 36}"  # the cut is within the key
    async with upstream_bench(home, monkeypatch, weather(retry_count=2)) as made:
        made.upstream.scripts["weather"] = [
            ToolError("LATER", late, retryable=True, details={"secret": "PRIVATE"}),
            gone(),
        ]
        events = [event async for event in made.bench.engine.stream("weather", {"city": "Oslo"})]
    retrying = [event for event in events if isinstance(event, RetryingEvent)]
    assert [(one.retry_count, one.max_retries, one.error.code) for one in retrying] == [
        (1, 2, "LATER"),
        (2, 2, "NETWORK_ERROR"),
    ]
    assert retrying[0].error.details is None
    assert "ghp_" not in retrying[0].error.message
    assert isinstance(events[-1], ResultEvent)
    assert events[-1].envelope.metadata.retry_count == 2


@pytest.mark.row("P7")
async def test_retries_stop_if_the_circuit_opens(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, weather(), circuits={"min_failures": 2}) as made:
        made.upstream.scripts["weather"] = [gone()] * 3
        envelope = await made.call()
        assert made.upstream.asked() == 2
    assert code_of(envelope) == "NETWORK_ERROR"
    assert envelope.metadata.retry_count == 1
    assert "calls to this service are suspended" in envelope.metadata.warnings[-1]
    # It says when a repeat will be let in, and has not paused in vain before.
    assert error_of(envelope).retry_after_ms is not None
    assert 25_000 < error_of(envelope).retry_after_ms <= 30_000
    assert len(made.bench.log.named("call.retrying")) == 1
