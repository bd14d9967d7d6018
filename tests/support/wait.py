"""Bounded waiting: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 20.0


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail the test at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)
