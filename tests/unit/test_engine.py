"""What an engine says of itself, on a fake wall."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine, EngineNotRunning, FumehoodError
from fumehood.approvals.requests import ApprovalRequests
from fumehood.storage.errors import ReadFailed
from fumehood.testing import FakeWall
from support.recording import bench

pytestmark = pytest.mark.anyio


@pytest.mark.row("D1", "D6")
async def test_engine_is_ready_only_while_it_serves(home: Path) -> None:
    async with bench(home) as made:
        readiness = made.engine.ready()
        assert readiness.status == "ready"
        assert readiness.walls["interpreter"].ready
        made.engine.drain()
        assert made.engine.ready().status == "not_ready"
    assert made.engine.ready().status == "not_ready"


async def _call(engine: Engine) -> None:
    await engine.call("calculator", {"expression": "1"})


async def _stream(engine: Engine) -> None:
    async for _ in engine.stream("calculator", {"expression": "1"}):
        pass


@pytest.mark.parametrize("use", [_call, _stream])
async def test_using_an_engine_before_entering_it_explains_how(home: Path, use: Any) -> None:
    with pytest.raises(EngineNotRunning, match=r"Use `async with Engine\(") as raised:
        await use(Engine(config=Config(home=home)))
    assert isinstance(raised.value, FumehoodError)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("use", [_call, _stream])
async def test_using_an_engine_after_leaving_it_is_refused(home: Path, use: Any) -> None:
    async with bench(home) as made:
        await use(made.engine)
    with pytest.raises(EngineNotRunning, match="has stopped"):
        await use(made.engine)


@pytest.mark.parametrize("method", ["call", "stream", "calls", "usage"])
async def test_misspelt_keyword_is_a_type_error(home: Path, method: str) -> None:
    arguments = {"call": ("calculator",), "stream": ("calculator",)}.get(method, ())
    async with bench(home) as made:
        used = getattr(made.engine, method)(*arguments, nonsense=1)
        with pytest.raises(TypeError, match="nonsense"):
            await (anext(used) if method == "stream" else used)


@pytest.mark.row("P9")
async def test_batch_member_without_a_unicode_name_fails_alone(home: Path) -> None:
    right = {"tool": "calculator", "arguments": {"expression": "1"}}
    async with bench(home) as made:
        refused, answered = await made.engine.batch([{"tool": "\ud800"}, right])
    assert refused.error is not None
    assert refused.error.code == "INVALID_PARAMS"
    assert answered.error is None or answered.error.code != "INVALID_PARAMS"


@pytest.mark.row("D6")
async def test_engine_that_fails_to_start_stops_what_has_started(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: ApprovalRequests) -> None:
        raise ReadFailed("the disk failed")

    monkeypatch.setattr(ApprovalRequests, "count_pending", fail)
    engine, before = Engine(config=Config(home=home), interpreter=FakeWall()), asyncio.all_tasks()
    with pytest.raises(ReadFailed):
        await engine.__aenter__()
    assert asyncio.all_tasks() == before
    with pytest.raises(EngineNotRunning):
        await _call(engine)
