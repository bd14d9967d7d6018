"""`AsyncSession`: one session for a framework's adapter, and the programs that run in it.

Client side. The session is made on first use, and ended by `close` unless it existed before. Calls
are sent one at a time: an engine runs one at a time in a session. Only those for the processes that
run beside them wait for no other.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

from fumehood.client.api_request import Refused
from fumehood.client.async_client import AsyncClient
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
"""The default time limit of a program: the engine's maximum."""


class AsyncSession:
    """A session and its programs. An asynchronous context manager, for one event loop."""

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
        """Make a session. Nothing is sent yet. The default `client` uses the configured socket.

        The options from `image` to `lifetime_seconds` are those of `AsyncClient.create_session`.
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
        """Return the client, which is made if none was given."""
        if self._client is None:
            self._client = await self._resources.enter_async_context(AsyncClient())
        return self._client

    async def start(self) -> str:
        """Return the id of the session, which is made on first use."""
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
        """Whether the session can be used. Raises Refused for one that never was this caller's."""
        client = await self.client()
        record = await client.session(await self.start())
        return not record.state.is_over

    async def close(self) -> None:
        """End the session if it was made here. Further use makes a new one."""
        async with self._turn:
            try:
                if self._is_own and self.id is not None:
                    session_id, self.id = self.id, None
                    client = await self.client()
                    with suppress(Refused):  # it is long over
                        await client.end_session(session_id)
            finally:
                await self._resources.aclose()
                self._resources, self._client = AsyncExitStack(), self._given

    async def call(
        self, tool: str, arguments: JsonObject, timeout_s: float | None = None
    ) -> Envelope:
        """Call a tool in this session. The call ends with its caller."""
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
        """Call a tool that needs no turn, such as `start_process`, also while a program runs.

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

        `directory` is below the workspace.

        Raises:
            CallFailed: no program ran, or its result is unknown.
        """
        arguments = program_arguments(program, env, directory)
        if stdin is not None:
            arguments["stdin_base64"] = base64.b64encode(stdin).decode("ascii")
        return await self.finish(await self.call("run_shell", arguments, timeout_s))

    async def finish(self, envelope: Envelope) -> Finished:
        """Return a program's ending with its whole output. Raises CallFailed as `run`."""
        program_result(envelope)
        stdout, stderr = [await self.whole(envelope, name) for name in ("stdout", "stderr")]
        return finished(envelope, stdout, stderr)

    async def whole(self, envelope: Envelope, field: str) -> Any:
        """Return a whole field of an answer. Raises as `AsyncClient.whole`."""
        client = await self.client()
        return await client.whole(envelope, field)

    async def put(self, path: str, content: bytes) -> None:
        """Write a file of the workspace."""
        client = await self.client()
        await client.put_file(await self.start(), path, content)

    async def get(self, path: str) -> bytes:
        """Read a file of the workspace."""
        client = await self.client()
        return await client.get_file(await self.start(), path)

    async def delete(self, path: str) -> None:
        """Delete a file of the workspace."""
        client = await self.client()
        await client.delete_file(await self.start(), path)
