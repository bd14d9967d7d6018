"""Fallbacks: another tool answers in place of a failed one, subject to every gate itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import ToolError
from fumehood.approvals.model import ApprovalQuery, ApprovalState
from fumehood.call_options import CallBody, CallOptions
from fumehood.core.call_log import CallQuery
from fumehood.core.errors import ERROR_CODES, EngineError, RateLimited, UpstreamTimeout
from fumehood.executors.base import CallHandle, ToolRun
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.gate import Ended, Gate, Hold
from support.answers import code_of, error_of
from support.asking import add_approvers, approve
from support.identities import bind, make_agent
from support.upstreams import UpstreamBench, gone, unsent, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("P7")]

ME = f"uid:{os.getuid()}"


def first(**fields: Any) -> dict[str, Any]:
    """A tool whose service fails, and that has a fallback."""
    return weather(**{"retry_count": 0, "fallback": "archive", **fields})


def archive(**fields: Any) -> dict[str, Any]:
    """The fallback, which calls another service."""
    return weather(
        **{
            "name": "archive", "endpoint": "https://archive.example/", "retry_count": 0,
            "version": "2.1.0", **fields,
        }
    )  # fmt: skip


def fails(made: UpstreamBench, error: EngineError | None = None, **others: Any) -> None:
    """Script one failure of the first tool; `others` are scripts of other tools."""
    made.upstream.scripts.update({"weather": [error or gone()], **others})


@pytest.mark.parametrize(
    "error",
    [
        gone(),
        UpstreamTimeout("The service did not answer."),
        RateLimited("Too many.", retry_after_ms=60_000),
        ToolError("LATER", "Later.", retryable=True),
    ],
)
async def test_fallback_answers_and_envelope_names_both_tools(
    error: EngineError, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = (first(cost_per_use="1"), archive(cost_per_use="0.25"))
    async with upstream_bench(home, monkeypatch, *tools) as made:
        fails(made, error, archive=["an old answer"])
        envelope = await made.call(idempotency_key="k")
        again = await made.call(idempotency_key="k")
        assert made.upstream.runs[1].arguments == {"city": "Oslo"}
        assert made.upstream.asked("archive") == 1
    assert (envelope.success, envelope.error) == (True, None)
    assert envelope.data == {"answer": "an old answer"}
    metadata, told = envelope.metadata, envelope.metadata.fallback
    assert (metadata.tool_name, metadata.usage.cost) == ("weather", "1.000000")
    assert (told.tool, told.tool_version, told.answered) == ("archive", "2.1.0", True)
    assert told.error.message == error.message
    assert told.usage.cost == "0.250000"
    assert told.call_id == f"{metadata.call_id}_fallback"
    assert again.metadata.idempotent_replay
    assert again.metadata.fallback == told


async def test_fallback_answers_if_the_circuit_is_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"circuits": {"min_failures": 1}}
    async with upstream_bench(home, monkeypatch, first(), archive(), **config) as made:
        fails(made)
        await made.call()
        envelope = await made.call()
        assert made.upstream.asked("weather") == 1
    assert envelope.data == {"answer": "fine"}
    assert envelope.metadata.fallback.error.code == "CIRCUIT_OPEN"
    assert envelope.metadata.usage.cost == "0.000000"


class Noting(Hold, Gate):
    """Notes how what it holds for each call ends."""

    def __init__(self, tool: str, ended: list[str]) -> None:
        self._tool, self._ended = tool, ended

    async def hold(self, permitted: PermittedCall, *, is_let_pass: bool) -> Hold:
        return Noting(permitted.tool.definition.name, self._ended)

    def settle(self, ended: Ended) -> None:
        self._ended.append(f"{self._tool} settled")

    def release(self) -> None:
        self._ended.append(f"{self._tool} released")


async def test_what_gates_hold_for_a_call_ends_once_if_its_fallback_answers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ended = {"circuits": {"min_failures": 1}}, list[str]()
    async with upstream_bench(home, monkeypatch, first(), archive(), **config) as made:
        parts = made.bench.engine._made.services.parts
        object.__setattr__(parts, "gates", (*parts.gates, Noting("", ended)))
        fails(made)
        await made.call()
        assert ended == ["archive settled", "weather settled"]
        ended.clear()
        assert (await made.call()).metadata.fallback.error.code == "CIRCUIT_OPEN"
    assert ended == ["weather released", "archive settled"]


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (gone(), {"idempotent": False}),
        (UpstreamTimeout("Slow."), {"idempotent": False}),
        (ToolError("NO_SUCH_CITY", "There is none."), {}),
        (ERROR_CODES["EXECUTION_ERROR"]("404"), {}),
        (gone(), {"fallback": None}),
    ],
)
async def test_fallback_is_not_used_if_tool_may_have_acted_or_service_did_not_fail(
    error: EngineError, fields: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(**fields), archive()) as made:
        fails(made, error)
        envelope = await made.call()
        assert made.upstream.asked("archive") == 0
    assert envelope.error is not None
    assert envelope.metadata.fallback is None
    assert "fallback" not in envelope.model_dump()["metadata"]


async def test_fallback_is_used_if_the_request_was_not_sent(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(idempotent=False), archive()) as made:
        fails(made, unsent(gone()))
        assert (await made.call()).data == {"answer": "fine"}


@pytest.mark.parametrize(
    ("fallback", "code"),
    [
        (archive(dangerous=True), "REQUIRES_HUMAN_APPROVAL"),
        (archive(is_active=False), "TOOL_DISABLED"),
        (archive(strict=True, parameters={"properties": {}}), "INVALID_PARAMS"),
        (archive(name="other"), "TOOL_NOT_FOUND"),
    ],
)
async def test_fallback_refused_by_a_gate_is_not_used(
    fallback: Any, code: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(), fallback) as made:
        engine = made.bench.engine
        await add_approvers(engine)
        fails(made)
        envelope = await made.call()
        assert made.upstream.asked("archive") == 0
        assert (await engine.approvals.list(ApprovalQuery())).items == ()
    assert (code_of(envelope), error_of(envelope).retryable) == ("NETWORK_ERROR", True)
    assert envelope.metadata.fallback.answered is False
    assert envelope.metadata.fallback.error.code == code
    assert envelope.metadata.warnings[-1] == f"fallback: archive gave no answer ({code})"


async def test_fallback_needs_its_own_agent_binding(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: an agent without a binding to the fallback. Twin: an agent with one."""
    secret = {"properties": {"city": {"type": "string"}, "key": {"type": "string"}}}
    tools = (first(parameters=secret), archive(parameters=secret))
    async with upstream_bench(home, monkeypatch, *tools) as made:
        agents = made.bench.engine.agents
        for name in ("without", "with"):
            await make_agent(agents, name, ME)
            await bind(agents, name, ["weather"], fixed={"key": "PRIVATE"})
        await bind(agents, "with", ["archive"], sort_order=7)
        fails(made)
        refused = await made.call(agent_id="without")
        assert made.upstream.asked("archive") == 0
        fails(made)
        answered = await made.call(agent_id="with")
        assert made.upstream.runs[-1].arguments == {"city": "Oslo"}
    assert refused.metadata.fallback.error.code == "PERMISSION_DENIED"
    assert answered.success


