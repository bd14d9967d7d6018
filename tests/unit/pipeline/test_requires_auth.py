"""Tools with `requires_auth`: only for callers with a token and for the embedding program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood.approvals.model import ApprovalState, NewDecision
from fumehood.core.call import CallBody, CallOptions, RawBatch
from fumehood.core.events import ProgressEvent
from fumehood.core.identity import Principal, Scope
from fumehood.pipeline.stream import events_of
from support.upstreams import UpstreamBench, gone, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("T2")]

ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


async def token_of(made: UpstreamBench) -> Principal:
    """The principal of a new token, as an interface creates it."""
    engine = made.bench.engine
    _, text = await engine.tokens.new(
        "ci", principal_id="token:ci", scopes=[Scope.CALL], agents=[], expires_at=None,
        by=ADMIN, now=engine.now(),
    )  # fmt: skip
    return engine.tokens.principal_of(text, engine.now())


async def code_of(made: UpstreamBench, principal: Principal, tool: str = "weather") -> Any:
    body = CallBody(arguments={"city": "Oslo"})
    envelope = await made.bench.engine.run(tool, body, principal)
    return envelope.error.code if envelope.error is not None else None


async def test_requires_auth_refuses_bare_uid_but_not_token_or_embedding_program(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = weather(requires_auth=True), weather(name="open")
    async with upstream_bench(home, monkeypatch, *tools) as made:
        engine = made.bench.engine
        peer = engine.principal_of_uid(1000)
        assert await code_of(made, peer) == "UNAUTHORIZED"
        assert made.upstream.asked() == 0
        assert await code_of(made, await token_of(made)) is None
        assert (await made.call()).success
        assert made.upstream.asked() == 2
        assert await code_of(made, peer, "open") is None  # control


async def test_requires_auth_applies_to_batch_stream_fallback_and_dry_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = weather(requires_auth=True), weather(name="first", fallback="weather", retry_count=0)
    async with upstream_bench(home, monkeypatch, *tools) as made:
        engine, arguments = made.bench.engine, {"city": "Oslo"}
        peer, token = engine.principal_of_uid(1000), await token_of(made)
        for principal, expected in ((peer, "UNAUTHORIZED"), (token, None)):
            batch = RawBatch(calls=[{"tool": "weather", "arguments": arguments}])
            (answer,) = await engine.open_batch(batch, principal).run()
            assert (answer.error.code if answer.error else None) == expected
            call = engine.open_stream("weather", CallBody(arguments=arguments), principal)
            refusal = await call.begun()
            assert (refusal.error.code if refusal and refusal.error else None) == expected
            if refusal is None:
                events = [event async for event in events_of(call)]
                assert isinstance(events[0], ProgressEvent)
            made.upstream.scripts["first"] = [gone()]
            other = await engine.run("first", CallBody(arguments=arguments), principal)
            assert other.success is (expected is None)
            dry = CallBody(arguments=arguments, options=CallOptions(dry_run=True))
            planned = await engine.run("weather", dry, principal)
            assert (planned.error.code if planned.error else None) == expected
            if expected is None:
                assert planned.data["requires_auth"] is True
            else:
                assert made.upstream.asked() == 0
                assert "fumehood tokens new" in answer.error.message  # type: ignore[union-attr]
    assert made.upstream.asked() == 3


@pytest.mark.row("A5")
@pytest.mark.parametrize("has_token", [True, False])
async def test_approved_call_keeps_its_callers_authentication(
    home: Path, monkeypatch: pytest.MonkeyPatch, has_token: bool
) -> None:
    tool = weather(requires_auth=True, dangerous=True)
    async with upstream_bench(home, monkeypatch, tool) as made:
        engine = made.bench.engine
        await engine.approvers.add("alice", [Scope.APPROVE], by=ADMIN, now=engine.now())
        caller = await token_of(made) if has_token else engine.owner
        assert await code_of(made, engine.principal_of_uid(1000)) == "UNAUTHORIZED"
        asked = await engine.run("weather", CallBody(arguments={"city": "Oslo"}), caller)
        assert asked.error is not None
        approval_id = asked.error.approval_id
        assert approval_id is not None
        yes = NewDecision(decision="approve")
        await engine.approvals.decide(approval_id, yes, ALICE, channel="test")
        seen = 0
        with anyio.fail_after(20):
            while (await engine.approvals.show(approval_id)).state is not ApprovalState.DONE:
                seen = await engine.approvals.next_change(seen, within_s=1)
        assert made.upstream.asked() == 1
