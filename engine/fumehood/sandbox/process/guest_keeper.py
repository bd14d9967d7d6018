"""The keeper: always one running guest for a wall, and the next one when it dies.

Host side, between a wall and `channel`. A guest that dies is replaced at once, more slowly
if it does not last; calls that waited go to the new one, and only what was running in the
old one is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.abc

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit
from fumehood.sandbox.process.channel import GuestFailed, GuestProcess
from fumehood.sandbox.process.sticky_workers import DEFAULT_RULES, StickyWorkerSettings

RESTART_PAUSE_S = (0.0, 0.1, 0.5, 2.0)
"""Pauses before a new guest, by how many guests in a row did not last a second."""

STABLE_S = 1.0
GUEST_PATIENCE_S = 10.0

OnEvent = Callable[[str, JsonObject], None]


class GuestKeeper:
    """An asynchronous context manager: entering it starts the guest and waits, bounded."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        required: frozenset[Limit],
        cure: str,
        on_event: OnEvent,
        residents: StickyWorkerSettings = DEFAULT_RULES,
    ) -> None:
        self._name = name
        self._command = list(command)
        self._required = required
        self._cure = cure
        self._on_event = on_event
        self._resident_rules = residents
        self._guest: GuestProcess | None = None
        self._changed = anyio.Event()
        self._faults: tuple[str, ...] = ()
        self._stack = AsyncExitStack()
        self._stopping = False

    async def __aenter__(self) -> GuestKeeper:
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._keep_a_guest)
        with anyio.move_on_after(GUEST_PATIENCE_S):
            while not self._has_guest() and not self._faults:
                await self._changed.wait()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        await self._stack.aclose()

    @property
    def enforced(self) -> frozenset[Limit]:
        """What the running guest was seen to enforce; what the last one did while one starts."""
        if self._guest is not None:
            return self._guest.enforced
        return frozenset() if self._faults else self._required

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the last guest could not serve, in its own words. For the operator."""
        return self._faults

    @property
    def guest_pid(self) -> int | None:
        """Process id of the running guest's supervisor."""
        return self._guest.pid if self._guest is not None else None

    async def running(self) -> GuestProcess:
        """The guest that serves now; waits a while for one that is being started.

        Raises:
            SandboxUnavailable: there is none, or it does not enforce what it must.
        """
        if not self._has_guest():
            with anyio.move_on_after(GUEST_PATIENCE_S):
                while not self._has_guest() and not self._stopping:
                    await self._changed.wait()
        if self._guest is None or self._guest.dead.is_set():
            raise SandboxUnavailable(
                f"The {self._name} could not be started. Run `fumehood doctor` to see why.",
                retry_after_ms=1000,
            )
        if self._required - self._guest.enforced:  # it started after `admit` had looked
            raise SandboxUnavailable(f"The {self._name} lost a defence. {self._cure}")
        return self._guest

    def _has_guest(self) -> bool:
        return self._guest is not None and not self._guest.dead.is_set()

    async def _keep_a_guest(self) -> None:
        """Start a guest, wait for its end, start the next; slower if they do not last."""
        short_lives = 0
        while True:
            await anyio.sleep(RESTART_PAUSE_S[min(short_lives, len(RESTART_PAUSE_S) - 1)])
            started = time.monotonic()
            try:
                guest = await GuestProcess.start(self._command, self._resident_rules)
            except GuestFailed as failure:
                self._faults = (str(failure),)
                self._tell("guest.lost", {"why": list(self._faults)})
                self._announce(None)
                short_lives += 1
                continue
            self._faults = guest.faults
            if guest.faults:
                self._tell("guest.lost", {"pid": guest.pid, "why": list(guest.faults)})
                await guest.stop()
                self._announce(None)
                short_lives += 1
                continue
            self._announce(guest)
            self._tell("guest.ready", {"pid": guest.pid})
            try:
                await guest.dead.wait()
            finally:
                self._announce(None)
                await guest.stop()
                why = list(guest.faults) or ["it ended"]
                if not self._stopping:
                    self._tell("guest.lost", {"pid": guest.pid, "why": why})
            short_lives = 0 if time.monotonic() - started > STABLE_S else short_lives + 1

    def _tell(self, event: str, values: JsonObject) -> None:
        self._on_event(event, {"wall": self._name, **values})

    def _announce(self, guest: GuestProcess | None) -> None:
        self._guest = guest
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
