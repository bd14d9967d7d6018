"""A container of a session: taken out of the pool, used by the session alone, gone with it.

Host side, between `sandbox/sessions` and `container`. Invariant: it is known as wanted to the
reaper until it is removed, and it is never given back: what ran in it stays in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.sandbox.container.channel import (
    DIRTY,
    NOT_CLEAN_IN_TIME,
    NOT_ENDED_IN_TIME,
    STREAM_ENDED,
)
from fumehood.sandbox.container.container import Container
from fumehood.sandbox.wall import RunEnding, RunSinks

MAX_CLAIM_CHARACTERS = 200


class HeldContainer:
    """One container that a session has. Hears of it from the moment the pool lets go of it."""

    def __init__(
        self,
        container: Container,
        languages: tuple[str, ...],
        remove: Callable[[HeldContainer], Awaitable[None]],
        start_soon: Callable[..., object],
        on_lost: Callable[[], None],
    ) -> None:
        self.container = container
        self.languages = languages
        self.lost: str | None = None
        self.why = ""
        """The same for the operator: the channel's own words."""
        self._remove = remove
        self._start_soon = start_soon
        self._on_lost = on_lost
        self._has_changed = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def name(self) -> str:
        """What Docker calls it."""
        return self.container.name

    async def until_free(self) -> None:
        """Wait until the last run was cleared up after. The channel has a deadline for that."""
        while self.lost is None and not self.container.is_free:
            self._has_changed.clear()
            await self._has_changed.wait()

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """One run; what it leaves, the next one finds."""
        return await self.container.run(program, arguments, limits, sinks, "session", keep=True)

    def end(self, why: str) -> None:
        """End it with whatever runs in it."""
        self.container.end(why)  # comes back as `on_end`, but where it had ended before
        self.on_end(why)

    async def until_gone(self) -> None:
        """Wait until Docker has removed it."""
        await self._gone.wait()

    # -- what the container says of itself -----------------------------------------------

    def on_clean(self) -> None:
        """It has been cleared up."""
        self._has_changed.set()

    def on_end(self, why: str) -> None:
        """It has ended: by itself, by its channel, or by `end`."""
        if self.lost is not None:
            return
        self.lost, self.why = _in_words(why), why
        self._has_changed.set()
        self._start_soon(self._see_off)
        self._on_lost()

    async def _see_off(self) -> None:
        try:
            await self.container.until_examined()
            await self._remove(self)
        finally:
            self._gone.set()


def _in_words(why: str) -> str:
    """Fit for whoever owns the session: a guest's own words are shown as such, and bounded."""
    if why.startswith(DIRTY):
        claim = "".join(c for c in why.removeprefix(DIRTY) if c.isprintable())
        return (
            "its container could not be cleared up after a run "
            f"({claim[:MAX_CLAIM_CHARACTERS].strip() or 'no reason was given'})"
        )
    words = {
        STREAM_ENDED: "its container is gone",
        NOT_CLEAN_IN_TIME: "its container was not cleared up in time after a run",
        NOT_ENDED_IN_TIME: "its container did not end a run in time",
    }
    return words.get(why, "its container failed")
