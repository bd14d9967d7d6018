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
"""Longest pause between looks at a cheap condition, in seconds."""

PAUSES_PER_LOOK = 4
"""A condition that starts processes or asks Docker takes as long as many a test: its pauses are so
many times as long as a look, up to half a second.
"""


def wait_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Poll until the condition holds; fail the test at the deadline."""
    begun = looked = time.monotonic()
    while not condition():
        now = time.monotonic()
        waited, took = now - begun, now - looked
        assert waited < deadline_s, "the condition did not come true in time"
        pause = min(max(0.01, waited / 20), LONGEST_PAUSE_S)
        time.sleep(max(pause, min(PAUSES_PER_LOOK * took, 0.5)))
        looked = time.monotonic()


async def settle() -> None:
    """Let every task go on until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
