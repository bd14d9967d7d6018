"""A call that ends with its client: for `cancel_on_disconnect` on a call that answers once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request

from fumehood.executors.live import CallHandle


@asynccontextmanager
async def cancelled_with(request: Request) -> AsyncIterator[CallHandle]:
    """What lets the call inside be ended, and ends it as soon as its client has gone."""
    live = CallHandle()
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_when_gone, request, live)
        yield live
        group.cancel_scope.cancel()


async def _cancel_when_gone(request: Request, live: CallHandle) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    live.cancel()
