"""Running calls: their listeners get what they report, and each call is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from fumehood import Config, Engine, Envelope, progress, tool
from fumehood.call_options import CallBody
from fumehood.executors.base import CallHandle
from fumehood.testing import FakeWall
from support.answers import code_of

pytestmark = [pytest.mark.anyio, pytest.mark.row("S8", "P8")]

SECRET = "ghp_" + "a1B2" * 9


@tool(sandboxed=False)
async def say(words: str) -> str:
    """Report words."""
    progress(50, words)
    return "said"


@tool(sandboxed=False)
async def wait() -> None:
    """Wait to be ended."""
    await asyncio.Event().wait()


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    async with Engine([say, wait], config=Config(home=home), interpreter=FakeWall()) as running:
        yield running


@pytest.mark.parametrize(
    ("words", "told"), [(f"key {SECRET}", "key [redacted]"), ("key ghp_short", "key ghp_short")]
)
async def test_progress_reaches_the_listener_redacted(
    engine: Engine, words: str, told: str
) -> None:
    heard: list[tuple[float, str]] = []
    handle = CallHandle(progress=lambda percent, message: heard.append((percent, message)))
    answer = await engine.run("say", CallBody(arguments={"words": words}), engine.owner, handle)
    assert (answer.data, heard) == ({"value": "said"}, [(50, told)])
    assert handle.progress == (50, told)


async def test_started_call_is_answered_even_if_the_engine_ends(home: Path) -> None:
    begun = anyio.Event()
    answers: list[Envelope] = []
    async with Engine([wait], config=Config(home=home), interpreter=FakeWall()) as engine:
        calls = engine._made.calls
        request = calls.request("wait", CallBody(), engine.owner)
        calls.start(request, CallHandle(begun=begun.set), answers.append)
        with anyio.fail_after(120):
            await begun.wait()
        assert answers == []
    assert [(code_of(one), one.metadata.call_id) for one in answers] == [
        ("SHUTTING_DOWN", request.call_id)
    ]
    assert calls.started == set()
