"""Slots: how many runs one wall has at once, and how long others wait.

Host side, used by the walls that are made of processes. Invariants: waiting is bounded in
number and in time; and one principal never has all slots, nor all of the queue, so its calls,
however long they run, do not keep out those of others.
"""

from __future__ import annotations

import anyio

from fumehood.core.errors import SandboxUnavailable

MAX_WAITING = 2000
QUEUE_PATIENCE_S = 30.0
MAX_UNUSED_SHARES = 1000


class Slots:
    """The slots of one wall. `what` names it in errors."""

    def __init__(self, most: int, what: str) -> None:
        self._slots = anyio.CapacityLimiter(most)
        self._most_of_one = most - most // 4
        self._shares: dict[str, anyio.CapacityLimiter] = {}
        self._waiting = 0
        self._what = what

    async def take(self, holder: object, principal_id: str) -> None:
        """Wait, bounded, for a slot: first for one of the principal's share, then for a free one.

        Raises:
            SandboxUnavailable: too many wait already, or it took over 30 s.
        """
        share = self._share_of(principal_id)
        try:
            self._take_now(share, holder)
            return
        except anyio.WouldBlock:
            pass
        own_waiting = share.statistics().tasks_waiting
        if self._waiting >= MAX_WAITING or own_waiting >= MAX_WAITING // 2:
            raise self._busy()
        taken = False
        self._waiting += 1
        try:
            with anyio.move_on_after(QUEUE_PATIENCE_S):
                await self._take_both(share, holder)
                taken = True
        finally:
            self._waiting -= 1
        if not taken:
            raise self._busy()

    def leave(self, holder: object, principal_id: str) -> None:
        """Give the slot to the next call."""
        self._slots.release_on_behalf_of(holder)
        self._shares[principal_id].release_on_behalf_of(holder)

    def _take_now(self, share: anyio.CapacityLimiter, holder: object) -> None:
        share.acquire_on_behalf_of_nowait(holder)
        try:
            self._slots.acquire_on_behalf_of_nowait(holder)
        except anyio.WouldBlock:
            share.release_on_behalf_of(holder)
            raise

    async def _take_both(self, share: anyio.CapacityLimiter, holder: object) -> None:
        await share.acquire_on_behalf_of(holder)
        try:
            await self._slots.acquire_on_behalf_of(holder)
        except BaseException:
            share.release_on_behalf_of(holder)
            raise

    def _share_of(self, principal_id: str) -> anyio.CapacityLimiter:
        share = self._shares.get(principal_id)
        if share is None:
            if len(self._shares) >= MAX_UNUSED_SHARES:
                self._shares = {who: held for who, held in self._shares.items() if _is_used(held)}
            share = self._shares[principal_id] = anyio.CapacityLimiter(self._most_of_one)
        return share

    def _busy(self) -> SandboxUnavailable:
        return SandboxUnavailable(
            f"Too many calls wait for {self._what}. Repeat the call later.", retry_after_ms=1000
        )


def _is_used(share: anyio.CapacityLimiter) -> bool:
    return share.borrowed_tokens > 0 or share.statistics().tasks_waiting > 0
