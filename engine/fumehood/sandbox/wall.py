"""The interfaces of walls and leases.

Host side. Above it `pipeline/admit` and the executors; below it one folder for each kind.
Invariants: a wall publishes only limits that it was seen to enforce on this host; a lease that is
left before its run ended ends the run; a program's claim may name a failure but never undo one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits, WallLimits
from fumehood.core.session import FileKind, SessionState
from fumehood.protocol.messages import GuestEnding

OnProgress = Callable[[float, str], None]
"""Takes a percentage (0 to 100) and a message of at most 200 characters."""


class FileSink(Protocol):
    """Receives the files that a run left in its workspace, one after the other."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """A file begins. `path` is relative, made of plain names; `size` is a claim."""
        ...

    def write(self, data: bytes) -> None:
        """The next bytes of the file that was started last, at most 64 KB."""
        ...


OnOutput = Callable[[str, str], None]
"""Takes the name of a stream (`stdout`, `stderr`) and its next text."""


class CallPort(Protocol):
    """The channel for answers to a program's tool call. After the run's end it does nothing."""

    def answer(self, answer: bytes) -> None:
        """Send an answer as JSON; it has the call's number in it."""
        ...

    def pause(self, *, is_paused: bool) -> None:
        """Pause the run's clock while it waits for a human, or resume it."""
        ...


OnCall = Callable[[int, str, JsonObject, CallPort], None]
"""Takes a program's call: its number, the tool, the arguments, and the way back."""

OnEnding = Callable[["RunEnding"], None]
"""Takes the ending of a run."""


@dataclass(frozen=True, slots=True)
class RunSinks:
    """Receivers of a run's events; events without a receiver are dropped. They are called from the
    event loop, so they must not block. One that raises is not called again, and the run continues.

    Called from the event loop, so they must not wait. One that raises is not called again, and
    the run goes on.
    """

    progress: OnProgress | None = None
    files: FileSink | None = None
    output: OnOutput | None = None
    """Gets all of the output. The ending still carries its beginning."""
    ending: OnEnding | None = None
    """Gets the ending of a cancelled run, before the cancellation is raised, if its wall knows
    the ending."""
    is_live: bool = False
    """The output is followed, so it is sent at once, instead of in few long pieces."""
    call: OnCall | None = None
    """Gets the program's calls of tools. Without it the program cannot make any."""


NO_SINKS = RunSinks()


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How one run ended.

    Decided or measured outside the program: everything but `result` and `claimed_…`,
    which come from the program and are bounded in size.
    """

    ended_by: EndedBy
    isolation: str
    cpu_ms: float | None = None
    peak_memory_bytes: int | None = None
    output_bytes: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    result: JsonObject | None = None
    claimed_kind: str | None = None
    claimed_message: str | None = None
    claimed_error: JsonObject | None = None
    """The program's complete description of its failure. Validate it before use."""
    stdout: str = ""
    stderr: str = ""
    """The kept part of both streams, decoded, if the wall captures them."""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    limits_hit: tuple[str, ...] = ()
    """Limits that refused something while the program continued, by the names of `Limit`."""
    files_left_out: int = 0
    """Files of the workspace that were too many or too large to be handed to the sink."""
    state: SessionState | None = None
    """The state of the variables, if the lease keeps them for the next run."""
    variables_bytes: int | None = None
    """The memory of the process that holds the variables."""


class Lease(Protocol):
    """A slot in a wall, for one run."""

    @property
    def queue_ms(self) -> float:
        """How long the call waited for the lease."""
        ...

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program to its end. Cancelling it ends the program, then raises.

        `sinks.progress` gets the program's reports if its wall carries them: claims, at most
        1 000 of them.
        """
        ...


@dataclass(frozen=True, slots=True)
class WallStatus:
    """A wall's enforced and missing limits at one moment, as far as known."""

    required: frozenset[Limit]
    """The limits without which no call runs here."""
    enforced: frozenset[Limit]
    """The limits of calls: the required ones, until one was seen to fail on this host."""
    seen: frozenset[Limit]
    """The limits that were seen to hold on this host."""
    is_ready: bool
    """Whether a call would be served."""
    is_in_use: bool = True
    faults: tuple[str, ...] = ()
    """Why it is not ready. For the operator."""
    remedy: str = ""
    """The remedy, for callers."""
    heals: bool = True
    """Whether it may become ready without an operator."""
    missing_images: tuple[str, ...] = ()
    """One sentence for each missing limit."""
    guest_pid: int | None = None

    @property
    def lacking(self) -> frozenset[Limit]:
        """The required limits that do not hold."""
        return self.required - self.enforced


