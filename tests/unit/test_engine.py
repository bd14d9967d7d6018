"""What an engine says of itself, on a fake wall."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood.model.answers import ToolDetails
from fumehood.model.errors import ToolNotFound
from support.recording import bench

pytestmark = pytest.mark.anyio


@pytest.mark.row("D1", "D6")
async def test_engine_is_ready_while_it_serves_and_not_before_or_after(home: Path) -> None:
    async with bench(home) as made:
        readiness = made.engine.ready()
        assert readiness.status == "ready"
        assert readiness.walls["interpreter"].ready
        made.engine.drain()
        assert made.engine.ready().status == "not_ready"
    assert made.engine.ready().status == "not_ready"


@pytest.mark.row("T4")
async def test_tool_is_shown_with_its_versions_or_refused(home: Path) -> None:
    async with bench(home) as made:
        details = made.engine.tool("calculator")
        assert isinstance(details, ToolDetails)
        assert details.versions == (details.tool.version,)
        with pytest.raises(ToolNotFound):
            made.engine.tool("nothing")
