"""Tools with `requires_auth`: only for callers with a token and for the embedding program."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.approvals.model import ApprovalState
from fumehood.call_options import CallBody
from fumehood.core.identity import Principal
from support.answers import code_of, error_of
from support.asking import add_approvers, approve
from support.identities import new_token
from support.upstreams import UpstreamBench, gone, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("T2")]


async def token_of(made: UpstreamBench) -> Principal:
    """The principal of a new token, as an interface creates it."""
    engine = made.bench.engine
    _, text = await new_token(engine.tokens)
    return engine.tokens.principal_of(text, engine.now())


async def outcome(made: UpstreamBench, principal: Principal, tool: str = "weather") -> str:
    body = CallBody(arguments={"city": "Oslo"})
    envelope = await made.bench.engine.run(tool, body, principal)
    return code_of(envelope)


async def test_requires_auth_applies_to_a_fallback(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = weather(requires_auth=True), weather(name="first", fallback="weather", retry_count=0)
    async with upstream_bench(home, monkeypatch, *tools) as made:
        engine = made.bench.engine
        made.upstream.scripts["first"] = [gone(), gone()]
        assert await outcome(made, engine.principal_of_uid(1000), "first") == "NETWORK_ERROR"
        assert made.upstream.asked() == 0
        assert await outcome(made, await token_of(made), "first") == "OK"
    assert made.upstream.asked() == 1


@pytest.mark.row("A5")
@pytest.mark.parametrize("has_token", [True, False])
async def test_approved_call_keeps_its_callers_authentication(
    home: Path, monkeypatch: pytest.MonkeyPatch, has_token: bool
) -> None:
    tool = weather(requires_auth=True, dangerous=True)
    async with upstream_bench(home, monkeypatch, tool) as made:
        engine = made.bench.engine
        await add_approvers(engine)
        caller = await token_of(made) if has_token else engine.owner
        assert await outcome(made, engine.principal_of_uid(1000)) == "UNAUTHORIZED"
        asked = await engine.run("weather", CallBody(arguments={"city": "Oslo"}), caller)
        approval_id = error_of(asked).approval_id
        assert approval_id is not None
        assert (await approve(engine, approval_id)).state is ApprovalState.DONE
        assert made.upstream.asked() == 1