class Wall(Protocol):
    """One kind of sandbox."""

    @property
    def limits(self) -> WallLimits:
        """Defaults and ceilings."""
        ...

    @property
    def status(self) -> WallStatus:
        """What it enforces now, and what it lacks."""
        ...

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        language: str | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait, bounded, for a sandbox. `fresh` refuses one that has run anything before;
        `memory_mb` is its size and `language` the one it must run, if the wall has several.

        Raises:
            SandboxUnavailable: none in time.
        """
        ...


class ImageMissing(SandboxUnavailable):
    """An image does not exist, is not built, or was built by another version of the engine."""

    _parts = ("", "", "")

    @classmethod
    def of(
        cls,
        image: str,
        fault: str,
        remedy: str,
        *,
        language: str | None = None,
    ) -> ImageMissing:
        """`fault` completes "The image NAME …"; `language` is the one that a call needs it for."""
        needed = f", which {language} needs," if language is not None else ""
        made = cls(f"The image {image}{needed} {fault}. {remedy}", retryable=False)
        made._parts = (image, fault, remedy)
        return made

    def needed_for(self, language: str | None) -> ImageMissing:
        """The same refusal for a call in this language."""
        return self.of(*self._parts, language=language)


class HasImages(ABC):
    """A wall whose sandboxes are made from images, and that can look for them again.

    A base class, because each call checks for it several times, and checking for a protocol is
    slow.
    """

    @abstractmethod
    def image_for(self, language: str) -> str:
        """The image that a program in a language gets.

        Raises:
            ImageMissing: it is not there.
            SandboxUnavailable: none was chosen for it, or it has no such language.
        """

    @abstractmethod
    async def look_again(self) -> None:
        """Wait, bounded, for a look at Docker that begins after this moment. Waiting calls share
        it.

        Raises:
            SandboxUnavailable: the look did not end in time.
        """

    @abstractmethod
    async def until_known(self, image: str) -> None:
        """Wait until this image's properties are known.

        Raises:
            SandboxUnavailable: there is no such image, or it cannot be found out now.
        """

    @abstractmethod
    def facts_of(self, image: str | None) -> JsonObject:
        """The image's present digest, and the runtime."""


class Walls:
    """The walls of this engine by name."""

    def __init__(self, **walls: Wall) -> None:
        self._walls = walls

    def get(self, name: str) -> Wall:
        """Raises SandboxUnavailable if this engine has no such wall."""
        if name not in self._walls:
            raise SandboxUnavailable(
                f"This engine has no {name} wall, and uses no weaker one instead.", retryable=False
            )
        return self._walls[name]


class SessionContainer(Protocol):
    """One container for one session, from its creation to its end.

    It serves one trust domain, one run at a time, and ends with its session.
    """

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages of its image."""
        ...

    @property
    def lost(self) -> str | None:
        """The reason for its loss, as one clause; None while it exists."""
        ...

    async def until_free(self) -> None:
        """Wait, bounded, until it is clean after the last run, or lost."""
        ...

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program while the container is free. Its files and variables are kept for the next
        run.
        """
        ...

    def end(self, why: str) -> None:
        """End it with everything that runs in it. Harmless if it is already lost."""
        ...

    async def until_gone(self) -> None:
        """Wait until nothing of it is left, after it was lost or ended."""
        ...


@runtime_checkable
class SessionWall(Protocol):
    """A wall with containers for sessions."""

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
    ) -> SessionContainer:
        """Wait, bounded, for an unused container, and keep it for this domain.

        `on_lost` is called once, when the container is gone for any reason.

        Raises:
            SandboxUnavailable: none in time, or no such image.
        """
        ...


MAX_REPORTS = 1000
"""Progress reports of one run that are passed on."""

MAX_FRAME_BYTES = 4 << 20
"""Bytes of one frame of a guest. The largest is an ending whose claim has the size of the output
limit, escaped in JSON."""

MAX_WAITING = 2000
"""Calls that wait for one wall. One principal may have half of them."""

MAX_CLAIM_CHARACTERS = 2000

LOST = RunEnding(EndedBy.SANDBOX_LOST, "call")

_CLAIMABLE = {
    "memory": EndedBy.MEMORY,
    "output": EndedBy.OUTPUT,
    "policy": EndedBy.POLICY,
}
"""The failures that a program may claim (ADR 0010)."""


def ending_of_reply(
    reply: JsonObject, *, isolation: str, cpu_ms: float | None, output_bytes: int | None
) -> RunEnding:
    """The ending of a run whose child answered the host directly. The figures are the host's."""
    error = reply.get("error")
    result = reply.get("result")
    if error is None and isinstance(result, dict):
        return RunEnding(
            EndedBy.OK, isolation, cpu_ms=cpu_ms, output_bytes=output_bytes, result=result
        )
    claimed = claims_of(error)
    return RunEnding(
        _CLAIMABLE.get(claimed["claimed_kind"] or "", EndedBy.EXCEPTION),
        isolation,
        cpu_ms=cpu_ms,
        output_bytes=output_bytes,
        **claimed,
    )


def ending_of_frame(message: GuestEnding) -> RunEnding:
    """The ending of a run that the supervisor reported."""
    claim = message.claim or {}
    result = claim.get("result")
    ended_by = message.ended_by
    if ended_by is EndedBy.OK and not isinstance(result, dict):
        ended_by = EndedBy.SANDBOX_LOST
    return RunEnding(
        ended_by=ended_by,
        isolation=message.isolation,
        cpu_ms=message.cpu_ms,
        peak_memory_bytes=message.peak_memory_bytes,
        output_bytes=message.output_bytes,
        exit_code=message.exit_code,
        signal=message.signal,
        result=result if ended_by is EndedBy.OK else None,
        **claims_of(claim.get("error")),
    )


class Claims(TypedDict):
    """The error that a program reported, as fields of a `RunEnding`."""

    claimed_kind: str | None
    claimed_message: str | None
    claimed_error: JsonObject | None


def claims_of(error: object) -> Claims:
    """The fields for an error in a program's reply; kind and message are shortened."""
    found: JsonObject = error if isinstance(error, dict) else {}
    kind, message = (
        value[:MAX_CLAIM_CHARACTERS] if isinstance(value := found.get(key), str) else None
        for key in ("kind", "message")
    )
    return Claims(claimed_kind=kind, claimed_message=message, claimed_error=found or None)
