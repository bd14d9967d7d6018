"""The base class of the process walls, and the jail.

Host side, between the executors and `channel`. Each wall has one guest, which serves all trust
domains. If the guest dies, a new guest is started at once, or after a pause if several guests have
died soon after their start. Waiting calls use the new guest; only the runs in the old guest are
lost. Invariants: nothing runs in a guest that lacks a required limit; a call with `fresh`, and
every call in the jail, gets a process in which nothing has run before.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar, Self

import anyio
import anyio.abc

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import PROCESS_WALL_LIMITS, Limits, WallLimits
from fumehood.sandbox.process.channel import GuestFailed, GuestProcess, guest_command
from fumehood.sandbox.settings import JailSettings
from fumehood.sandbox.wall import (
    NO_SINKS,
    OnEvent,
    RunEnding,
    RunSinks,
    Slots,
    WallStatus,
    try_later,
)

RESTART_PAUSE_S = (0.0, 0.1, 0.5, 2.0)
"""Seconds before the start of a new guest. The index is the number of guests in a row that ended
within `STABLE_S`; the last value is also used for higher numbers.
"""

STABLE_S = 1.0
"""Seconds for which a guest must have run, so that the next one is started without a pause."""

GUEST_PATIENCE_S = 10.0
"""Maximum seconds for which a call, or the engine's start, waits for a guest that is starting."""

ENGINE = str(Path(__file__).parents[3])
"""The import path that contains the package `fumehood`."""


class ProcessWall:
    """A wall with one guest process. If the guest ends, a new one is started.

    A wall is an asynchronous context manager. Entering it starts the guest, and waits a bounded
    time until the guest is ready.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]
    max_running: ClassVar[int]

    required = PROCESS_WALL_LIMITS

    def __init__(
        self,
        limits: WallLimits,
        command: Sequence[str],
        on_event: OnEvent,
    ) -> None:
        self.limits = limits
        self.slots = Slots(self.max_running, f"the {self.name}")
        self.faults: tuple[str, ...] = ()
        """Why the last guest could not serve calls, in words for the operator. Empty if it
        could.
        """
        self._command = list(command)
        self._on_event = on_event
        self._guest: GuestProcess | None = None
        self._changed = anyio.Event()
        self._stack = AsyncExitStack()
        self._stopping = False

    async def __aenter__(self) -> Self:
        await self.begin()
        await self.first_guest()
        return self

    async def begin(self) -> None:
        """Start the wall without waiting for its guest. To end the wall, call `__aexit__`."""
        group = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(group.cancel_scope.cancel)
        group.start_soon(self._keep_a_guest)

    async def first_guest(self) -> None:
        """Wait until a guest is running or has failed, at most `GUEST_PATIENCE_S` seconds."""
        with anyio.move_on_after(GUEST_PATIENCE_S):
            while not self._has_guest() and not self.faults:
                await self._changed.wait()

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        await self._stack.aclose()

    @property
    def status(self) -> WallStatus:
        """The limits that the guest enforces, and the faults of the guest. While a guest is
        starting, all required limits count as enforced.
        """
        if self._guest is not None:
            held = self._guest.enforced
        else:
            held = frozenset() if self.faults else self.required
        return WallStatus(
            self.required,
            held,
            held,
            is_ready=self.required <= held,
            faults=self.faults,
            remedy=self.remedy,
            guest_pid=self.guest_pid,
        )

    @property
    def guest_pid(self) -> int | None:
        """The process id of the running guest's supervisor, or None if no guest is running."""
        return self._guest.pid if self._guest is not None else None

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        image: str | None = None,
    ) -> ProcessLease:
        """Lease one of the wall's slots, whose number limits the concurrent runs. Each run in the
        slot gets a child process in which nothing has run before. `fresh`, `memory_mb` and `image`
        have no effect.
        """
        return ProcessLease(self, domain.principal_id)

    async def running(self) -> GuestProcess:
        """Return the running guest. If a guest is starting, wait for it, at most `GUEST_PATIENCE_S`
        seconds.

        Raises:
            SandboxUnavailable: no guest is running, or the guest lacks a required limit.
        """
        if not self._has_guest():
            with anyio.move_on_after(GUEST_PATIENCE_S):
                while not self._has_guest() and not self._stopping:
                    await self._changed.wait()
        if self._guest is None or self._guest.dead.is_set():
            raise try_later(
                f"The {self.name} could not be started. Run `fumehood doctor` to see why."
            )
        if self.required - self._guest.enforced:  # the guest was replaced after `admit`
            raise SandboxUnavailable(f"The {self.name} lost a defence. {self.remedy}")
        return self._guest

    async def _start_guest(self, command: Sequence[str]) -> GuestProcess:
        return await GuestProcess.start(command)

    def _has_guest(self) -> bool:
        return self._guest is not None and not self._guest.dead.is_set()

    async def _keep_a_guest(self) -> None:
        """Start a new guest whenever none is running. Pause before the start if earlier guests have
        ended soon after their start.
        """
        short_lives = 0
        while True:
            await anyio.sleep(RESTART_PAUSE_S[min(short_lives, len(RESTART_PAUSE_S) - 1)])
            started = time.monotonic()
            try:
                guest = await self._start_guest(self._command)
            except GuestFailed as failure:
                self.faults = (str(failure),)
                self._tell("guest.lost", {"why": list(self.faults)})
                self._announce(None)
                short_lives += 1
                continue
            self.faults = guest.faults
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
        self._on_event(event, {"wall": self.name, **values})

    def _announce(self, guest: GuestProcess | None) -> None:
        self._guest = guest
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class ProcessLease:
    """The right to use one slot of the guest. Entering its context waits for a free slot."""

    # A class and not a generator, because a generator would be slower, and every short call needs a
    # lease.

    __slots__ = ("_guest", "_principal_id", "_wall", "queue_ms")

    def __init__(self, wall: ProcessWall, principal_id: str) -> None:
        self._wall = wall
        self._principal_id = principal_id
        self._guest: GuestProcess | None = None
        self.queue_ms = 0.0

    async def __aenter__(self) -> Self:
        asked = time.monotonic()
        await self._wall.slots.take(self._principal_id)
        try:
            await self._prepare()
            self._guest = await self._wall.running()
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
        """Run one program in the guest, and return the ending."""
        assert self._guest is not None
        return await self._guest.run(program, arguments, limits, sinks)

    async def _prepare(self) -> None:
        """Wait for further resources that the lease needs in addition to its slot. Here there are
        none; subclasses override this method.
        """

    def _leave(self) -> None:
        self._wall.slots.leave(self._principal_id)


