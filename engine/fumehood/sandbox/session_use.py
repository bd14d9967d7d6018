"""The uses of a session: a call's runs, registered processes, and ports.

Host side. `sessions` creates these objects; executors and the public interfaces use them. A call
has the session's turn during its lease. Processes and ports are used beside the calls, without a
turn: a visit keeps the session from being paused or stopped. Invariant: the request for a process
that starts again with the session is stored before the process's start is reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeVar

import anyio
import anyio.abc

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InvalidParams,
    ResourceNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limits
from fumehood.core.session import SessionStatus
from fumehood.protocol.framing import MAX_PROCESSES, OUTPUT_PIECE_BYTES
from fumehood.protocol.strict_json import dumps
from fumehood.sandbox.session import (
    Leftovers,
    Saver,
    Session,
    source_of,
    with_env,
)
from fumehood.sandbox.wall import NO_SINKS, RunEnding, RunSinks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeptValues:
    """The values that parts keep with one session, for a caller that has the session's turn.

    `keep` sets and stores a value (`SessionKeeper.keep`).
    """

    session_id: str
    values: Mapping[str, JsonObject]
    keep: Callable[[str, JsonObject], Awaitable[object]]


InSession = Callable[[KeptValues], object | None]
"""Returns what one part's executors use during a turn in a session, or None."""


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """The saved files of a durable session, for changes that can be undone.

    `save` saves the session's files, and returns why saving failed, or None if it succeeded.
    `write` stores the session's record.
    """

    saver: Saver
    save: Callable[[], Awaitable[str | None]]
    write: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SessionLease:
    """One call's turn in a session.

    `until_ready` waits until the session can run a program, and raises if the session has ended.
    `save` receives the program and arguments of a run. If the session is durable and the run may
    have changed files, `save` saves the files. `save` returns why saving failed, or None if it
    succeeded.
    """

    session: Session
    until_ready: Callable[[], Awaitable[None]]
    save: Callable[[str, JsonObject], Awaitable[str | None]]
    queue_ms: float
    is_call: bool = True
    saved: SavedFiles | None = None
    """The session's saved files, or None if the session is not durable."""
    of_parts: tuple[object, ...] = ()
    """What parts give to their own executors (`EnginePart.in_session`)."""
    processes: Callable[[JsonObject], Awaitable[JsonObject]] | None = None
    """A function that carries out a request about the registered processes
    (`SessionProcesses.ask`), or None if the lease offers no such function.
    """

    def part(self, kind: type[T]) -> T | None:
        """Return what a part gives to its executors in this session, by its class."""
        return next((one for one in self.of_parts if isinstance(one, kind)), None)

    async def run(
        self,
        program: str,
        arguments: JsonObject,
        limits: Limits,
        sinks: RunSinks = NO_SINKS,
    ) -> RunEnding:
        """Run a program. A lease may have several runs, which share files and variables.

        Raises:
            ResourceNotFound: the session ended before this run.
        """
        session = self.session
        await self.until_ready()
        # Read before the run, because the container may be lost while the files are saved.
        copied_at, was_stopped = session.copied_at, session.stopped_why is not None
        leftovers = session.leftovers
        if program == "files" and leftovers is Leftovers.NONE:
            session.leftovers = Leftovers.WRITES  # until it is known to have ended well
        limits = replace(limits, memory_mb=session.spec.memory_mb)
        arguments = session.with_env(program, arguments)
        if session.copy is None:
            ending = await session.container.run(program, arguments, limits, sinks)
        else:
            ending = await self._run_and_save(program, arguments, limits, sinks)
        if ending.ended_by is EndedBy.OK:
            session.leftovers = leftovers
        if ending.ended_by is not EndedBy.SANDBOX_LOST:
            ending = self._with_state(ending, program, copied_at, was_stopped=was_stopped)
        elif session.copy is not None:
            ending = replace(ending, copied_at=session.saved_at)
        finished = session.finished
        was_ended = finished is not None and finished.record.state is SessionStatus.ENDED
        if was_ended and ending.ended_by is EndedBy.SANDBOX_LOST:  # removed with its session
            ending = replace(ending, ended_by=EndedBy.CANCELLED)
        return replace(ending, isolation="session")

    def _with_state(
        self, ending: RunEnding, program: str, copied_at: datetime | None, *, was_stopped: bool
    ) -> RunEnding:
        """Add to the ending, once, that the session was restored from its copy or restarted."""
        session = self.session
        if copied_at is not None and self.is_call:
            session.copied_at = None
            ending = replace(ending, state="restored", copied_at=copied_at)
        # Reported to the first run that could have used variables.
        elif was_stopped and copied_at is None and program == "python":
            ending = replace(ending, state="restarted")
        else:
            return ending
        if not session.is_stopped:  # otherwise the next call reports it
            session.stopped_why = None
        return ending

    async def _run_and_save(
        self, program: str, arguments: JsonObject, limits: Limits, sinks: RunSinks
    ) -> RunEnding:
        """Run a program, and save the files before its ending is reported."""
        endings: list[RunEnding] = []
        kept = replace(sinks, ending=endings.append)
        try:
            ending = await self.session.container.run(program, arguments, limits, kept)
        except BaseException:  # a cancelled run may have changed files as well
            with anyio.CancelScope(shield=True):
                not_saved = await self.save(program, arguments)
            if endings and sinks.ending is not None:
                sinks.ending(replace(endings[0], not_saved=not_saved))
            raise
        if ending.ended_by is EndedBy.SANDBOX_LOST:
            return ending
        with anyio.CancelScope(shield=True):  # the run is over, so its files are not cut off
            not_saved = await self.save(program, arguments)
        return replace(ending, not_saved=not_saved)


