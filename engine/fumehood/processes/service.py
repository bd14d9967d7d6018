"""The processes of one session: requests to its guest, and starts in each new container.

Host side. Above it are the executors and the public interfaces, below it the session's container.
Processes are used beside the session's calls, without a turn. Invariant: the request for a process
that starts again with the session is stored before the process's start is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fumehood.core.errors import EngineError, InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.processes.arguments import checked
from fumehood.protocol.framing import MAX_PROCESSES, OUTPUT_PIECE_BYTES
from fumehood.protocol.strict_json import dumps
from fumehood.sandbox.session import with_env
from fumehood.sandbox.session_use import SessionAccess
from fumehood.sandbox.wall import SessionContainer

NAME = "processes"
"""The name under which the start requests are kept with the session: process name → request, for
the processes that are started again in each new container."""

_BEHIND_ALL = (1 << 53) - 1
"""An offset beyond all output. The answer to a read at this offset contains the offset at which the
output ends.
"""

STARTED_AT = "started_at"
"""Key in a stored start request: when the process was started, in Unix seconds."""

MAX_KEPT_BYTES = 256 * 1024
"""Maximum total size of the start requests that are stored for one session, in bytes."""


@dataclass(frozen=True, slots=True)
class SessionProcesses:
    """The processes of one session."""

    access: SessionAccess

    @property
    def _kept(self) -> Mapping[str, JsonObject]:
        return self.access.session.of_parts.get(NAME, {})

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
        asked = {key: value for key, value in request.items() if key != "restart"}
        name, restart = str(asked.get("name")), bool(request.get("restart"))
        kept = self._kept.get(name)
        if asked["do"] == "list" and self.access.session.is_stopped:
            return self._with_kept({"processes": []})
        if asked["do"] == "start" and restart:
            self._require_room(asked)
        if asked["do"] == "stop" and kept is not None:
            await self._forget(name)  # even if the guest no longer knows the process
        async with self.access.visit() as container:
            try:
                answer = await container.processes(_sent(self.access, asked))
            except ResourceNotFound:
                if asked["do"] != "stop" or kept is None:
                    raise
                answer = {"process": _ended(name, kept)}
        if asked["do"] == "start" and restart:
            started = {**asked, STARTED_AT: answer["process"]["started_at"]}
            await self.access.keep(NAME, {**self._kept, name: started})
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

    async def start_again(
        self, container: SessionContainer, tell: Callable[[str, str], None]
    ) -> None:
        """Start the processes again in the session's new container. `tell` receives the name of
        each process that cannot be started, and the reason.
        """
        for name, kept in self._kept.items():
            asked = {key: value for key, value in kept.items() if key != STARTED_AT}
            try:
                await container.processes(_sent(self.access, asked))
            except EngineError as error:
                tell(name, error.message)

    def _require_room(self, asked: JsonObject) -> None:
        """Raise InvalidParams if the start request of one more process cannot be stored."""
        kept = {**self._kept, str(asked["name"]): asked}
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
        kept = {key: one for key, one in self._kept.items() if key != name}
        await self.access.keep(NAME, kept)

    def _with_kept(self, answer: JsonObject) -> JsonObject:
        """Return a list of processes with additional entries: for processes that start again with
        the session, but ended so long ago that the guest no longer lists them.
        """
        known = {one["name"] for one in answer["processes"]}
        unknown = [_ended(name, asked) for name, asked in self._kept.items() if name not in known]
        return {**answer, "processes": [*unknown, *answer["processes"]]}


def _sent(access: SessionAccess, asked: JsonObject) -> JsonObject:
    """Return a request as it is sent, with the session's environment if it starts a process. Raises
    InvalidParams.
    """
    return checked(with_env(access.session.spec.env, asked) if asked["do"] == "start" else asked)


def _ended(name: str, kept: JsonObject) -> JsonObject:
    """Return the description of an ended process, built from its stored start request, because the
    guest no longer lists the process.
    """
    return {
        "name": name, "state": "ended", "exit_code": None, "signal": None, "lost": False,
        "started_at": kept.get(STARTED_AT, 0.0),
    }  # fmt: skip
