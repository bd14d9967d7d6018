"""Slots: the number of concurrent runs of one wall, and the queue for them.

Host side, used by the process walls and by workers on the host. Invariants: the queue is limited in
length and in time; one principal never has all slots or the whole queue, so its calls, however long
they run, never lock out those of others.
"""

from __future__ import annotations

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.fair_share import FairShare, Lack
from fumehood.sandbox.wall import MAX_WAITING, try_later

QUEUE_PATIENCE_S = 30.0
"""Maximum seconds that a call waits for a slot."""


class Slots:
    """The `most` slots of one wall. `what` names the wall in errors."""

    def __init__(self, most: int, what: str) -> None:
        self._running = FairShare(most, most - most // 4)
        self._waiting = FairShare(MAX_WAITING, MAX_WAITING // 2)
        self._queue: dict[anyio.Event, str] = {}
        """Waiting calls in order of arrival: the event that grants a slot → the principal."""
        self._what = what

    async def take(self, principal_id: str) -> None:
        """Take a slot. Wait up to `QUEUE_PATIENCE_S` until the principal's share and the total
        allow it.

        Raises:
            SandboxUnavailable: too many calls are already waiting, or no slot became free in time.
        """
        if self._running.take(principal_id) is None:  # a waiting call could not use this slot
            return
        if self._waiting.take(principal_id) is not None:
            raise self._busy()
        turn = anyio.Event()
        self._queue[turn] = principal_id
        try:
            with anyio.move_on_after(QUEUE_PATIENCE_S):
                await turn.wait()
        except BaseException:
            if turn.is_set():  # a slot was granted at the same moment
                self.leave(principal_id)
            raise
        finally:
            self._queue.pop(turn, None)
            self._waiting.give_back(principal_id)
        if not turn.is_set():
            raise self._busy()

    def leave(self, principal_id: str) -> None:
        """Return a slot, and grant free slots to the next waiting calls that may have one."""
        self._running.give_back(principal_id)
        for turn, waiting in list(self._queue.items()):
            lack = self._running.take(waiting)
            if lack is Lack.TOTAL:
                break
            if lack is None:
                del self._queue[turn]
                turn.set()

    def _busy(self) -> SandboxUnavailable:
        return try_later(f"Too many calls wait for {self._what}. Repeat the call later.")
