"""The wire to a server's program: answers of a hostile server reach only the request they name."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from fumehood.mcp.client.wire import Request, StreamWire, served
from fumehood.protocol import strict_json

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Program:
    """A server that answers the first request with these messages."""

    said = b""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.received: list[Any] = []

    async def read(self) -> bytes:
        return await self._lines.get()

    async def write(self, data: bytes) -> None:
        self.received.append(strict_json.loads(data))
        if len(self.received) == 1:
            for answer in self._answers:
                self._lines.put_nowait(strict_json.dumps({"jsonrpc": "2.0", **answer}) + b"\n")

    async def stop(self) -> None:
        """It has no process."""


async def first_result(program: Program, request: Request | None = None) -> Any:
    async with served(program) as (wire, _):
        assert isinstance(wire, StreamWire)
        with anyio.fail_after(120):
            return await wire.send(request or Request("tools/list", {}))


@pytest.mark.parametrize("other", [True, "1", 1.0, None, [1], {}, 2])
async def test_answer_without_the_id_of_the_request_is_not_its_answer(other: Any) -> None:
    program = Program({"id": other, "result": {"of": "another"}}, {"id": 1, "result": {"of": "1"}})
    assert await first_result(program) == {"of": "1"}


@pytest.mark.parametrize(
    ("token", "done", "reported"),
    [(1, 50, [50.0]), (True, 50, []), ("1", 50, []), ([1], 50, []), (1, True, [])],
)
async def test_progress_reaches_only_the_request_with_its_token(
    token: Any, done: Any, reported: list[float]
) -> None:
    found: list[float] = []
    params = {"progressToken": token, "progress": done}
    progress = {"method": "notifications/progress", "params": params}
    request = Request("tools/call", {}, lambda percent, message: found.append(percent))
    await first_result(Program(progress, {"id": 1, "result": {}}), request)
    assert found == reported


@pytest.mark.parametrize(
    ("id_", "is_request"), [(7, True), ("7", True), (True, False), ("7" * 201, False)]
)
async def test_only_a_request_with_a_valid_id_is_answered(id_: Any, is_request: bool) -> None:
    program = Program({"id": id_, "method": "ping"}, {"id": 1, "result": {}})
    await first_result(program)
    replies = [{"jsonrpc": "2.0", "id": id_, "result": {}}] if is_request else []
    assert program.received[1:] == replies
