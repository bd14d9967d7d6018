"""The interpreter: expressions and short programs, in processes with a system-call filter.

Host side. A trust domain's expressions share a sticky worker. Invariant: a call with `fresh` gets a
process that has run nothing before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import anyio

from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits, WallLimits
from fumehood.interpreter.settings import InterpreterSettings
from fumehood.interpreter.sticky_guest import StickyGuest
from fumehood.interpreter.sticky_workers import DEFAULT_RULES, StickyWorkerSettings
from fumehood.sandbox.process.channel import guest_command
from fumehood.sandbox.process.wall import ENGINE, ProcessLease, ProcessWall, directory_of
from fumehood.sandbox.wall import NO_SINKS, OnEvent, RunEnding, RunSinks

STICKY_PATIENCE_S = 0.02
"""Seconds that a call waits for its trust domain's sticky worker before it uses a fresh process."""

INTERPRETER_LIMITS = InterpreterSettings().limits
"""The interpreter's default limits."""

INTERPRETER_SPARES = 2
"""Number of ready children. One is too few for consecutive programs: each needs a new child, and
creating a child takes longer than running a short program.
"""

INTERPRETER_LIBRARIES = ("asteval", "RestrictedPython")
"""Modules that the guest needs beyond the standard library."""


class InterpreterWall(ProcessWall):
    """The wall for expressions and restricted programs."""

    name = "interpreter"
    remedy = "The kernel must offer seccomp filters (CONFIG_SECCOMP_FILTER) and /proc."
    max_running = 16

    def __init__(
        self,
        limits: WallLimits = INTERPRETER_LIMITS,
        command: Sequence[str] | None = None,
        sticky: StickyWorkerSettings = DEFAULT_RULES,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        super().__init__(limits, command or interpreter_command(), on_event)
        self._sticky = sticky
        self._turns: dict[str, asyncio.Event] = {}
        """Maps the key of each trust domain whose sticky worker is in use to an event, which is set
        when the worker is free."""

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> StickyLease:
        """Return a lease for one run in the trust domain `domain`.

        When the lease is entered, it waits up to `STICKY_PATIENCE_S` seconds for the domain's
        sticky worker, a process that serves several runs. If the worker becomes free in this time,
        the run uses it. If not, or if `fresh` is True, the run uses a fresh child process.
        `memory_mb` and `image` are not used.
        """
        return StickyLease(self, domain.principal_id, None if fresh else domain.key)

    async def take_turn(self, key: str) -> bool:
        """Reserve the sticky worker of the trust domain `key` for one run. If the worker is in use,
        wait up to `STICKY_PATIENCE_S` seconds.

        Return True if the worker is now reserved, or False if it is still in use. `leave_turn` ends
        the reservation.
        """
        if key in self._turns:
            with anyio.move_on_after(STICKY_PATIENCE_S):
                while key in self._turns:
                    await self._turns[key].wait()
            if key in self._turns:
                return False
        self._turns[key] = asyncio.Event()
        return True

    def leave_turn(self, key: str) -> None:
        """End the reservation that `take_turn` made, so that the next call of the trust domain
        `key` can use the sticky worker.
        """
        self._turns.pop(key).set()

    async def _start_guest(self, command: Sequence[str]) -> StickyGuest:
        return await StickyGuest.start(command, partial(StickyGuest, rules=self._sticky))


class StickyLease(ProcessLease):
    """A lease for one run. It includes the sticky worker of the trust domain `key`, which is a
    process that serves several runs, if the worker is free and `key` is not None.
    """

    __slots__ = ("_interpreter", "_key", "_turn")

    def __init__(self, wall: InterpreterWall, principal_id: str, key: str | None) -> None:
        super().__init__(wall, principal_id)
        self._interpreter = wall
        self._key = key
        self._turn: str | None = None
        """The trust domain's key while this lease has the turn, otherwise None."""

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program in the guest. If this lease includes the sticky worker of its trust
        domain, run the program in this worker, otherwise in a fresh child process.
        """
        assert isinstance(self._guest, StickyGuest)
        return await self._guest.run_for(self._turn, program, arguments, limits, sinks)

    async def _prepare(self) -> None:
        if self._key is not None and await self._interpreter.take_turn(self._key):
            self._turn = self._key

    def _leave(self) -> None:
        if self._turn is not None:
            self._interpreter.leave_turn(self._turn)
        super()._leave()


def interpreter_command() -> list[str]:
    """Return the command that starts the interpreter's guest, with its import paths."""
    paths = [ENGINE, *map(directory_of, INTERPRETER_LIBRARIES)]
    return guest_command(
        {
            "programs": "fumehood.guest.interpreter.programs",
            "import_paths": list(dict.fromkeys(paths)),
            "spares": INTERPRETER_SPARES,
        }
    )
