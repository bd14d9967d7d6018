"""One session that is active: its place, its clocks, and whose turn it is.

Host side, below `sessions`. Invariant: one call at a time has the place; those that wait are
few, are served in the order in which they came, and wait for a bounded time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.session import KeptSession, SessionRecord, SessionRules, SessionStatus
from fumehood.sandbox.held import HeldPlace

RETRY_AFTER_MS = 1000


@dataclass(eq=False, slots=True)
class Session:
    """Moments are of the host's monotonic clock, but those of the names `…_at`."""

    id: str
    principal_id: str
    agent_id: str | None
    image: str
    memory_mb: int
    place: HeldPlace
    idle_s: float
    lifetime_s: float
    created_at: datetime
    last_used_at: datetime
    created: float
    last_used: float
    calls: int = 0
    users: int = 0
    """Calls that have it or wait for it."""
    is_outdated: bool = False
    """Whether its row says less than this does."""
    finished: KeptSession | None = None
    """What it was, once it has ended or is lost."""
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    def why_over(self, now: float) -> str | None:
        """Why its time is over, if it is."""
        if now >= self.created + self.lifetime_s:
            return "it was there for as long as it may be"
        if not self.users and now - self.last_used >= self.idle_s:
            return f"nobody used it for {self.idle_s:g} s"
        return None

    def next_end(self) -> float:
        """When it ends if nobody uses it before."""
        return min(self.last_used + self.idle_s, self.created + self.lifetime_s)

    async def take_turn(self, rules: SessionRules) -> None:
        """Wait, bounded, for those that came before.

        Raises:
            SandboxUnavailable: they take too long, or are too many.
        """
        if self.users > rules.waiting:
            raise _busy("Too many calls wait for this session already.")
        self.users += 1
        try:
            with anyio.fail_after(rules.queue_s):
                await self._turn.acquire()
        except BaseException as error:
            self.users -= 1
            if isinstance(error, TimeoutError):
                waited = f"This session was busy with other calls for {rules.queue_s:g} s."
                raise _busy(waited) from None
            raise

    def leave_turn(self, now: float, now_at: datetime, *, is_call: bool) -> None:
        """Let the next one have it."""
        self.users -= 1
        self.calls += is_call
        self.last_used, self.last_used_at = now, now_at
        self.is_outdated = True
        self._turn.release()

    def kept(self) -> KeptSession:
        """As its owner sees it."""
        if self.finished is not None:
            return self.finished
        last_end = self.created_at + timedelta(seconds=self.lifetime_s)
        idle_end = self.last_used_at + timedelta(seconds=self.idle_s)
        record = SessionRecord(
            id=self.id,
            state=SessionStatus.ACTIVE,
            why=None,
            image=self.image,
            languages=self.place.languages,
            agent_id=self.agent_id,
            memory_mb=self.memory_mb,
            created_at=self.created_at,
            last_used_at=self.last_used_at,
            expires_at=last_end if self.users else min(idle_end, last_end),
            calls=self.calls,
            is_busy=self.users > 0,
        )
        return KeptSession(self.principal_id, record)

    def finish(self, status: SessionStatus, why: str, now_at: datetime) -> KeptSession:
        """It is no longer active. `why` is one clause."""
        record = self.kept().record.model_copy(
            update={
                "state": status,
                "why": f"{why[0].upper()}{why[1:]}.",
                "expires_at": now_at,
                "is_busy": False,
            }
        )
        self.finished = KeptSession(self.principal_id, record, now_at)
        return self.finished


def _busy(why: str) -> SandboxUnavailable:
    return SandboxUnavailable(f"{why} Repeat the call later.", retry_after_ms=RETRY_AFTER_MS)
