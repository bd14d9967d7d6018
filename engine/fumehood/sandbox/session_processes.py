"""The registered processes of a session, and the connections to its ports.

Host side, used by `sessions`. They are used beside the session's calls, without its turn: a visit
keeps the session from being paused or stopped. Invariant: a process that is to be started again is
stored before its start is reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio.abc

from fumehood.core.errors import EngineError, InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.protocol.framing import MAX_PROCESSES, OUTPUT_PIECE_BYTES
from fumehood.protocol.strict_json import dumps
from fumehood.sandbox.session import Session, with_env

_BEHIND_ALL = (1 << 53) - 1
"""An offset behind all output. Reading there tells where the output ends."""

STARTED_AT = "started_at"
"""Key of a stored request: when the process was started, in Unix seconds."""

MAX_KEPT_BYTES = 256 * 1024
"""Bytes of the requests of one session that are stored for a new start."""

Visit = Callable[[], AbstractAsyncContextManager[None]]
"""Keeps a session running during the block. Raises if it is over or cannot run."""


class SessionProcesses:
    """The processes and ports of one session. `write` stores its record."""

    def __init__(
        self, session: Session, visit: Visit, write: Callable[[], Awaitable[None]]
    ) -> None:
        self._session = session
        self._visit = visit
        self._write = write

    async def ask(self, request: JsonObject) -> JsonObject:
        """Ask for what `SessionContainer.processes` answers. A `start` may have `restart`: then the
        process is started again whenever the session is, until it is stopped.

        Raises:
            ResourceNotFound: the session is over, or there is no such process.
            InvalidParams: the request is not valid, or cannot be carried out.
            SandboxUnavailable: the session cannot run now.
            StoreError: it has started, but may not be started again.
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
            await self._forget(name)  # also if it has ended so long ago that nobody else knows it
        async with self._visit():
            if asked["do"] == "start":
                answer = await session.container.processes(with_env(session.env, asked))
            else:
                try:
                    answer = await session.container.processes(asked)
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
        """Read the end of a process's output; `skipped` is all before it. Raises as `ask`."""
        asked: JsonObject = {"do": "read", "name": name, "after": _BEHIND_ALL}
        end = (await self.ask(asked))["output"]["offset"]
        after = max(0, end - OUTPUT_PIECE_BYTES)
        piece: JsonObject = (await self.ask({**asked, "after": after}))["output"]
        return {**piece, "skipped": after + piece["skipped"]}

    def _require_room(self, asked: JsonObject) -> None:
        """Raise InvalidParams if one more process cannot be kept for a new start."""
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
        """Return a list with the processes that are to be started again, also if they have ended
        so long ago that the session does not know them.
        """
        known = {one["name"] for one in answer["processes"]}
        kept = self._session.kept_processes
        unknown = [_ended(name, asked) for name, asked in kept.items() if name not in known]
        return {**answer, "processes": [*unknown, *answer["processes"]]}

    @asynccontextmanager
    async def connect(self, port: int) -> AsyncIterator[anyio.abc.ByteStream]:
        """Connect to a port of the session during the block.

        Raises:
            ResourceNotFound: the session is over.
            InvalidParams: it cannot be a port.
            NetworkError: nothing listens there.
            SandboxUnavailable: the session cannot run now.
        """
        async with self._visit(), await self._session.container.connect(port) as stream:
            yield stream


async def start_again(session: Session, tell: Callable[[str, str], None]) -> None:
    """Start the processes of a session that has a new container. `tell` gets the name of one that
    cannot be started, and why.
    """
    for name, kept in session.kept_processes.items():
        asked = {key: value for key, value in kept.items() if key != STARTED_AT}
        try:
            await session.container.processes(with_env(session.env, asked))
        except EngineError as error:
            tell(name, error.message)


def _ended(name: str, kept: JsonObject) -> JsonObject:
    """Return a process that is known only because it is to be started again."""
    return {
        "name": name, "state": "ended", "exit_code": None, "signal": None, "lost": False,
        "started_at": kept.get(STARTED_AT, 0.0),
    }  # fmt: skip


def require_none(session: Session) -> None:
    """Raise InvalidParams if processes run, whose effects a trial could not undo."""
    if session.container.running:
        raise InvalidParams(
            "Processes run in this session, whose effects a trial could not undo. Stop them first.",
            fields=["options.preview"],
        )
