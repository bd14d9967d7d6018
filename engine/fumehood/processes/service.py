"""The background processes of one session: requests to its guest, and restarts in new containers.

Host side. Above it are the executors and the public interfaces, below it the session's container.
Requests about processes do not wait for the session's running call. Invariant: the start request of
a process with the option `restart` is stored before the start is reported to the caller.
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
"""The key under which the session stores the start requests of the processes with the option
`restart`: process name → request."""

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
    """The background processes of one session."""

    access: SessionAccess

    @property
    def _kept(self) -> Mapping[str, JsonObject]:
        return self.access.session.of_parts.get(NAME, {})

    async def ask(self, request: JsonObject) -> JsonObject:
        """Carry out a request about the session's processes, and return the guest's answer (see
        `SessionContainer.processes`). The field `do` of the request names the action.

        If a request to start a process has a true `restart`, each new container of the session also
        starts the process, until a request stops it.

        Raises:
            ResourceNotFound: the session has ended, or there is no such process.
            InvalidParams: the request is invalid, or cannot be carried out.
            SandboxUnavailable: the session cannot run now.
            StoreError: the stored start requests cannot be changed. A process to start was started,
                and a process to stop was not stopped.
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
        """Return the end of a process's output. The field `skipped` of the result is the number of
        output bytes before this end. Raises the same errors as `ask`.
        """
        asked: JsonObject = {"do": "read", "name": name, "after": _BEHIND_ALL}
        end = (await self.ask(asked))["output"]["offset"]
        after = max(0, end - OUTPUT_PIECE_BYTES)
        piece: JsonObject = (await self.ask({**asked, "after": after}))["output"]
        return {**piece, "skipped": after + piece["skipped"]}

    async def start_again(
        self, container: SessionContainer, tell: Callable[[str, str], None]
    ) -> None:
        """Start the processes with the option `restart` in the session's new container.

        `tell` is called with the name of each process that cannot be started, and the reason.
        """
        for name, kept in self._kept.items():
            asked = {key: value for key, value in kept.items() if key != STARTED_AT}
            try:
                await container.processes(_sent(self.access, asked))
            except EngineError as error:
                tell(name, error.message)

    def _require_room(self, asked: JsonObject) -> None:
        """Raise InvalidParams if the session cannot store the start request `asked`, because it
        would then store too many requests or too many bytes.
        """
        kept = {**self._kept, str(asked["name"]): asked}
        if len(kept) > MAX_PROCESSES:
            raise InvalidParams(
                f"This session already has {MAX_PROCESSES} processes with restart. Stop one.",
                fields=["restart"],
            )
        if len(dumps(dict(kept))) > MAX_KEPT_BYTES:
            raise InvalidParams(
                "The commands of this session's processes with restart take more than "
                f"{MAX_KEPT_BYTES >> 10} KB. Put this command into a file.",
                fields=["restart"],
            )

    async def _forget(self, name: str) -> None:
        """Delete a process's stored start request, so that it is no longer restarted."""
        kept = {key: request for key, request in self._kept.items() if key != name}
        await self.access.keep(NAME, kept)

    def _with_kept(self, answer: JsonObject) -> JsonObject:
        """Return the guest's list of processes, with some ended processes added. These have a
        stored start request, and the guest no longer lists them.
        """
        known = {process["name"] for process in answer["processes"]}
        unknown = [_ended(name, asked) for name, asked in self._kept.items() if name not in known]
        return {**answer, "processes": [*unknown, *answer["processes"]]}


def _sent(access: SessionAccess, asked: JsonObject) -> JsonObject:
    """Return the request `asked` in the form that is sent to the guest. Add the session's
    environment variables to a `start` request. Raises InvalidParams if the request is invalid.
    """
    return checked(with_env(access.session.spec.env, asked) if asked["do"] == "start" else asked)


def _ended(name: str, kept: JsonObject) -> JsonObject:
    """Describe an ended process by its stored start request `kept`, because the guest no longer
    lists the process.
    """
    return {
        "name": name, "state": "ended", "exit_code": None, "signal": None, "lost": False,
        "started_at": kept.get(STARTED_AT, 0.0),
    }  # fmt: skip
