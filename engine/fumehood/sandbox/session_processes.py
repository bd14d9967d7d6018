"""The registered processes of a session, and the connections to its ports.

Host side, used by `sessions`. They are used beside the session's calls, without its turn: a visit
keeps the session from being paused or stopped. Invariant: a process that is to be started again is
stored before its start is reported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio.abc

from fumehood.core.errors import EngineError, InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.protocol.framing import OUTPUT_PIECE_BYTES
from fumehood.sandbox.session import Session, with_env

_BEHIND_ALL = (1 << 53) - 1
"""An offset behind all output. Reading there tells where the output ends."""

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
        if asked["do"] == "list" and session.is_stopped:
            return {"processes": []}
        async with self._visit():
            if asked["do"] == "start":
                answer = await session.container.processes(with_env(session.env, asked))
            else:
                answer = await session.container.processes(asked)
        await self._note(asked, restart=bool(request.get("restart")))
        return answer

    async def read_end(self, name: str) -> JsonObject:
        """Read the end of a process's output; `skipped` is all before it. Raises as `ask`."""
        asked: JsonObject = {"do": "read", "name": name, "after": _BEHIND_ALL}
        end = (await self.ask(asked))["output"]["offset"]
        after = max(0, end - OUTPUT_PIECE_BYTES)
        piece: JsonObject = (await self.ask({**asked, "after": after}))["output"]
        return {**piece, "skipped": after + piece["skipped"]}

    async def _note(self, asked: JsonObject, *, restart: bool) -> None:
        """Store whether a process is to be started again."""
        kept = self._session.kept_processes
        name = asked.get("name")
        if asked["do"] == "start" and restart:
            self._session.kept_processes = {**kept, str(name): asked}
        elif asked["do"] in ("start", "stop") and name in kept:
            self._session.kept_processes = {k: v for k, v in kept.items() if k != name}
        else:
            return
        await self._write()

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
    for name, asked in session.kept_processes.items():
        try:
            await session.container.processes(with_env(session.env, asked))
        except EngineError as error:
            tell(name, error.message)


def require_none(session: Session) -> None:
    """Raise InvalidParams if processes run, whose effects a trial could not undo."""
    if session.container.running:
        raise InvalidParams(
            "Processes run in this session, whose effects a trial could not undo. Stop them first.",
            fields=["options.preview"],
        )
