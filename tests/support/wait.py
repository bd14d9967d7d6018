"""Bounded waiting for a condition, never for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 120.0
"""Bound on a wait, in seconds. Only a test that fails takes so long; one that passes does not wait
longer for it, and a machine may be so busy that a moment takes a minute.
"""

LONGEST_PAUSE_S = 0.05
"""Longest pause between polls, in seconds; slower conditions are polled less often."""


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail the test at the deadline."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < deadline_s, "the condition did not come true in time"
        time.sleep(min(max(0.01, waited / 20), LONGEST_PAUSE_S))


async def settle() -> None:
    """Let every task go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
