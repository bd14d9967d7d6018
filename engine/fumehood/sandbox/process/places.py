"""Places: how many runs there may be at once in one wall, and how long others wait.

Host side, used by the walls that are made of processes. Invariant: waiting is bounded in
number and in time.
"""

from __future__ import annotations

import anyio

from fumehood.model.errors import SandboxUnavailable

MAX_WAITING = 2000
QUEUE_PATIENCE_S = 30.0


class Places:
    """The places of one wall. `what` names it to the caller who found none."""

    def __init__(self, most: int, what: str) -> None:
        self._places = anyio.CapacityLimiter(most)
        self._what = what

    async def take(self, holder: object) -> None:
        """Wait, bounded, for a place.

        Raises:
            SandboxUnavailable: too many wait already, or it took over 30 s.
        """
        try:
            self._places.acquire_on_behalf_of_nowait(holder)
            return
        except anyio.WouldBlock:
            pass
        if self._places.statistics().tasks_waiting >= MAX_WAITING:
            raise self._busy()
        taken = False
        with anyio.move_on_after(QUEUE_PATIENCE_S):
            await self._places.acquire_on_behalf_of(holder)
            taken = True
        if not taken:
            raise self._busy()

    def leave(self, holder: object) -> None:
        """Give the place to the next who waits."""
        self._places.release_on_behalf_of(holder)

    def _busy(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"Too many calls wait for {self._what}. Repeat the call later.", retry_after_ms=1000
        )
