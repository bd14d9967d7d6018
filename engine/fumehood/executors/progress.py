"""`progress`: how a function says how far it is, wherever it runs.

One public name for tool authors. Who listens is decided by the process that the function
runs in: from the jail and from a worker a report travels to the engine; where nobody listens,
saying it costs nothing and fails nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_MESSAGE_CHARACTERS = 200

Report = Callable[[float, str], None]

_listener: ContextVar[Report | None] = ContextVar("fumehood_progress", default=None)


def progress(percent: float, message: str = "") -> None:
    """Report from inside a tool's function that `percent` (0 to 100) of the work is done.

    Numbers beyond are moved to the nearer end, longer messages than 200 characters are cut,
    and after 1 000 reports of one call further ones are dropped.

    Raises:
        ValueError: `percent` is no finite number.
    """
    is_whole = isinstance(percent, int)  # of any size; no double holds the largest
    if isinstance(percent, bool) or not (is_whole or math.isfinite(percent)):
        raise ValueError("percent must be a finite number")
    listener = _listener.get()
    if listener is not None:
        words = str(message)[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
        listener(float(min(max(percent, 0.0), 100.0)), words)


@contextmanager
def reports_to(listener: Report | None) -> Iterator[None]:
    """Have what runs inside this block report to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
