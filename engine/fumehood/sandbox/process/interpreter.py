"""The interpreter wall: expressions and programs in a separate, limited process behind a filter.

Host side. One guest serves all trust domains: expressions of each domain in a process of
its own inside it, programs each in a new one. A guest that dies is replaced at once; calls
that waited for a place go to the new one, and only what was running in the old one is lost.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.abc

from fumehood.model.errors import SandboxUnavailable
from fumehood.model.identity import TrustDomain
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import MIN_INTERPRETER_MB, Limit, Limits, WallLimits
from fumehood.sandbox.process.channel import GuestFailed, GuestProcess, guest_command
from fumehood.sandbox.process.residents import DEFAULT_RULES, ResidentRules
from fumehood.sandbox.wall import RunEnding

INTERPRETER_LIMITS = WallLimits(
    default_wall_s=5,
    max_wall_s=30,
    default_memory_mb=64,
    max_memory_mb=256,
    min_memory_mb=MIN_INTERPRETER_MB,
    output_bytes=64 * 1024,
)

SPARES = 2
"""Children that stand ready. One is not enough where programs come one after the other: each
needs a new child, and making one takes longer than running a short program."""

LIBRARIES = ("asteval", "RestrictedPython")
"""What the guest needs besides the standard library."""

MAX_RUNNING = 16
MAX_WAITING = 2000
QUEUE_PATIENCE_S = 30.0
RESIDENT_PATIENCE_S = 0.02
"""How long a call waits for its domain's resident before it takes a fresh process instead."""

RESTART_PAUSE_S = (0.0, 0.1, 0.5, 2.0)
"""Pauses before a new guest, by how many guests in a row did not last a second."""

STABLE_S = 1.0
GUEST_PATIENCE_S = 10.0


class InterpreterWall:
    """Places for expressions and programs. An asynchronous context manager: entering it starts
    the guest."""

    required = frozenset(Limit)
    cure = "The kernel must offer seccomp filters (CONFIG_SECCOMP_FILTER) and /proc."

    def __init__(
        self,
        limits: WallLimits = INTERPRETER_LIMITS,
        command: Sequence[str] | None = None,
        residents: ResidentRules = DEFAULT_RULES,
        on_event: Callable[[str, JsonObject], None] = lambda event, values: None,
    ) -> None:
        self._on_event = on_event
        self.limits = limits
        self._command = list(command) if command is not None else interpreter_command()
        self._resident_rules = residents
        self._guest: GuestProcess | None = None
        self._changed = anyio.Event()
        self._faults: tuple[str, ...] = ()
        self._places = anyio.CapacityLimiter(MAX_RUNNING)
        self._turns: dict[str, _Turn] = {}
        self._stack = AsyncExitStack()
        self._stopping = False

    async def __aenter__(self) -> InterpreterWall:
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
        return frozenset() if self._faults else self.required

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the last guest could not serve, in its own words. For the operator."""
        return self._faults

    @property
    def guest_pid(self) -> int | None:
        """Process id of the running guest's supervisor."""
        return self._guest.pid if self._guest is not None else None

    def lease(self, domain: TrustDomain, *, fresh: bool) -> _Lease:
        """One of 16 places, and the domain's resident if it is free soon."""
        return _Lease(self, None if fresh else domain.key)

    async def _take_place(self, holder: object) -> None:
        try:
            self._places.acquire_on_behalf_of_nowait(holder)
            return
        except anyio.WouldBlock:
            pass
        if self._places.statistics().tasks_waiting >= MAX_WAITING:
            raise _busy()
        taken = False
        with anyio.move_on_after(QUEUE_PATIENCE_S):
            await self._places.acquire_on_behalf_of(holder)
            taken = True
        if not taken:
            raise _busy()

    async def _take_turn(self, key: str) -> _Turn | None:
        """The domain's turn, or None where its resident is busy for longer than a moment."""
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        try:
            turn.lock.acquire_nowait()
            return turn
        except anyio.WouldBlock:
            pass
        taken = False
        try:
            with anyio.move_on_after(RESIDENT_PATIENCE_S):
                await turn.lock.acquire()
                taken = True
        finally:
            if not taken:
                self._forget_turn(key, turn)
        return turn if taken else None

    def _leave_place(self, holder: object) -> None:
        self._places.release_on_behalf_of(holder)

    def _leave_turn(self, key: str, turn: _Turn) -> None:
        turn.lock.release()
        self._forget_turn(key, turn)

    def _forget_turn(self, key: str, turn: _Turn) -> None:
        turn.users -= 1
        if turn.users == 0:
            self._turns.pop(key, None)

    async def _running_guest(self) -> GuestProcess:
        if not self._has_guest():
            with anyio.move_on_after(GUEST_PATIENCE_S):
                while not self._has_guest() and not self._stopping:
                    await self._changed.wait()
        if self._guest is None or self._guest.dead.is_set():
            raise SandboxUnavailable(
                "The interpreter could not be started. Run `fumehood doctor` to see why.",
                retry_after_ms=1000,
            )
        if self.required - self._guest.enforced:  # it started after `admit` had looked
            raise SandboxUnavailable(f"The interpreter lost a defence. {self.cure}")
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
                self._on_event("guest.lost", {"why": list(self._faults)})
                self._announce(None)
                short_lives += 1
                continue
            self._faults = guest.faults
            if guest.faults:
                self._on_event("guest.lost", {"pid": guest.pid, "why": list(guest.faults)})
                await guest.stop()
                self._announce(None)
                short_lives += 1
                continue
            self._announce(guest)
            self._on_event("guest.ready", {"pid": guest.pid})
            try:
                await guest.dead.wait()
            finally:
                self._announce(None)
                await guest.stop()
                why = list(guest.faults) or ["it ended"]
                if not self._stopping:
                    self._on_event("guest.lost", {"pid": guest.pid, "why": why})
            short_lives = 0 if time.monotonic() - started > STABLE_S else short_lives + 1

    def _announce(self, guest: GuestProcess | None) -> None:
        self._guest = guest
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class _Turn:
    """Whose go it is at one domain's resident."""

    __slots__ = ("lock", "users")

    def __init__(self) -> None:
        self.lock = anyio.Lock(fast_acquire=True)
        self.users = 0


class _Lease:
    """One place. A class and not a generator: this is on the way of every expression."""

    __slots__ = ("_guest", "_key", "_turn", "_wall", "queue_ms")

    def __init__(self, wall: InterpreterWall, key: str | None) -> None:
        self._wall = wall
        self._key = key
        self._turn: _Turn | None = None
        self._guest: GuestProcess | None = None
        self.queue_ms = 0.0

    async def __aenter__(self) -> _Lease:
        asked = time.monotonic()
        await self._wall._take_place(self)
        try:
            if self._key is not None:
                self._turn = await self._wall._take_turn(self._key)
            self._guest = await self._wall._running_guest()
        except BaseException:
            self._leave()
            raise
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    async def run(self, program: str, arguments: JsonObject, limits: Limits) -> RunEnding:
        """Run one program in the guest: in the domain's resident where it is this lease's turn."""
        assert self._guest is not None
        key = self._key if self._turn is not None else None
        return await self._guest.run(key, program, arguments, limits)

    def _leave(self) -> None:
        if self._turn is not None and self._key is not None:
            self._wall._leave_turn(self._key, self._turn)
        self._wall._leave_place(self)


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


def _busy() -> SandboxUnavailable:
    return SandboxUnavailable(
        "Too many calls wait for the interpreter. Repeat the call later.", retry_after_ms=1000
    )
