"""Both kinds of client behind one interface, so that one test covers both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fumehood import AsyncClient, AsyncControlClient, Client, ControlClient

LEAVES_SOCKETS = (
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.usefixtures("collected"),
)
"""Marks for tests in which httpcore2 leaves sockets of failed connections unclosed."""

KINDS = {
    "blocking": (Client, ControlClient),
    "awaiting": (AsyncClient, AsyncControlClient),
}


class Driven:
    """Wraps an object so that its coroutines run synchronously on one event loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name in ("follow", "stream"):
            return lambda *args, **kwargs: self._followed(found(*args, **kwargs))
        if not inspect.iscoroutinefunction(found):
            return Driven(found, self._runner)
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))

    def _followed(self, events: AsyncGenerator[Any, None]) -> Iterator[Any]:
        """Iterate synchronously; closing it closes the asynchronous iterator."""

        async def following() -> Any:
            return await anext(events)

        try:
            while True:
                try:
                    yield self._runner.run(following())
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(events.aclose())


@contextmanager
def client_of(kind: str, path: Any, *, control: bool = False, **settings: Any) -> Iterator[Any]:
    """A client of this kind with synchronous methods."""
    made = KINDS[kind][control](path, **settings)
    if kind == "blocking":
        with made:
            yield made
        return
    with asyncio.Runner() as runner:
        driven = Driven(made, runner)
        try:
            yield driven
        finally:
            driven.close()
