"""Circuit breakers: when they open, how many trials they let through, and how they close."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from fumehood.circuits.breaker import Circuit, Circuits, CircuitSettings, health_of
from fumehood.core.errors import (
    ERROR_CODES,
    CircuitOpen,
    EngineError,
    ExecutionError,
    ToolError,
    UpstreamTimeout,
)
from fumehood.core.status import CircuitState
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import ToolRun
from fumehood.pipeline.plan import upstream_of
from fumehood.testing import ManualClock
from support.answers import code_of, error_of
from support.definitions import rest_document
from support.recording import RecordingLog
from support.upstreams import gone, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("P7")]

SLOW = UpstreamTimeout("The service did not answer.")
SETTINGS = CircuitSettings(min_failures=3, trials=2)
OPENED = {"circuits": {"min_failures": 1, "trials": 1}}


@dataclass
class Made:
    """A circuit with a clock that is set by hand."""

    clock: ManualClock = field(default_factory=ManualClock)
    log: RecordingLog = field(default_factory=RecordingLog)
    settings: CircuitSettings = SETTINGS

    def __post_init__(self) -> None:
        self.circuit = Circuit("s:443", self.settings, self.clock.monotonic, self.log)

    def ask(self, error: EngineError | None = None, times: int = 1) -> None:
        """Requests that end like this, one after the other."""
        for _ in range(times):
            with self.circuit.enter() as permit:
                permit.conclude(error)

    @property
    def state(self) -> CircuitState:
        return self.circuit.status().state

    def wait_ms(self) -> int | None:
        """How long a request is refused; None if it would be let through."""
        try:
            self.circuit.require_passable()
        except CircuitOpen as refused:
            return refused.retry_after_ms
        return None


def test_circuit_opens_at_the_failure_threshold_for_the_set_time() -> None:
    made = Made()
    made.ask(gone(), 2)
    assert made.state is CircuitState.CLOSED
    made.ask(gone())
    assert made.state is CircuitState.OPEN
    assert made.wait_ms() == 30_000
    made.clock.advance(12.3456)
    assert made.wait_ms() == 17_655
    made.clock.advance(17.6)
    assert made.wait_ms() == 55
    made.clock.advance(0.055)
    assert made.wait_ms() is None
    (opened,) = made.log.named("circuit.open")
    assert opened == {"upstream": "s:443", "open_s": 30, "requests": 3, "failures": 3}


def test_failures_below_the_threshold_or_outside_the_window_keep_it_closed() -> None:
    made = Made()
    made.ask(None, 7)
    made.ask(gone(), 6)
    assert made.state is CircuitState.CLOSED
    made.ask(gone())
    assert made.state is CircuitState.OPEN
    rare = Made()
    for _ in range(10):
        rare.ask(gone())
        rare.clock.advance(31)
    assert rare.state is CircuitState.CLOSED


def test_half_open_circuit_allows_limited_trials_that_close_it() -> None:
    made = Made()
    made.ask(gone(), 3)
    made.clock.advance(30)
    first, second = made.circuit.enter(), made.circuit.enter()
    assert made.wait_ms() == 1000
    first.conclude(None)
    assert made.wait_ms() == 1000
    second.give_back()
    assert made.wait_ms() is None
    made.ask(None)
    assert made.state is CircuitState.CLOSED
    assert [name for _, name, _ in made.log.events] == [
        "circuit.open", "circuit.half_open", "circuit.closed",
    ]  # fmt: skip
    made.ask(gone(), 2)
    assert made.state is CircuitState.CLOSED  # what was before is forgotten


def test_failed_trial_doubles_the_open_time_up_to_a_limit() -> None:
    made = Made()
    made.ask(gone(), 3)
    for expected_s in (60, 120, 240, 300, 300):
        made.clock.advance((made.wait_ms() or 0) / 1000)
        made.ask(SLOW)
        assert made.wait_ms() == expected_s * 1000


def test_late_result_of_an_earlier_state_is_ignored() -> None:
    made = Made()
    late, later = made.circuit.enter(), made.circuit.enter()
    made.ask(gone(), 3)
    late.conclude(None)
    made.clock.advance(30)
    trial = made.circuit.enter()
    later.conclude(gone())
    assert made.state is CircuitState.HALF_OPEN
    trial.conclude(None)
    trial.conclude(gone())  # ended already
    made.ask(None)
    assert made.state is CircuitState.CLOSED


@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_only_upstream_failures_count_against_a_circuit(code: str) -> None:
    against = {"NETWORK_ERROR", "CIRCUIT_OPEN"}
    for_it = {"EXECUTION_ERROR", "OUTPUT_LIMIT_EXCEEDED", "MEMORY_LIMIT_EXCEEDED"}
    expected = 1 if code in against else 0 if code in {*for_it, "SANDBOX_VIOLATION"} else None
    assert health_of(ERROR_CODES[code]("It failed.")) == expected


def test_upstream_answers_and_timeouts_are_counted() -> None:
    assert health_of(None) == 0
    assert health_of(ToolError("NO_SUCH_CITY", "There is no such city.")) == 0
    assert health_of(SLOW) == 1
    assert health_of(SLOW, was_hurried=True) is None
    assert health_of(gone(), was_hurried=True) == 1
    unsent = ExecutionError("It was not sent.")
    unsent.was_sent = False
    assert health_of(unsent) is None


@pytest.mark.parametrize(
    ("endpoint", "upstream"),
    [
        ("https://Weather.Example/v1?a=b", "weather.example:443"),
        ("http://weather.example./", "weather.example:80"),
        ("http://127.0.0.1:8080/", "127.0.0.1:8080"),
        ("https://[::1]/", "[::1]:443"),
    ],
)
def test_circuit_is_keyed_by_host_and_port(endpoint: str, upstream: str) -> None:
    assert upstream_of(ToolDefinition.model_validate(rest_document(endpoint=endpoint))) == upstream


def test_tools_of_one_upstream_share_a_circuit() -> None:
    circuits = Circuits(CircuitSettings(min_failures=1), ManualClock().monotonic, RecordingLog())
    first, second, other = (
        circuits.of(
            upstream_of(ToolDefinition.model_validate(rest_document(name=name, endpoint=endpoint)))
        )
        for name, endpoint in (("a", "https://s/1"), ("b", "https://s/2"), ("c", "https://t/"))
    )
    assert first is not None
    assert first is second
    assert other is not None
    first.enter().conclude(gone())
    with pytest.raises(CircuitOpen):
        first.enter()
    other.require_passable()
    function = ToolDefinition(name="f", description="A function.", executor="function")
    assert circuits.of(upstream_of(function)) is None
    assert circuits.broken() == 1


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="at least open_seconds"):
        CircuitSettings(open_seconds=60, max_open_seconds=30)


# -- calls ---------------------------------------------------------------------------------


async def test_call_of_a_failing_service_is_refused_and_consumes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = {"name": "b", "calls": 2, "period": "total"}
    made_of = weather(retry_count=0, cost_per_use="1")
    async with upstream_bench(home, monkeypatch, made_of, budgets=[budget], **OPENED) as made:
        made.upstream.scripts["weather"] = [gone()]
        await made.call()
        refused = await made.call()
        keyed = await made.call(idempotency_key="k")
        assert made.upstream.asked() == 1
        planned = await made.call(dry_run=True)
        made.bench.clock.advance(30)
        answered = await made.call(idempotency_key="k")  # the key was free again
    assert (code_of(refused), error_of(refused).retry_after_ms) == ("CIRCUIT_OPEN", 30_000)
    assert error_of(refused).retryable
    assert refused.metadata.sandbox is None
    assert refused.metadata.usage.cost == "0.000000"
    assert (planned.data["would_run"], planned.data["refused_with"]) == (False, "CIRCUIT_OPEN")
    assert planned.data["placement"]["kind"] == "host"
    assert "weather.example" not in refused.model_dump_json()
    assert code_of(keyed) == "CIRCUIT_OPEN"
    assert answered.success


async def test_cancelled_trial_returns_its_permit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: while the trial runs, there is no other."""
    async with upstream_bench(home, monkeypatch, weather(retry_count=0), **OPENED) as made:
        begun = anyio.Event()

        async def never(run: ToolRun) -> Any:
            begun.set()
            await anyio.Event().wait()

        made.upstream.scripts["weather"] = [gone(), never]
        await made.call()
        made.bench.clock.advance(30)
        with anyio.fail_after(120):
            trial = asyncio.create_task(made.call())
            await begun.wait()
            meanwhile = await made.call()
            trial.cancel()
            await asyncio.gather(trial, return_exceptions=True)
            assert (code_of(meanwhile), error_of(meanwhile).retry_after_ms) == (
                "CIRCUIT_OPEN",
                1000,
            )
            assert (await made.call()).success


@pytest.mark.parametrize(
    ("fields", "timeout_s", "opens"),
    [
        ({}, 0.01, False),
        ({}, None, True),
        ({"timeout": 500}, 0.01, False),
        ({"timeout": 500}, 0.5, True),
        ({"timeout_seconds": 2}, 1.9, False),
        ({"timeout_seconds": 2}, 2, True),
    ],
)
async def test_short_timeouts_of_a_caller_do_not_open_the_circuit(
    fields: dict[str, Any],
    timeout_s: float | None,
    opens: bool,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attack: a time limit that no service can keep. Twin: one that the tool itself allows."""
    options = {} if timeout_s is None else {"timeout_seconds": timeout_s}
    made_of = weather(retry_count=0, **fields)
    async with upstream_bench(home, monkeypatch, made_of, **OPENED) as made:
        made.upstream.scripts["weather"] = [SLOW] * 3
        for _ in range(3):
            await made.call(**options)
        shown = made.bench.engine.tool("weather").circuit
    assert (shown.state is CircuitState.OPEN) is opens
