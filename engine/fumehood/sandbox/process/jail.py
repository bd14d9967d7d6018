"""The jail: sandboxed functions in a separate, limited process that sees its own files only.

Host side. One guest for all sandboxed functions, a fresh child for each call and never a
resident. Invariant: what a child may read of the file system is decided before it runs a
line of a tool: the interpreter, its libraries, and the import path of the one function that
it was asked for. Without Landlock there is no jail, and these tools alone are refused.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import PROCESS_WALL_LIMITS, Limit, Limits, WallLimits
from fumehood.sandbox.process.channel import GuestProcess, guest_command
from fumehood.sandbox.process.guest_keeper import GuestKeeper, OnEvent
from fumehood.sandbox.process.settings import JailSettings
from fumehood.sandbox.process.slots import Slots
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

JAIL_LIMITS = JailSettings().limits
"""Where nothing is configured."""

SPARES = 1
MAX_RUNNING = 8

SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache",
                    "/usr/share/zoneinfo")  # fmt: skip
"""What extension modules are linked with, and the world's time zones (not the host's own)."""

LIBRARY_DIRECTORIES = ("site-packages", "dist-packages")


class JailWall:
    """Places for sandboxed functions. An asynchronous context manager: entering it starts the
    guest. `tool_paths` are the import paths of all functions that will ever be asked for; that of
    a function which is sent as source is empty.
    """

    required = PROCESS_WALL_LIMITS
    heals = True
    cure = (
        "The kernel must offer Landlock (Linux 5.13 or newer, CONFIG_SECURITY_LANDLOCK, and "
        "'landlock' in the boot parameter lsm= where that is set), seccomp filters and /proc."
    )

    def __init__(
        self,
        tool_paths: Iterable[str] = (),
        limits: WallLimits = JAIL_LIMITS,
        command: Sequence[str] | None = None,
        on_event: OnEvent = lambda event, values: None,
    ) -> None:
        self.limits = limits
        self._keeper = GuestKeeper(
            "jail",
            command if command is not None else jail_command(tool_paths),
            required=self.required,
            cure=self.cure,
            on_event=on_event,
        )
        self._places = Slots(MAX_RUNNING, "the jail")

    async def __aenter__(self) -> JailWall:
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
        """One of 8 places; every run in it is in a process that has run nothing before."""
        return _Lease(self, domain.principal_id)


class _Lease:
    """One place in the jail."""

    __slots__ = ("_guest", "_principal_id", "_wall", "queue_ms")

    def __init__(self, wall: JailWall, principal_id: str) -> None:
        self._wall = wall
        self._principal_id = principal_id
        self._guest: GuestProcess | None = None
        self.queue_ms = 0.0

    async def __aenter__(self) -> _Lease:
        asked = time.monotonic()
        await self._wall._places.take(self, self._principal_id)
        try:
            self._guest = await self._wall._keeper.running()
        except BaseException:
            self._wall._places.leave(self, self._principal_id)
            raise
        self.queue_ms = (time.monotonic() - asked) * 1e3
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._wall._places.leave(self, self._principal_id)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program, `function`, in a fresh child of the guest."""
        assert self._guest is not None
        return await self._guest.run(None, program, arguments, limits, sinks.progress)


def jail_command(tool_paths: Iterable[str]) -> list[str]:
    """How to start the jail's guest: what it may import, and what its children may see."""
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
            "import_paths": packages,
            "libraries": list(dict.fromkeys(libraries)),
            "tool_paths": sorted(filter(None, set(tool_paths))),
            "spares": SPARES,
        }
    )


def library_directories() -> list[str]:
    """Where installed packages lie, in the order in which this process looks for them."""
    found = importlib.util.find_spec("pydantic")
    if found is None or found.origin is None:
        raise SandboxUnavailable("pydantic is not installed.", retryable=False)
    engine = Path(__file__).parents[3]
    named = [Path(entry) for entry in sys.path if Path(entry).name in LIBRARY_DIRECTORIES]
    directories = [engine, Path(found.origin).parents[1], *named]
    return list(dict.fromkeys(str(directory) for directory in directories if directory.is_dir()))
