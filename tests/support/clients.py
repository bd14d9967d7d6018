"""Both kinds of client behind one face, so that one test holds for both."""

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
"""Marks of tests in which httpcore2 leaves sockets of failed connections to the collector."""

KINDS = {
    "blocking": (Client, ControlClient),
    "awaiting": (AsyncClient, AsyncControlClient),
}


class Driven:
    """An object whose coroutines are run to their end, one after the other, on one loop."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if inspect.isasyncgenfunction(found):
            return lambda *args, **kwargs: self._followed(found(*args, **kwargs))
        if not inspect.iscoroutinefunction(found):
            return Driven(found, self._runner)
        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))

    def _followed(self, events: AsyncGenerator[Any, None]) -> Iterator[Any]:
        """One item after the other; closing this closes the other."""

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
    """A client of this kind whose methods simply return."""
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
