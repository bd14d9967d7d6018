"""Parts of a result: collects the values that a streaming tool yields, and passes them on as text.

This module runs on both sides of the wall: in the jail's child process, in a worker process, and in
the engine for asynchronous functions of the host. Invariant: the total JSON of one call's parts
never exceeds the call's output limit, so an endless generator is stopped. A size that another
process reports is only a claim, so walls measure it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

from pydantic_core import to_jsonable_python

from fumehood.core.call import ToolResult
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_REPORT_CHARACTERS, whole_words

PROMPT_PIECES = 1000
"""Number of text pieces of one call that are passed on immediately. Later pieces may be
combined."""

PAUSE_S = 0.05
"""For this many seconds after a piece was passed on, later pieces may be held back and combined."""

MAX_HELD_CHARACTERS = 4096
"""Maximum number of characters that are held back at a time."""

Hear = Callable[[str], None]
"""Receives one piece of text."""


class Unfit(Exception):
    """A value cannot be represented in JSON."""


class TooManyParts(Exception):
    """The parts of a call's result exceed the call's output limit."""


def plain(value: Any, max_depth: int = strict_json.MAX_VALUE_DEPTH) -> Any:
    """Convert a value to strict JSON and back, so that it consists of plain JSON types.

    Raises:
        Unfit: JSON cannot represent the value, or the value is nested deeper than `max_depth`.
    """
    try:
        return strict_json.loads(strict_json.dumps(to_jsonable_python(value)), max_depth=max_depth)
    except MemoryError:
        raise
    except Exception:  # the value's own code may raise anything
        raise Unfit from None


class Pieces:
    """Passes pieces of text to `hear`. Many small pieces are combined, because each call of `hear`
    becomes an event.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._held: list[str] = []
        self._size = self._passed = 0
        self._last_s = 0.0

    def add(self, text: str) -> None:
        """Pass a piece on immediately, or hold it back if many pieces have arrived in quick
        succession.
        """
        self._held.append(text)
        self._size += len(text)
        is_soon = time.monotonic() - self._last_s < PAUSE_S
        if self._passed < PROMPT_PIECES or not is_soon or self._size > MAX_HELD_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        """Pass on the pieces that are held back."""
        text = "".join(self._held)
        self._held, self._size = [], 0
        if text:
            self._passed += 1
            self._last_s = time.monotonic()
            self._hear(text)


class Parts:
    """Collects the parts of one call's result. Their total size as JSON is at most `max_bytes`.

    `hear` receives each part as text. A string is passed unchanged, any other value as one line of
    JSON.
    """

    def __init__(self, max_bytes: int, hear: Hear | None = None) -> None:
        self._left = max_bytes
        self._pieces = Pieces(hear) if hear is not None else None
        self._parts: list[Any] = []
        self._tokens_used = 0
        self._cost = Decimal()

    def collect(self, generator: Generator[Any, None, Any]) -> ToolResult:
        """Run a generator to its end and return its parts as one result.

        Raises:
            TooManyParts, Unfit: for the same reasons as in `collect_async`.
            TypeError: the generator returned a value.
        """
        with closing(generator):
            try:
                while True:
                    self._add(next(generator))
            except StopIteration as end:
                if end.value is not None:
                    raise TypeError("a streaming tool yields its parts and returns None") from None
            finally:
                self._flush()
        return self._result()

    async def collect_async(self, generator: AsyncGenerator[Any, None]) -> ToolResult:
        """Run an asynchronous generator to its end and return its parts as one result.

        Raises:
            TooManyParts: the parts exceed `max_bytes`.
            Unfit: JSON cannot represent a part.
        """
        async with aclosing(generator):
            try:
                async for part in generator:
                    self._add(part)
                    await asyncio.sleep(0)  # other tasks must run even if the generator never waits
            finally:
                self._flush()
        return self._result()

    def _add(self, part: Any) -> None:
        if isinstance(part, ToolResult):
            self._tokens_used += part.tokens_used
            self._cost += part.cost
            part = part.data
            if part is None:
                return
        part = plain(part, strict_json.MAX_VALUE_DEPTH - 1)
        encoded = strict_json.dumps(part)
        self._left -= len(encoded) + 1
        if self._left < 0:
            raise TooManyParts
        self._parts.append(part)
        if self._pieces is not None:
            self._pieces.add(part if isinstance(part, str) else f"{encoded.decode()}\n")

    def _flush(self) -> None:
        if self._pieces is not None:
            self._pieces.flush()

    def _result(self) -> ToolResult:
        """Return all parts as one result: joined to one text if every part is a text, otherwise as
        a list.
        """
        is_text = all(isinstance(part, str) for part in self._parts)
        data = "".join(self._parts) if is_text else self._parts
        return ToolResult(data, self._tokens_used, self._cost)


Report = Callable[[float, str], None]
"""Receives a progress report: a percentage from 0 to 100, and a message."""

_listener: ContextVar[Report | None] = ContextVar("fumehood_progress", default=None)


def progress(percent: float, message: str = "") -> None:
    """Report that `percent` (0 to 100) of a tool's work is done. Tool functions call this.

    Numbers outside the range are clamped to it. Messages over 200 characters are cut. Only the
    first 1,000 reports of a call are passed on.

    Raises:
        ValueError: `percent` is not a finite number.
    """
    is_whole = isinstance(percent, int)  # may be too large for `math.isfinite`
    if isinstance(percent, bool) or not (is_whole or math.isfinite(percent)):
        raise ValueError("percent must be a finite number")
    listener = _listener.get()
    if listener is not None:
        words = whole_words(str(message), MAX_REPORT_CHARACTERS).encode("utf-8", "replace").decode()
        listener(float(min(max(percent, 0.0), 100.0)), words)


@contextmanager
def reports_to(listener: Report | None) -> Iterator[None]:
    """Pass progress reports from code inside the block to `listener`. If `listener` is None, drop
    them.
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
