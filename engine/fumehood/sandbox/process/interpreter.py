"""The interpreter wall: expressions and programs in a separate, limited process behind a filter.

Host side. One guest serves all trust domains: expressions of each domain in a process of
its own inside it, programs each in a new one. `keeper` replaces a guest that dies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import (
    PROCESS_WALL_LIMITS,
    Limit,
    Limits,
    WallLimits,
)
from fumehood.sandbox.process.channel import GuestProcess, guest_command
from fumehood.sandbox.process.guest_keeper import GuestKeeper, OnEvent
from fumehood.sandbox.process.settings import InterpreterSettings
from fumehood.sandbox.process.slots import Slots
from fumehood.sandbox.process.sticky_workers import DEFAULT_RULES, StickyWorkerSettings
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

INTERPRETER_LIMITS = InterpreterSettings().limits
"""Where nothing is configured."""

SPARES = 2
"""Children that stand ready. One is not enough where programs come one after the other: each
needs a new child, and making one takes longer than running a short program."""

LIBRARIES = ("asteval", "RestrictedPython")
"""What the guest needs besides the standard library."""

MAX_RUNNING = 16
RESIDENT_PATIENCE_S = 0.02
"""How long a call waits for its domain's resident before it takes a fresh process instead."""


class InterpreterWall:
    """Places for expressions and programs. An asynchronous context manager: entering it starts
    the guest."""

    required = PROCESS_WALL_LIMITS
    heals = True
    cure = "The kernel must offer seccomp filters (CONFIG_SECCOMP_FILTER) and /proc."

    def __init__(
        self,
        limits: WallLimits = INTERPRETER_LIMITS,
        command: Sequence[str] | None = None,
        residents: StickyWorkerSettings = DEFAULT_RULES,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.limits = limits
        self._keeper = GuestKeeper(
            "interpreter",
            command if command is not None else interpreter_command(),
            required=self.required,
            cure=self.cure,
            on_event=on_event,
            residents=residents,
        )
        self._places = Slots(MAX_RUNNING, "the interpreter")
        self._turns: dict[str, _Turn] = {}

    async def __aenter__(self) -> InterpreterWall:
        await self._keeper.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._keeper.__aexit__(*exc)

    @property
    def enforced(self) -> frozenset[Limit]:
        """What the running guest was seen to enforce; what the last one did while one starts."""
        return self._keeper.enforced

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the last guest could not serve, in its own words. For the operator."""
        return self._keeper.faults

    @property
    def guest_pid(self) -> int | None:
        """Process id of the running guest's supervisor."""
        return self._keeper.guest_pid

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        language: str | None = None,
    ) -> _Lease:
        """One of 16 places, and the domain's resident if it is free soon."""
        return _Lease(self, domain.principal_id, None if fresh else domain.key)

    async def _take_turn(self, key: str) -> _Turn | None:
        """The domain's turn, or None where its resident is busy for longer than a moment."""
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        if turn.users == 1:  # nobody has it or waits for it, so this does not wait
            await turn.lock.acquire()
            return turn
        taken = False
        try:
            with anyio.move_on_after(RESIDENT_PATIENCE_S):
                await turn.lock.acquire()
                taken = True
        finally:
            if not taken:
                self._forget_turn(key, turn)
        return turn if taken else None

    def _leave_turn(self, key: str, turn: _Turn) -> None:
        turn.lock.release()
        self._forget_turn(key, turn)

    def _forget_turn(self, key: str, turn: _Turn) -> None:
        turn.users -= 1
        if turn.users == 0:
            self._turns.pop(key, None)


class _Turn:
    """Whose go it is at one domain's resident."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # on the way of every expression: the cheapest kind
        self.users = 0


class _Lease:
    """One place. A class and not a generator: this is on the way of every expression."""

    __slots__ = ("_guest", "_key", "_principal_id", "_turn", "_wall", "queue_ms")

    def __init__(self, wall: InterpreterWall, principal_id: str, key: str | None) -> None:
        self._wall = wall
        self._principal_id = principal_id
        self._key = key
        self._turn: _Turn | None = None
        self._guest: GuestProcess | None = None
        self.queue_ms = 0.0

    async def __aenter__(self) -> _Lease:
        asked = time.monotonic()
        await self._wall._places.take(self, self._principal_id)
        try:
            if self._key is not None:
                self._turn = await self._wall._take_turn(self._key)
            self._guest = await self._wall._keeper.running()
        except BaseException:
            self._leave()
            raise
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in the guest: in the domain's resident where it is this lease's turn."""
        assert self._guest is not None
        key = self._key if self._turn is not None else None
        return await self._guest.run(key, program, arguments, limits)

    def _leave(self) -> None:
        if self._turn is not None and self._key is not None:
            self._wall._leave_turn(self._key, self._turn)
        self._wall._places.leave(self, self._principal_id)


def interpreter_command() -> list[str]:
    """How to start the interpreter's guest, with the import paths that it needs."""
    paths = [str(Path(__file__).parents[3])]
    for library in LIBRARIES:
        found = importlib.util.find_spec(library)
        if found is None or found.origin is None:
            raise SandboxUnavailable(f"{library} is not installed.", retryable=False)
        paths.append(str(Path(found.origin).parents[1]))
    return guest_command(
        {
            "import_paths": list(dict.fromkeys(paths)),
            "spares": SPARES,
        }
    )
