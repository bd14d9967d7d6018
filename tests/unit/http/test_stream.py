"""Events to one client: comments while nothing happens, and an end with who takes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, tool
from fumehood.core.call import CallBody
from fumehood.http.routes import stream
from fumehood.http.routes.stream import EventsResponse
from fumehood.protocol import sse
from fumehood.testing import FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("S8", "D2")]


@tool(sandboxed=False)
async def wait() -> None:
    """Wait to be ended."""
    await asyncio.Event().wait()


class Connection:
    """What the server offers: it takes what it is sent, or not."""

    def __init__(self, *, stuck_after: int = 1000) -> None:
        self.sent: list[dict[str, Any]] = []
        self.aborted = False
        self.left = anyio.Event()
        self._stuck_after = stuck_after

    @property
    def scope(self) -> dict[str, Any]:
        return {"type": "http", "state": {"abort": self._abort}}

    def _abort(self) -> None:
        self.aborted = True

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self._stuck_after:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def respond(home: Path, connection: Connection, until: Any, *, cancels: bool = False) -> None:
    """Follow a call that waits, until something holds; then the client leaves."""
    async with Engine([wait], config=Config(home=home), interpreter=FakeWall()) as engine:
        call = engine.open_stream("wait", CallBody(), engine.owner)
        assert await call.begun() is None
        response = EventsResponse(engine, call, "wait", cancel_on_disconnect=cancels)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(response, connection.scope, connection.receive, connection.send)
                while not until():
                    await anyio.lowlevel.checkpoint()
                connection.left.set()
            while cancels and len(engine._made.calls.running):
                await anyio.lowlevel.checkpoint()
        assert len(engine._made.calls.running) == (0 if cancels else 1)


async def test_comments_show_that_a_call_which_says_nothing_still_runs(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.01)
    connection = Connection()
    await respond(home, connection, lambda: connection.body.count(sse.KEEP_ALIVE) >= 3)
    decoder = sse.Decoder()
    assert [frame.kind for frame in decoder.feed(connection.body)] == ["tool_progress"]


async def test_client_that_takes_nothing_is_given_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WRITE_DEADLINE_S", 0.01)
    connection = Connection(stuck_after=1)
    await respond(home, connection, lambda: connection.aborted)


@pytest.mark.parametrize("cancels", [True, False])
async def test_client_that_leaves_is_followed_by_its_call_only_where_asked(
    home: Path, cancels: bool
) -> None:
    connection = Connection()
    await respond(home, connection, lambda: b"started" in connection.body, cancels=cancels)
    assert not connection.aborted
