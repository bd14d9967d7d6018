"""`AsyncSession`: one session for a framework's adapter, and the programs that run in it.

Client side. The session is created on first use, and ended by `close` unless it existed before.
Calls are sent one at a time, because an engine runs one call at a time in a session. Only calls
that manage background processes (`call_beside`) are sent without waiting for other calls.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from fumehood.client.api_request import Refused
from fumehood.client.async_with_parts import AsyncClient
from fumehood.client.finished import (
    AsyncTurn,
    Finished,
    finished,
    program_arguments,
    program_result,
)
from fumehood.core.envelope import Envelope
from fumehood.core.json_types import JsonObject

TIMEOUT_S = 600.0
"""The default time limit of a program in seconds: the engine's maximum."""


class AsyncSession:
    """A session of an engine, with methods that run programs in the session.

    An asynchronous context manager, for one event loop. At the end of its block it calls
    `close`.
    """

    def __init__(
        self,
        client: AsyncClient | None = None,
        *,
        session_id: str | None = None,
        image: str | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        idle_seconds: float | None = None,
        lifetime_seconds: float | None = None,
        agent_id: str | None = None,
        timeout_seconds: float = TIMEOUT_S,
        wait_for_approval: bool | float | None = None,
    ) -> None:
        """Create this object, without sending anything. The default `client` uses the configured
        socket.

        If `session_id` is given, that session is used; otherwise a new session is created on first
        use. The options from `image` to `lifetime_seconds` have the same meaning as in
        `AsyncClient.create_session`. Calls are made for the agent `agent_id`, with the time limit
        `timeout_seconds` and with `wait_for_approval` as in `CallOptions`.
        """
        self.id = session_id
        self._is_own = session_id is None
        self._wishes: dict[str, Any] = {
            "image": image, "memory_mb": memory_mb, "disk_mb": disk_mb, "agent_id": agent_id,
            "idle_seconds": idle_seconds, "lifetime_seconds": lifetime_seconds,
        }  # fmt: skip
        self._timeout_s = timeout_seconds
        self._options: dict[str, Any] = {"agent_id": agent_id}
        if wait_for_approval is not None:
            self._options["wait_for_approval"] = wait_for_approval
        self._resources = AsyncExitStack()
        self._client = self._given = client
        self._turn = AsyncTurn()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def client(self) -> AsyncClient:
        """Return the client. If none was given, it is created on first use."""
        if self._client is None:
            self._client = await self._resources.enter_async_context(AsyncClient())
        return self._client

    async def start(self) -> str:
        """Return the id of the session, which is created on first use."""
        if self.id is not None:
            return self.id
        async with self._turn:
            return await self._started()

    async def _started(self) -> str:
        if self.id is None:
            client = await self.client()
            made = await client.create_session(**self._wishes)
            self.id = made.id
        return self.id

    async def is_active(self) -> bool:
        """Return whether the session can be used.

        Raises:
            Refused: the session is unknown, or belongs to another caller.
        """
        client = await self.client()
        record = await client.session(await self.start())
        return not record.state.is_over

    async def close(self) -> None:
        """End the session and close the client, each only if this object created it.

        If this object is used again, it creates a new session.
        """
        async with self._turn:
            try:
                if self._is_own and self.id is not None:
                    session_id, self.id = self.id, None
                    client = await self.client()
                    with suppress(Refused):  # the session ended long ago
                        await client.end_session(session_id)
            finally:
                await self._resources.aclose()
                self._resources, self._client = AsyncExitStack(), self._given

    async def call(
        self, tool: str, arguments: JsonObject, timeout_s: float | None = None
    ) -> Envelope:
        """Call a tool in this session. The engine cancels the call if the connection is closed.

        If `timeout_s` is None, the session's `timeout_seconds` is the time limit.
        """
        async with self._turn:
            client = await self.client()
            return await client.call(
                tool,
                arguments,
                session_id=await self._started(),
                timeout_seconds=self._timeout_s if timeout_s is None else timeout_s,
                cancel_on_disconnect=True,
                **self._options,
            )

    async def call_beside(self, tool: str, arguments: JsonObject) -> Envelope:
        """Call a tool such as `start_process` without waiting for other calls in the session.

        Raises:
            CallFailed: the call did not succeed.
        """
        client = await self.client()
        answer = await client.call(
            tool,
            arguments,
            session_id=await self.start(),
            cancel_on_disconnect=True,
            **self._options,
        )
        return answer.raise_for_error()

    async def run(
        self,
        program: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        directory: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
    ) -> Finished:
        """Run a command, or a program with its arguments. Any exit status is a result.

        `directory` is the working directory, a path relative to the workspace.

        Raises:
            CallFailed: no program ran, or its result is unknown.
        """
        arguments = program_arguments(program, env, directory)
        if stdin is not None:
            arguments["stdin_base64"] = base64.b64encode(stdin).decode("ascii")
        return await self.finish(await self.call("run_shell", arguments, timeout_s))

    async def finish(self, envelope: Envelope) -> Finished:
        """Convert an answer of `run_shell` to a result with the program's whole output.

        Raises:
            CallFailed: no program ran, or its result is unknown.
        """
        program_result(envelope)
        stdout, stderr = [await self.whole(envelope, name) for name in ("stdout", "stderr")]
        return finished(envelope, stdout, stderr)

    async def whole(self, envelope: Envelope, field: str) -> Any:
        """Return the whole text of an answer's field.

        Raises for the same reasons as `AsyncClient.whole`.
        """
        client = await self.client()
        return await client.whole(envelope, field)

    async def put(self, path: str, content: bytes) -> None:
        """Write a file in the workspace."""
        client = await self.client()
        await client.put_file(await self.start(), path, content)

    async def get(self, path: str) -> bytes:
        """Read a file in the workspace."""
        client = await self.client()
        return await client.get_file(await self.start(), path)

    async def delete(self, path: str) -> None:
        """Delete a file in the workspace."""
        client = await self.client()
        await client.delete_file(await self.start(), path)
