"""Tools that give their results in parts, each for the jail, for a worker, and for the engine's own
process. Modules of a process are its own, so each yields its process id where a test needs it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from typing import Any

from fumehood import ToolError, ToolResult, tool

KEY = "ghp_" + "a1B2c3D4e5" * 4
"""A token of a common form."""


def _make(kind: str) -> Iterator[Any]:
    match kind:
        case "text":
            yield from ("one ", "two ", "drei ä€🙂")
        case "values":
            yield from ({"n": 1}, "two", [3, None])
        case "nothing":
            return
        case "figures":
            yield "paid"
            yield ToolResult(" for", tokens_used=3)
            yield ToolResult(None, tokens_used=4, cost=Decimal("0.5"))
        case "key":
            yield from KEY
            yield " and more"
        case "unfit":
            yield "before "
            yield object()
        case "refuses":
            yield "before "
            raise ToolError("BANK_BUSY", "Too many customers.", retryable=True)
        case "returns":
            yield "part"
            return "result"
        case "slow":
            yield f"{os.getpid()}\n"
            while True:
                time.sleep(0.01)
        case "endless":
            yield f"{os.getpid()}\n"
            while True:
                yield "x" * 1000
        case "tiny":
            while True:
                yield ""
        case "many":
            yield from ("x" for _ in range(20_000))


@tool(streaming=True)
def jailed(kind: str) -> Iterator[Any]:
    """Yield parts, in the jail."""
    return (yield from _make(kind))


@tool(streaming=True)
async def jailed_async(kind: str) -> AsyncIterator[Any]:
    """Yield parts, in the jail, asynchronously."""
    for part in _make(kind):
        yield part
        await asyncio.sleep(0)


@tool(streaming=True, sandboxed=False, idempotent=True, retry_count=2)
def worked(kind: str) -> Iterator[Any]:
    """Yield parts, in a worker."""
    return (yield from _make(kind))


@tool(streaming=True, sandboxed=False, idempotent=True, retry_count=2, name="awaited")
async def awaited(kind: str) -> AsyncIterator[Any]:
    """Yield parts, in the engine's own process."""
    if kind == "slow":
        yield f"{os.getpid()}\n"
        await asyncio.sleep(3600)
    for part in _make(kind):
        yield part


@tool(streaming=True)
def forging(count: int, text: str) -> Iterator[str]:
    """Write frames of parts past the engine's own code, in the jail."""
    frame = b'{"part":%s}' % text.encode()
    for _ in range(count):
        os.write(4, len(frame).to_bytes(4, "big") + frame)
    yield "honest"


TOOLS = [jailed, jailed_async, worked, awaited]
