"""The wall of the documentation's example, and a service for it that has a real wall behind it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from fumehood.core.identity import TrustDomain
from fumehood.core.limits import Limit, Limits
from fumehood.sandbox.wall import Wall
from support.pages import read

PAGE = "docs/howto/add-a-wall.md"


def example() -> str:
    """The text of the example's only module."""
    (text,) = re.findall(r"^```python example\n(.*?)^```$", read(PAGE), re.MULTILINE | re.DOTALL)
    return str(text)


def example_module() -> Any:
    """The example's module, imported."""
    module = ModuleType("fumehood_cloud")
    exec(compile(example(), PAGE, "exec"), vars(module))
    return module


@asynccontextmanager
async def running_service(
    wall: Wall, enforced: object = tuple(Limit), answer: bytes | None = None
) -> AsyncIterator[str]:
    """A service whose programs run behind `wall`; its URL. It says that it enforces `enforced`, and
    gives each run this `answer`, if there is one.
    """

    async def run(order: Any) -> bytes:
        limits = Limits(**order["limits"])
        async with wall.lease(TrustDomain("cloud"), fresh=True, memory_mb=limits.memory_mb) as slot:
            ending = await slot.run(order["program"], order["arguments"], limits)
        said = {
            "ended_by": ending.ended_by, "cpu_ms": ending.cpu_ms, "result": ending.result,
            "message": ending.claimed_message,
        }  # fmt: skip
        return json.dumps(said).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /limits "):
            body = json.dumps(enforced).encode()
        else:
            length = re.search(r"content-length: (\d+)", head.lower())
            assert length is not None
            asked = await reader.readexactly(int(length[1]))
            body = await run(json.loads(asked)) if answer is None else answer
        size = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + size.encode() + body)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
