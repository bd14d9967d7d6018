"""A place that is held: one container for one session, from its first call to its end.

Host side. Above it `sessions`, below it the walls that have such places. Invariant: a held place
serves one trust domain, one run at a time, and ends with its holder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits, WallLimits
from fumehood.sandbox.wall import RunEnding, RunSinks


class HeldPlace(Protocol):
    """One place, for one session."""

    @property
    def languages(self) -> tuple[str, ...]:
        """What its image can run."""
        ...

    @property
    def lost(self) -> str | None:
        """Why it is not there any more, as one clause; None while it is."""
        ...

    async def until_free(self) -> None:
        """Wait, bounded, until the last run has been cleared up after, or the place is lost."""
        ...

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """One run in a place that is free. What it leaves, the next one finds."""
        ...

    def end(self, why: str) -> None:
        """End it with whatever runs in it. Harmless where it is lost already."""
        ...

    async def until_gone(self) -> None:
        """Wait until nothing is left of a place that was lost or ended."""
        ...


@runtime_checkable
class HoldingWall(Protocol):
    """A wall that gives places to sessions."""

    @property
    def limits(self) -> WallLimits:
        """Defaults and ceilings."""
        ...

    async def hold(
        self,
        domain: TrustDomain,
        *,
        image: str,
        memory_mb: int,
        on_lost: Callable[[], None],
    ) -> HeldPlace:
        """Wait, bounded, for a place in which nothing has run, and keep it for this domain.

        `on_lost` is called once, when the place is not there any more, for whatever reason.

        Raises:
            SandboxUnavailable: no place in time, or no such image.
        """
        ...
