"""`fumehood serve` with a tool that yields ten parts a second, and room for 200 calls of it.

The engine runs at most 64 host functions at a time, 48 of one principal; here that limit is raised,
because it is the streams that are measured. Each part is the time at which it was due, by the clock that all
processes of this host share: a part that the event loop makes late counts as late.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from functools import partial

from fumehood import tool
from fumehood.sandbox import host, walls

PERIOD_NS = 100_000_000
PLACES = 272
"""Of which one principal may have three quarters."""


@tool(streaming=True, sandboxed=False)
async def tick(start_ns: int, count: int) -> AsyncIterator[str]:
    """Yield the times at which parts were due, from `start_ns` of the monotonic clock on."""
    for number in range(count):
        due_ns = start_ns + number * PERIOD_NS
        await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        yield f"{due_ns}\n"


def main() -> None:
    from fumehood.cli.main import main as command
    from fumehood.http import server

    walls.Host = partial(host.Host, PLACES)  # type: ignore[assignment, misc]
    server.serve = partial(server.serve, tools=[tick])  # type: ignore[assignment]
    sys.argv = ["fumehood", "serve"]
    command()


if __name__ == "__main__":
    main()
