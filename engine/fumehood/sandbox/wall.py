"""The wall: what every place to run promises, and what a lease on it does.

Host side. Above it: `pipeline/admit` and the executors; below: one folder for each kind.
Invariant: a wall publishes only limits that it was seen to enforce on this host, and a
lease that is left unfinished takes its run with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fumehood.core.errors import EndedBy, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limit, Limits, WallLimits
from fumehood.core.workspace import FileKind, SessionState

OnProgress = Callable[[float, str], None]
"""Takes a percentage (0 to 100) and a message of at most 200 characters."""


class FileSink(Protocol):
    """Where the files of a workspace go that a run left behind, one after the other."""

    def start(self, path: str, size: int, kind: FileKind = "file") -> None:
        """A file begins. `path` is relative, made of plain names; `size` is a claim."""
        ...

    def write(self, data: bytes) -> None:
        """The next bytes of the file that was started last, at most 64 KB."""
        ...


OnOutput = Callable[[str, str], None]
"""Takes the name of a stream (`stdout`, `stderr`) and what was printed there since."""


OnEnding = Callable[["RunEnding"], None]
"""Takes how a run ended."""


@dataclass(frozen=True, slots=True)
class RunSinks:
    """Who hears of a run while it lasts; what nobody wants is dropped.

    Called from the event loop, so nothing here may wait. One that raises is not asked again,
    and the run goes on.
    """

    progress: OnProgress | None = None
    files: FileSink | None = None
    output: OnOutput | None = None
    """Where it hears all of the output, the ending still carries its beginning."""
    ending: OnEnding | None = None
    """Hears how a run ended that was cancelled, before the cancellation goes on; where its wall
    can tell."""
    is_live: bool = False
    """Somebody follows it: what it prints is told at once, instead of in few long pieces."""


NO_SINKS = RunSinks()


@dataclass(frozen=True, slots=True)
class RunEnding:
    """How one run ended.

    Decided or measured outside the program: everything but `result` and `claimed_…`,
    which are the program's own words, bounded in size.
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
    """All that the program said of its failure, for who knows its form and validates it."""
    stdout: str = ""
    stderr: str = ""
    """What was kept of the two streams, decoded; where they are caught at all."""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    limits_hit: tuple[str, ...] = ()
    """Limits that refused something while the program went on, by the names of `Limit`."""
    files_left_out: int = 0
    """Files of the workspace that were too many or too large to be handed to the sink."""
    state: SessionState | None = None
    """What became of the variables, where the lease keeps them for the next run."""
    variables_bytes: int | None = None
    """What the process that keeps them has in memory."""


class Lease(Protocol):
    """One place in a wall, for one run."""

    @property
    def queue_ms(self) -> float:
        """How long the place was waited for."""
        ...

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run one program to its end. Cancelling it ends the program, then raises.

        `sinks.progress` hears what the program reports meanwhile, where its wall carries
        that: claims, at most 1 000 of them.
        """
        ...


class Wall(Protocol):
    """One kind of place to run."""

    @property
    def limits(self) -> WallLimits:
        """Defaults and ceilings."""
        ...

    @property
    def required(self) -> frozenset[Limit]:
        """What must be enforced for anything to run here."""
        ...

    @property
    def enforced(self) -> frozenset[Limit]:
        """What was seen to be enforced on this host."""
        ...

    @property
    def heals(self) -> bool:
        """Whether a limit that is not enforced may be so again without anybody's help."""
        ...

    @property
    def remedy(self) -> str:
        """What to do where something required is not enforced."""
        ...

    def lease(
        self,
        domain: TrustDomain,
        *,
        fresh: bool,
        memory_mb: int | None = None,
        language: str | None = None,
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait, bounded, for a place. `fresh` refuses one that has run anything before;
        `memory_mb` is the size of the place and `language` what it must be able to run, where
        the wall has several.

        Raises:
            SandboxUnavailable: no place in time.
        """
        ...


class ImageMissing(SandboxUnavailable):
    """An image does not exist, is being built, or was built by another version of the engine."""

    _parts = ("", "", "")

    @classmethod
    def of(
        cls,
        image: str,
        fault: str,
        remedy: str,
        *,
        language: str | None = None,
        retry_after_ms: int | None = None,
    ) -> ImageMissing:
        """`fault` completes "The image NAME …"; `language` is the one that a call needs it for.

        `retry_after_ms` is for an image that comes without anybody's help.
        """
        needed = f", which {language} needs," if language is not None else ""
        made = cls(
            f"The image {image}{needed} {fault}. {remedy}",
            retryable=retry_after_ms is not None,
            retry_after_ms=retry_after_ms,
        )
        made._parts = (image, fault, remedy)
        return made

    def needed_for(self, language: str | None) -> ImageMissing:
        """The same refusal for a call in this language."""
        return self.of(*self._parts, language=language, retry_after_ms=self.retry_after_ms)


class HasImages(ABC):
    """A wall whose places are made of images, and that can be looked at again.

    A base class: each call asks for it several times, and a protocol takes long to tell.
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
        """Wait, bounded, for a look that begins after this moment. All who wait share it.

        Raises:
            SandboxUnavailable: the look did not end in time.
        """

    @abstractmethod
    async def until_known(self, image: str) -> None:
        """Wait until it is known what places made of this image are made of.

        Raises:
            SandboxUnavailable: there is no such image, or nobody can say now.
        """

    @abstractmethod
    def facts_of(self, image: str | None) -> JsonObject:
        """What places made of this image are made of now: its digest, and the runtime."""


class Walls:
    """The walls of this engine by name."""

    def __init__(self, **walls: Wall) -> None:
        self._walls = walls

    def get(self, name: str) -> Wall:
        """Raises SandboxUnavailable where this engine has no such wall."""
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
        """The reason why it is gone, as one clause; None while it exists."""
        ...

    async def until_free(self) -> None:
        """Wait, bounded, until it is clean after the last run, or lost."""
        ...

    async def run(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """One run, while it is free. Its files and variables stay for the next one."""
        ...

    def end(self, why: str) -> None:
        """End it with everything that runs in it. Harmless if it is already lost."""
        ...

    async def until_gone(self) -> None:
        """Wait until nothing is left of it after it was lost or ended."""
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