# -- the jail: sandboxed functions, which can read only the files they need -------------------

JAIL_LIMITS = JailSettings().limits
"""The limits of the jail if the operator has configured none."""

JAIL_SPARES = 1
"""Number of children that the jail's guest keeps ready."""

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
                    "/usr/share/zoneinfo")  # fmt: skip
"""Files that children may read: libraries of extension modules, and time zones."""

LIBRARY_DIRECTORIES = ("site-packages", "dist-packages")
"""Names of the directories in which packages are installed."""


class JailWall(ProcessWall):
    """The wall for sandboxed functions. Each call runs in a child process in which nothing has run
    before.

    A child process can read only Python, its libraries, and the import path of the function. This
    limit applies before any code of the function runs. A function that is sent as a pickle has no
    import path. `tool_paths` are the import paths of all functions that may be called.

    If the operating system has no Landlock, the jail does not start, and calls of sandboxed
    functions are refused.
    """

    name = "jail"
    remedy = (
        "The kernel must offer Landlock (Linux 5.13 or newer, CONFIG_SECURITY_LANDLOCK, and "
        "'landlock' in the boot parameter lsm= where that is set), seccomp filters and /proc."
    )
    max_running = 8

    def __init__(
        self,
        tool_paths: Iterable[str] = (),
        limits: WallLimits = JAIL_LIMITS,
        command: Sequence[str] | None = None,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        super().__init__(limits, command or jail_command(tool_paths), on_event)


def jail_command(tool_paths: Iterable[str]) -> list[str]:
    """Return the command that starts the jail's guest. The command lists the files that children
    may read. `tool_paths` are the import paths of all functions that may be called.
    """
    packages = library_directories()
    libraries = [
        *SYSTEM_LIBRARIES,
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        str(Path(sys.base_prefix) / "lib"),
        *packages,
    ]
    return guest_command(
        {
            "wall": "jail",
            "programs": "fumehood.guest.process.jail",
            "import_paths": packages,
            "libraries": list(dict.fromkeys(libraries)),
            "tool_paths": sorted(filter(None, set(tool_paths))),
            "spares": JAIL_SPARES,
        }
    )


def library_directories() -> list[str]:
    """Return the directories in which Python packages are installed, in the order in which this
    process searches them.
    """
    paths = map(Path, sys.path)
    named = [str(path) for path in paths if path.name in LIBRARY_DIRECTORIES]
    directories = [ENGINE, directory_of("pydantic"), *named]
    return [entry for entry in dict.fromkeys(directories) if Path(entry).is_dir()]


def directory_of(library: str) -> str:
    """Return the import path of an installed library, given its name. Raises SandboxUnavailable if
    it is not installed.
    """
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise SandboxUnavailable(f"{library} is not installed.", retryable=False)
    return str(Path(found.origin).parents[1])