# -- processes and ports ------------------------------------------------------------------

_BEHIND_ALL = (1 << 53) - 1
"""An offset beyond all output. The answer to a read at this offset contains the offset at which the
output ends.
"""

STARTED_AT = "started_at"
"""Key in a stored start request: when the process was started, in Unix seconds."""

MAX_KEPT_BYTES = 256 * 1024
"""Maximum total size of the start requests that are stored for one session, in bytes."""

Visit = Callable[[], AbstractAsyncContextManager[None]]
"""Keeps a session running during the block. Raises if the session has ended or cannot run."""


class SessionProcesses:
    """The processes and ports of one session. `write` stores the session's record."""

    def __init__(
        self, session: Session, visit: Visit, write: Callable[[], Awaitable[None]]
    ) -> None:
        self._session = session
        self._visit = visit
        self._write = write

    async def ask(self, request: JsonObject) -> JsonObject:
        """Carry out a request about the processes (`SessionContainer.processes`). If a `start`
        request contains `restart`, the process is started again in each new container of the
        session, until it is stopped.

        Raises:
            ResourceNotFound: the session has ended, or there is no such process.
            InvalidParams: the request is not valid, or cannot be carried out.
            SandboxUnavailable: the session cannot run now.
            StoreError: the process was started, but may not be started again with the session.
        """
        session = self._session
        asked = {key: value for key, value in request.items() if key != "restart"}
        name, restart = str(asked.get("name")), bool(request.get("restart"))
        kept = session.kept_processes.get(name)
        if asked["do"] == "list" and session.is_stopped:
            return self._with_kept({"processes": []})
        if asked["do"] == "start" and restart:
            self._require_room(asked)
        if asked["do"] == "stop" and kept is not None:
            await self._forget(name)  # even if the guest no longer knows the process
        async with self._visit():
            sent = with_env(session.spec.env, asked) if asked["do"] == "start" else asked
            try:
                answer = await session.container.processes(sent)
            except ResourceNotFound:
                if asked["do"] != "stop" or kept is None:
                    raise
                answer = {"process": _ended(name, kept)}
        if asked["do"] == "start" and restart:
            started = answer["process"]["started_at"]
            kept = {**asked, STARTED_AT: started}
            session.kept_processes = {**session.kept_processes, name: kept}
            await self._write()
        elif asked["do"] == "start" and kept is not None:
            await self._forget(name)
        return self._with_kept(answer) if asked["do"] == "list" else answer

    async def read_end(self, name: str) -> JsonObject:
        """Read the end of a process's output. In the result, `skipped` is the number of bytes
        before this end. Raises the same errors as `ask`.
        """
        asked: JsonObject = {"do": "read", "name": name, "after": _BEHIND_ALL}
        end = (await self.ask(asked))["output"]["offset"]
        after = max(0, end - OUTPUT_PIECE_BYTES)
        piece: JsonObject = (await self.ask({**asked, "after": after}))["output"]
        return {**piece, "skipped": after + piece["skipped"]}

    def _require_room(self, asked: JsonObject) -> None:
        """Raise InvalidParams if the start request of one more process cannot be stored."""
        kept = {**self._session.kept_processes, str(asked["name"]): asked}
        if len(kept) > MAX_PROCESSES:
            raise InvalidParams(
                f"{MAX_PROCESSES} processes of this session start again with it already. Stop one.",
                fields=["restart"],
            )
        if len(dumps(dict(kept))) > MAX_KEPT_BYTES:
            raise InvalidParams(
                "The commands of the processes that start again with this session take more than "
                f"{MAX_KEPT_BYTES >> 10} KB. Put this one into a file.",
                fields=["restart"],
            )

    async def _forget(self, name: str) -> None:
        """Store that a process is not to be started again."""
        kept = self._session.kept_processes
        self._session.kept_processes = {key: one for key, one in kept.items() if key != name}
        await self._write()

    def _with_kept(self, answer: JsonObject) -> JsonObject:
        """Return a list of processes with additional entries: for processes that start again with
        the session, but ended so long ago that the guest no longer lists them.
        """
        known = {one["name"] for one in answer["processes"]}
        kept = self._session.kept_processes
        unknown = [_ended(name, asked) for name, asked in kept.items() if name not in known]
        return {**answer, "processes": [*unknown, *answer["processes"]]}

    @asynccontextmanager
    async def connect(self, port: int) -> AsyncIterator[anyio.abc.ByteStream]:
        """Connect to a port of the session. The connection is closed after the block.

        Raises:
            ResourceNotFound: the session has ended.
            InvalidParams: `port` is not a valid port number.
            NetworkError: nothing listens on the port.
            SandboxUnavailable: the session cannot run now.
        """
        async with self._visit(), await self._session.container.connect(port) as stream:
            yield stream


