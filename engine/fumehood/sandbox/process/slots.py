"""Slots: the number of concurrent runs of one wall, and the queue for them.

Host side, used by the walls that are made of processes. Invariants: waiting is bounded in number
and in time; one principal never has all slots or the whole queue, so its calls, however long they
run, do not lock out those of others.
"""

from __future__ import annotations

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.fair_share import FairShare, Lack
from fumehood.sandbox.wall import MAX_WAITING

QUEUE_PATIENCE_S = 30.0


class Slots:
    """The slots of one wall. `what` names it in errors."""

    def __init__(self, most: int, what: str) -> None:
        self._running = FairShare(most, most - most // 4)
        self._waiting = FairShare(MAX_WAITING, MAX_WAITING // 2)
        self._queue: dict[anyio.Event, str] = {}
        """Principals whose turn has not come, in order of arrival."""
        self._what = what

    async def take(self, principal_id: str) -> None:
        """Wait, bounded, until one of the principal's share and one of all slots is free.

        Raises:
            SandboxUnavailable: too many wait already, or it took over 30 s.
        """
        if self._running.take(principal_id) is None:  # whoever waits could not have had it
            return
        if self._waiting.take(principal_id) is not None:
            raise self._busy()
        turn = anyio.Event()
        self._queue[turn] = principal_id
        try:
            with anyio.move_on_after(QUEUE_PATIENCE_S):
                await turn.wait()
        except BaseException:
            if turn.is_set():  # in the same moment
                self.leave(principal_id)
            raise
        finally:
            self._queue.pop(turn, None)
            self._waiting.give_back(principal_id)
        if not turn.is_set():
            raise self._busy()

    def leave(self, principal_id: str) -> None:
        """Give the slot to the next call that may have it."""
        self._running.give_back(principal_id)
        for turn, waiting in list(self._queue.items()):
            lack = self._running.take(waiting)
            if lack is Lack.TOTAL:
                break
            if lack is None:
                del self._queue[turn]
                turn.set()

    def _busy(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"Too many calls wait for {self._what}. Repeat the call later.", retry_after_ms=1000
        )