async def test_fallback_of_a_fallback_is_not_called(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = (first(), archive(fallback="weather"))
    async with upstream_bench(home, monkeypatch, *tools) as made:
        fails(made, archive=[gone(), gone()])
        envelope = await made.call()
        assert made.upstream.asked() == made.upstream.asked("archive") == 1
    assert envelope.error is not None
    assert envelope.metadata.fallback.error.code == "NETWORK_ERROR"


@pytest.mark.row("P3")
@pytest.mark.parametrize("idempotent", [True, False])
async def test_keyed_call_is_not_rerun_if_its_fallback_may_have_acted(
    idempotent: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(), archive(idempotent=idempotent)) as made:
        fails(made, archive=[gone()])
        envelope = await made.call(idempotency_key="k")
        fails(made, archive=[gone()])
        await made.call(idempotency_key="k")
        assert made.upstream.asked("archive") == (2 if idempotent else 1)
    assert error_of(envelope).retryable is idempotent


@pytest.mark.row("A5")
async def test_approved_call_never_uses_a_fallback(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(dangerous=True), archive()) as made:
        engine = made.bench.engine
        await add_approvers(engine)
        fails(made)
        asked = await made.call()
        ended = await approve(engine, asked.error.approval_id)
        assert ended.state is ApprovalState.FAILED
        answer = await engine.approvals.answer_of(asked.metadata.call_id, engine.owner)
        assert made.upstream.asked() == 1
        assert made.upstream.asked("archive") == 0
    assert answer.error.code == "NETWORK_ERROR"
    assert answer.metadata.fallback is None


@pytest.mark.row("P8")
async def test_cancelled_call_cancels_its_fallback(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upstream_bench(home, monkeypatch, first(), archive()) as made:
        begun, ended = anyio.Event(), anyio.Event()

        async def never(run: ToolRun) -> None:
            begun.set()
            try:
                await anyio.Event().wait()
            finally:
                ended.set()

        fails(made, archive=[never])
        engine, handle = made.bench.engine, CallHandle()
        body = CallBody(arguments={"city": "Oslo"}, options=CallOptions())
        with anyio.fail_after(120):
            task = asyncio.create_task(engine.run("weather", body, engine.owner, handle))
            await begun.wait()
            assert handle.cancel()
            envelope = await task
        assert ended.is_set()
        page = await engine.call_log.page(engine.owner.id, CallQuery())
    assert code_of(envelope) == "CANCELLED"
    log = {(call.tool_name, call.code) for call in page.items}
    assert log == {("weather", "CANCELLED"), ("archive", "CANCELLED")}
