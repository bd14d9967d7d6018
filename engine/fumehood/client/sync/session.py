# Made by scripts/make_sync_client.py from client/async_session.py. Do not edit it here.
"""`Session`: one session for a framework's adapter, and the programs that run in it.

Client side. It is made when it is first used, and ended by `close` unless it was there before. One
call at a time is sent: an engine runs one at a time in a session.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

from fumehood.client.api_request import Refused
from fumehood.client.finished import (
    Finished,
    Turn,
    finished,
    program_arguments,
    program_result,
)
from fumehood.client.sync.client import Client
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject
from fumehood.core.session import SessionStatus

TIMEOUT_S = 600.0
"""Of a program for which nobody says another: as long as the engine allows at all."""


class Session:
    """A session and its programs. A context manager; threads may share it."""

    def __init__(
        self,
        client: Client | None = None,
        *,
        session_id: str | None = None,
        image: str | None = None,
        agent_id: str | None = None,
        timeout_seconds: float = TIMEOUT_S,
        wait_for_approval: bool | float | None = None,
    ) -> None:
        """Nothing is sent yet. Without a `client` there is one for the configured socket."""
        self.id = session_id
        self._is_own = session_id is None
        self._image = image
        self._timeout_s = timeout_seconds
        self._options: dict[str, Any] = {"agent_id": agent_id}
        if wait_for_approval is not None:
            self._options["wait_for_approval"] = wait_for_approval
        self._resources = ExitStack()
        self._client = self._given = client
        self._turn = Turn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def client(self) -> Client:
        """The client; made if none was given."""
        if self._client is None:
            self._client = self._resources.enter_context(Client())
        return self._client

    def start(self) -> str:
        """The id of the session, which is made if there is none yet."""
        with self._turn:
            return self._started()

    def _started(self) -> str:
        if self.id is None:
            client = self.client()
            made = client.create_session(image=self._image, agent_id=self._options["agent_id"])
            self.id = made.id
        return self.id

    def is_active(self) -> bool:
        """Whether the session can be used. Raises Refused for one that never was this caller's."""
        client = self.client()
        record = client.session(self.start())
        return record.state is SessionStatus.ACTIVE

    def close(self) -> None:
        """End the session if it was made here. It can be used again, and is a new one then."""
        with self._turn:
            try:
                if self._is_own and self.id is not None:
                    session_id, self.id = self.id, None
                    client = self.client()
                    with suppress(Refused):  # it is long over
                        client.end_session(session_id)
            finally:
                self._resources.close()
                self._resources, self._client = ExitStack(), self._given

    def call(self, tool: str, arguments: JsonObject, timeout_s: float | None = None) -> Envelope:
        """Call a tool in this session. The call ends with its caller."""
        with self._turn:
            client = self.client()
            return client.call(
                tool,
                arguments,
                session_id=self._started(),
                timeout_seconds=self._timeout_s if timeout_s is None else timeout_s,
                cancel_on_disconnect=True,
                **self._options,
            )

    def run(
        self,
        program: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        directory: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Finished:
        """Run a command, or a program with its arguments. Any exit status is a result.

        `directory` is below the workspace.

        Raises:
            CallFailed: no program ran, or nothing can be said of it.
        """
        arguments = program_arguments(program, env, directory)
        if stdin is not None:
            arguments["stdin_base64"] = base64.b64encode(stdin).decode("ascii")
        return self.finish(self.call("run_shell", arguments, timeout_s))

    def finish(self, envelope: Envelope) -> Finished:
        """A program's ending, with its whole output. Raises CallFailed as `run`."""
        program_result(envelope)
        stdout, stderr = [self.whole(envelope, name) for name in ("stdout", "stderr")]
        return finished(envelope, stdout, stderr)

    def whole(self, envelope: Envelope, field: str) -> Any:
        """A field of an answer whole. Raises as `Client.whole`."""
        client = self.client()
        return client.whole(envelope, field)

    def put(self, path: str, content: bytes) -> None:
        """Write a file of the workspace."""
        client = self.client()
        client.put_file(self.start(), path, content)

    def get(self, path: str) -> bytes:
        """Read a file of the workspace."""
        client = self.client()
        return client.get_file(self.start(), path)

    def delete(self, path: str) -> None:
        """Delete a file of the workspace."""
        client = self.client()
        client.delete_file(self.start(), path)
