"""The call pipeline: every outcome is an envelope, and no refused call runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood import Config, Engine, Envelope, ToolResult, tool
from fumehood.call_options import CallBody
from fumehood.core.errors import ENDING_ERRORS, EndedBy, InvalidParams
from fumehood.core.identity import Principal, Scope, TrustDomain
from fumehood.core.limits import PROCESS_WALL_LIMITS, Limit
from fumehood.registry.declare import FunctionTool
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import FakeWall, SeenRun, always_four
from support.answers import details_of, error_of, sandbox_of
from support.definitions import expression_document
from support.identities import bind, make_agent
from support.recording import bench

pytestmark = pytest.mark.anyio

FIVE_KEYS = ["success", "status", "data", "error", "metadata"]
PRIVATE = "PRIVATE-VALUE"


def _ends(**fields: Any) -> FakeWall:
    return FakeWall(answer=lambda run: RunEnding(isolation="call", **fields))


def _code(envelope: Envelope) -> str | None:
    """The error code of a well-formed envelope, or None for a success."""
    assert list(envelope.model_dump()) == FIVE_KEYS
    assert json.loads(envelope.model_dump_json())["success"] is (envelope.error is None)
    assert envelope.status == ("success" if envelope.error is None else "error")
    if envelope.error is None:
        return None
    assert envelope.data == {}
    return envelope.error.code


def _host(function: Callable[..., Any], **fields: Any) -> FunctionTool:
    return tool(sandboxed=False, description="Act.", **fields)(function)


@pytest.mark.row("E1", "S4")
async def test_successful_call_envelope_has_data_and_all_measurements(home: Path) -> None:
    def answer(run: SeenRun) -> RunEnding:
        return replace(always_four(run), cpu_ms=0.5, peak_memory_bytes=3 << 20, output_bytes=9)

    async with bench(home, wall=FakeWall(answer)) as b:
        envelope = await b.engine.call("calculator", {"expression": "2+2"}, trace_id="mine")
    assert _code(envelope) is None
    assert envelope.data == {"value": 4, "text": "4"}
    metadata = envelope.metadata
    assert (metadata.tool_name, metadata.tool_version) == ("calculator", "1.0.0")
    assert (metadata.trace_id, metadata.timestamp) == ("mine", "2026-01-01T00:00:00.000Z")
    assert metadata.sandbox.model_dump() == {
        "placement": "interpreter",
        "isolation": "call",
        "ended_by": EndedBy.OK,
        "limits": {"timeout_seconds": 5.0, "memory_mb": 64},
        "node": None,
    }
    assert metadata.resources.model_dump() == {
        "cpu_ms": 0.5,
        "peak_memory_mb": 3.0,
        "output_bytes": 9,
    }
    assert metadata.performance.network_ms == 0.0


@pytest.mark.row("S4", "E1")
@pytest.mark.parametrize("ended_by", [ending for ending in EndedBy if ending is not EndedBy.OK])
async def test_every_run_ending_has_its_error_code(home: Path, ended_by: EndedBy) -> None:
    error = ENDING_ERRORS[ended_by]
    async with bench(home, wall=_ends(ended_by=ended_by)) as b:
        envelope = await b.engine.call("calculator", {"expression": "1"})
    assert _code(envelope) == error.code
    assert details_of(envelope)["ended_by"] == ended_by.value
    assert sandbox_of(envelope).ended_by is ended_by


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("ended_by", "limit"),
    [
        (EndedBy.WALL_TIME, {"timeout_seconds": 2.0}),
        (EndedBy.CPU_TIME, {"cpu_seconds": 2.0}),
        (EndedBy.MEMORY, {"memory_mb": 32}),
        (EndedBy.OUTPUT, {"output_bytes": 65536}),
    ],
)
async def test_limit_that_ended_a_run_is_named_in_details(
    home: Path, ended_by: EndedBy, limit: dict[str, Any]
) -> None:
    async with bench(home, wall=_ends(ended_by=ended_by)) as b:
        envelope = await b.engine.call(
            "calculator", {"expression": "1"}, timeout_seconds=2, memory_limit_mb=32
        )
    assert error_of(envelope).details == {"ended_by": ended_by.value, "limit": limit}
    assert error_of(envelope).retryable is False


@pytest.mark.parametrize(
    "result",
    [
        None,
        {},
        {"value": 4},
        {"value": 4, "text": 4},
        {"value": "4", "text": "4"},
        {"value": {}, "text": "4"},
        {"value": 4, "text": "4", "more": 1},
    ],
)
async def test_malformed_guest_result_is_sandbox_unavailable(home: Path, result: Any) -> None:
    async with bench(home, wall=_ends(ended_by=EndedBy.OK, result=result)) as b:
        envelope = await b.engine.call("calculator", {"expression": "1"})
    assert _code(envelope) == "SANDBOX_UNAVAILABLE"


@pytest.mark.row("S4")
@pytest.mark.parametrize("idempotent", [True, False])
async def test_lost_run_is_retryable_only_if_tool_is_idempotent(
    home: Path, idempotent: bool
) -> None:
    tools = [expression_document(idempotent=idempotent)]
    async with bench(home, tools, _ends(ended_by=EndedBy.SANDBOX_LOST)) as b:
        envelope = await b.engine.call("sums", {"expression": "1"})
    assert error_of(envelope).retryable is idempotent


# -- refusals never run ------------------------------------------------------------------

CALLER = Principal("somebody", frozenset({Scope.CALL}))
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], Principal | None, str]] = [
    ("danger", {"expression": "1"}, {}, CALLER, "REQUIRES_HUMAN_APPROVAL"),
    ("sums", {"expression": "1"}, {}, None, "UNAUTHORIZED"),
    ("sums", {"expression": "1"}, {}, Principal("x"), "PERMISSION_DENIED"),
    (
        "sums",
        {"expression": "1"},
        {},
        Principal("x", frozenset({Scope.ADMIN})),
        "PERMISSION_DENIED",
    ),
    ("sums", {}, {}, CALLER, "INVALID_PARAMS"),
    ("sums", {"expression": 5}, {}, CALLER, "INVALID_PARAMS"),
    ("sums", {"expression": "1"}, {"session_id": "s"}, CALLER, "RESOURCE_NOT_FOUND"),
    ("sums", {"expression": "1"}, {"memory_limit_mb": 1}, CALLER, "INVALID_PARAMS"),
    ("sums@9.9.9", {"expression": "1"}, {}, CALLER, "TOOL_NOT_FOUND"),
    ("nothing", {}, {}, CALLER, "TOOL_NOT_FOUND"),
    ("ended", {"expression": "1"}, {}, CALLER, "TOOL_DEPRECATED"),
    ("off", {"expression": "1"}, {}, CALLER, "TOOL_DISABLED"),
]
REQUIRED = {"properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [
    expression_document(parameters=REQUIRED),
    expression_document(name="danger", dangerous=True, parameters=REQUIRED),
    expression_document(name="ended", sunset_date="2025-12-31", parameters=REQUIRED),
    expression_document(name="off", is_active=False, parameters=REQUIRED),
]


@pytest.mark.row("E1", "S1", "P2")
@pytest.mark.parametrize(("name", "arguments", "options", "principal", "code"), REFUSALS)
async def test_refused_call_never_reaches_a_wall(
    home: Path,
    name: str,
    arguments: dict[str, Any],
    options: dict[str, Any],
    principal: Principal | None,
    code: str,
) -> None:
    async with bench(home, TOOLS) as b:
        body = CallBody.model_validate({"arguments": arguments, "options": options})
        envelope = await b.engine.run(name, body, principal)
        assert _code(envelope) == code
        assert b.wall.runs == []
        assert envelope.metadata.sandbox is None
        assert envelope.metadata.usage.cost == "0.000000"
        assert envelope.metadata.performance.processing_ms is None
        await anyio.lowlevel.checkpoint()
        assert [event["code"] for event in b.log.named("call.ended")] == [code]


async def test_twin_of_refused_calls_runs(home: Path) -> None:
    async with bench(home, TOOLS) as b:
        body = CallBody(arguments={"expression": "1"})
        assert _code(await b.engine.run("sums", body, CALLER)) is None
        assert [run.domain.principal_id for run in b.wall.runs] == ["somebody"]


@pytest.mark.row("S4", "S1")
@pytest.mark.parametrize("missing", list(Limit))
async def test_wall_that_cannot_enforce_a_limit_is_never_used(home: Path, missing: Limit) -> None:
    wall = FakeWall(required=frozenset(Limit), enforced=frozenset(Limit) - {missing})
    async with bench(home, wall=wall) as b:
        envelope = await b.engine.call("calculator", {"expression": "1"})
        assert _code(envelope) == "SANDBOX_UNAVAILABLE"
        assert wall.runs == []
        assert b.engine.walls["interpreter"]["ready"] is False


LYING = frozenset[Limit]()
"""What a wall requires that would run anything."""

CALLS: dict[str, Any] = {"calculator": {"expression": "1"}, "run_python": {"code": "1"}}


@pytest.mark.row("S4", "S1")
@pytest.mark.parametrize(
    ("tool", "missing"),
    # No program in the interpreter can write files, so some limits do not apply there.
    [("calculator", limit) for limit in sorted(PROCESS_WALL_LIMITS)]
    + [("run_python", limit) for limit in Limit],
)
async def test_wall_that_requires_less_than_the_engine_is_never_used(
    home: Path, tool: str, missing: Limit
) -> None:
    wall = FakeWall(required=LYING, enforced=frozenset(Limit) - {missing})
    async with Engine(config=Config(home=home), interpreter=wall, container=wall) as engine:
        envelope = await engine.call(tool, CALLS[tool])
        assert _code(envelope) == "SANDBOX_UNAVAILABLE"
        assert f"wall cannot enforce {missing} on this host" in error_of(envelope).message
        assert engine.walls["container"]["ready"] is False
    assert wall.runs == []


@pytest.mark.parametrize(
    ("tool", "enforced"), [("calculator", PROCESS_WALL_LIMITS), ("run_python", frozenset(Limit))]
)
async def test_twin_wall_that_enforces_what_the_engine_requires_is_used(
    home: Path, tool: str, enforced: frozenset[Limit]
) -> None:
    wall = FakeWall(required=LYING, enforced=enforced)
    async with Engine(config=Config(home=home), interpreter=wall, container=wall) as engine:
        assert _code(await engine.call(tool, CALLS[tool])) is None
    assert len(wall.runs) == 1


async def test_control_wall_is_used_if_the_engine_requires_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fumehood.sandbox.wall.least_limits", lambda wall: LYING)
    wall = FakeWall(required=LYING, enforced=LYING)
    async with Engine(config=Config(home=home), interpreter=wall, container=wall) as engine:
        assert _code(await engine.call("run_python", CALLS["run_python"])) is None
    assert len(wall.runs) == 1


# -- host functions -----------------------------------------------------------------------


def _circle() -> Any:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    return circle


async def test_invalid_params_come_from_parameter_types_but_not_from_function_code(
    home: Path,
) -> None:
    async def act(day: date) -> Any:
        raise InvalidParams("Not on a Sunday.", fields=["day"])

    async with bench(home, [_host(act)]) as b:
        wrong = await b.engine.call("act", {"day": "2026-02-30"})
        refused = await b.engine.call("act", {"day": "2026-02-01"})
    assert [_code(wrong), _code(refused)] == ["INVALID_PARAMS", "EXECUTION_ERROR"]
    assert error_of(wrong).fields == ("day",)


@pytest.mark.row("E1")
async def test_function_exception_is_logged_and_hidden_from_the_caller(home: Path) -> None:
    async def act() -> Any:
        raise RuntimeError(PRIVATE)

    async with bench(home, [_host(act)]) as b:
        envelope = await b.engine.call("act", {})
        faults, texts = b.log.named("call.tool_failed"), b.log.named("call.tool_failed.text")
        assert PRIVATE not in repr(b.log.above_debug())
    assert _code(envelope) == "EXECUTION_ERROR"
    assert PRIVATE not in envelope.model_dump_json()
    assert [fault["exception"] for fault in faults] == ["RuntimeError"]
    assert [str(text["exc_info"]) for text in texts] == [PRIVATE]
    assert any("act" in place for place in faults[0]["where"])
    assert faults[0]["trace_id"] == envelope.metadata.trace_id


@pytest.mark.row("E2", "E3")
async def test_tokens_and_cost_reported_by_function_are_in_usage(home: Path) -> None:
    async def act() -> Any:
        return ToolResult({"a": 1}, tokens_used=7, cost=Decimal("0.25"))

    async with bench(home, [_host(act, cost_per_use="0.01")]) as b:
        envelope = await b.engine.call("act", {})
    assert envelope.data == {"a": 1}
    usage = envelope.metadata.usage
    assert (usage.tokens_used, usage.cost) == (7, "0.260000")


@pytest.mark.row("E3")
async def test_failed_run_is_charged(home: Path) -> None:
    tools = [expression_document(cost_per_use="0.01")]
    async with bench(home, tools, _ends(ended_by=EndedBy.WALL_TIME)) as b:
        envelope = await b.engine.call("sums", {"expression": "1"})
    assert envelope.metadata.usage.cost == "0.010000"


# -- cancellation and faults of the engine ------------------------------------------------


@pytest.mark.row("E1")
async def test_wall_exception_is_an_internal_error_without_its_text(home: Path) -> None:
    def fail(run: SeenRun) -> RunEnding:
        raise RuntimeError(PRIVATE)

    async with bench(home, wall=FakeWall(fail)) as b:
        envelope = await b.engine.call("calculator", {"expression": "1"})
        faults, texts = b.log.named("call.internal_error"), b.log.named("call.internal_error.text")
        assert PRIVATE not in repr(b.log.above_debug())
        (record,) = (await b.engine.calls()).items
        assert record.code == "INTERNAL_ERROR"
        b.wall.answer = always_four
        assert _code(await b.engine.call("calculator", {"expression": "1"})) is None
    assert _code(envelope) == "INTERNAL_ERROR"
    assert PRIVATE not in envelope.model_dump_json()
    assert "RuntimeError" not in envelope.model_dump_json()
    assert [fault["exception"] for fault in faults] == ["RuntimeError"]
    assert [str(text["exc_info"]) for text in texts] == [PRIVATE]


# -- embedded calls -----------------------------------------------------------------------


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "arguments",
    [
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": "\ud800"},
        {"\ud800": 1},
        {"a": object()},
        {"a": {1, 2}},
        {"a": b"bytes"},
        {(1, 2): 1},
        {"a": [10**5000]},
        {1: 1, "1": 2},
        _circle(),
        json.loads("[" * 65 + "]" * 65),
        [],
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
async def test_arguments_that_are_not_strict_json_are_refused(home: Path, arguments: Any) -> None:
    async with bench(home) as b:
        envelope = await b.engine.call("calculator", arguments)
        assert _code(envelope) == "INVALID_PARAMS"
        assert b.wall.runs == []


async def test_function_cannot_change_the_callers_arguments(home: Path) -> None:
    async def act(items: Any) -> Any:
        items.append("changed")
        return {}

    mine = {"items": ["a"]}
    async with bench(home, [_host(act)]) as b:
        await b.engine.call("act", mine)
    assert mine == {"items": ["a"]}


# -- what is logged and shown --------------------------------------------------------------


async def test_call_does_not_run_if_its_intent_cannot_be_recorded(home: Path) -> None:
    async with bench(home) as b:
        remember = b.log.debug

        def full(event: str, **values: Any) -> None:
            if event == "call.intent":
                raise OSError("no space left")
            remember(event, **values)

        b.log.debug = full  # type: ignore[method-assign]
        envelope = await b.engine.call("calculator", {"expression": "1"})
        assert _code(envelope) == "INTERNAL_ERROR"
        assert b.wall.runs == []


@pytest.mark.row("P11")
@pytest.mark.parametrize(
    ("allowed", "asked", "shown"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
async def test_debug_info_needs_operator_setting_and_callers_option(
    home: Path, allowed: bool, asked: bool, shown: bool
) -> None:
    async with bench(home, allow_debug=allowed) as b:
        envelope = await b.engine.call("calculator", {"expression": "1"}, debug=asked)
    assert ("debug_info" in envelope.model_dump()) is shown


@pytest.mark.row("E2", "E3")
@pytest.mark.parametrize(
    ("figure", "values"),
    [
        ("cost", [Decimal("NaN"), Decimal("Infinity"), Decimal(-1), 0.1, "0.1", None]),
        ("cost", [Decimal("1e30"), Decimal("1e22")]),
        ("tokens_used", [-1, "many", 1.5, None, True]),
    ],
    ids=["invalid-cost", "excessive-cost", "invalid-token-count"],
)
async def test_invalid_reported_cost_or_tokens_is_an_execution_error(
    home: Path, figure: str, values: list[Any]
) -> None:
    reported = iter(values)

    async def act() -> Any:
        return ToolResult({}, **{figure: next(reported)})

    async with bench(home, [_host(act)]) as b:
        for value in values:
            envelope = await b.engine.call("act", {})
            assert (_code(envelope), value) == ("EXECUTION_ERROR", value)
            assert envelope.metadata.usage.cost == "0.000000"


@pytest.mark.row("P8")
async def test_cancelled_error_raised_by_function_is_not_a_call_cancellation(
    home: Path,
) -> None:
    async def act() -> Any:
        raise anyio.get_cancelled_exc_class()

    async with bench(home, [_host(act)]) as b:
        envelope = await b.engine.call("act", {})
    assert _code(envelope) == "EXECUTION_ERROR"


# -- for an agent --------------------------------------------------------------------------

SPEAKER = Principal("uid:1", frozenset({Scope.CALL}), frozenset({"a"}))


@pytest.mark.row("R3", "E2")
async def test_fixed_arguments_are_not_counted_as_the_callers_tokens(home: Path) -> None:
    """Their length would tell of them."""

    async def act(to: str, key: str = "") -> dict[str, int]:
        return {"length": len(key)}

    async with bench(home, [_host(act)]) as b:
        await make_agent(b.engine.agents, "a", "uid:1")
        await bind(b.engine.agents, "a", ["act"], fixed={"key": PRIVATE * 50})
        body = CallBody(arguments={"to": "x"}, options={"agent_id": "a", "debug": True})
        done = await b.engine.run("act", body, SPEAKER)
        assert PRIVATE not in str(b.log.above_debug())
    assert done.data == {"length": len(PRIVATE) * 50}
    assert done.metadata.usage.input_tokens < 10
    assert PRIVATE not in done.model_dump_json()


@pytest.mark.row("R3", "S2")
async def test_agent_call_runs_in_the_agents_trust_domain(home: Path) -> None:
    async with bench(home) as b:
        await make_agent(b.engine.agents, "a", "uid:1")
        await bind(b.engine.agents, "a", ["calculator"])
        for options in ({"agent_id": "a"}, {}):
            body = CallBody(arguments={"expression": "2+2"}, options=options)
            assert _code(await b.engine.run("calculator", body, SPEAKER)) is None
    assert [run.domain for run in b.wall.runs] == [
        TrustDomain("uid:1", "a"),
        TrustDomain("uid:1"),
    ]