_SWEEP_LIMITS = Limits(wall_s=10.0, cpu_s=10.0, memory_mb=None, output_bytes=MB)


async def sweep(session: Session) -> None:
    """Remove unfinished files of interrupted requests from the workspace. The caller must have the
    session's turn.
    """
    uploads = session.leftovers is Leftovers.UPLOADS
    ending = await source_of(session).run(
        "files", {"do": "sweep", "uploads": uploads}, _SWEEP_LIMITS
    )
    if ending.ended_by is not EndedBy.SANDBOX_LOST:  # a sweep that failed is not repeated
        session.leftovers = Leftovers.NONE


async def start_again(session: Session, tell: Callable[[str, str], None]) -> None:
    """Start a session's processes again in its new container. `tell` receives the name of each
    process that cannot be started, and the reason.
    """
    for name, kept in session.kept_processes.items():
        asked = {key: value for key, value in kept.items() if key != STARTED_AT}
        try:
            await session.container.processes(with_env(session.spec.env, asked))
        except EngineError as error:
            tell(name, error.message)


def _ended(name: str, kept: JsonObject) -> JsonObject:
    """Return the description of an ended process, built from its stored start request, because the
    guest no longer lists the process.
    """
    return {
        "name": name, "state": "ended", "exit_code": None, "signal": None, "lost": False,
        "started_at": kept.get(STARTED_AT, 0.0),
    }  # fmt: skip
