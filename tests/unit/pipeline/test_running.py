"""Running calls: their listeners get what they report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fumehood import Config, Engine, progress, tool
from fumehood.call_options import CallBody
from fumehood.executors.base import CallHandle
from fumehood.testing import FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("S8", "P8")]

SECRET = "ghp_" + "a1B2" * 9


@tool(sandboxed=False)
async def say(words: str) -> str:
    """Report words."""
    progress(50, words)
    return "said"


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[Engine]:
    async with Engine([say], config=Config(home=home), interpreter=FakeWall()) as running:
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
