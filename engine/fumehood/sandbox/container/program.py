"""A program that the operator configured, in a container of its own: an MCP server.

Host side, beside the pool: no guest is in it, so it serves all callers, and nothing of a call may
stay secret from the next. Invariants: it has every limit of `spec`, no network and no capability;
a container with limits that Docker could not set is not started; it ends with its streams.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from fumehood.core.errors import SandboxUnavailable
from fumehood.sandbox.container.channel import STDOUT, Demultiplexer, NotMultiplexed
from fumehood.sandbox.container.docker_api import DockerError
from fumehood.sandbox.container.spec import ContainerSpec, program_body

CHUNK = 64 * 1024
SAID_BYTES = 2000
REMOVE_S = 10.0


class ContainerProgram:
    """The standard streams of a running program. `stop` removes its container."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        remove: Callable[[], Awaitable[None]],
    ) -> None:
        self.said = b""
        self._reader = reader
        self._writer = writer
        self._remove = remove
        self._parts = Demultiplexer()

    @classmethod
    async def start(
        cls,
        docker: Any,
        spec: ContainerSpec,
        command: tuple[str, ...],
        env: Mapping[str, str],
        remove: Callable[[], Awaitable[None]],
    ) -> ContainerProgram:
        """Make the container, attach to it, start it.

        Raises:
            SandboxUnavailable: Docker refused, or lacks a limit.
        """
        try:
            _, stream = await docker.launch(program_body(spec, command, env), spec.name)
            stream.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=stream)
        except DockerError as error:
            await remove()
            raise SandboxUnavailable(f"{error.message} {error.remedy}") from None
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(REMOVE_S):
                await remove()
            raise
        return cls(reader, writer, remove)

    async def read(self) -> bytes:
        """The next bytes of its standard output; none at the end."""
        while chunk := await self._reader.read(CHUNK):
            found = b""
            try:
                for stream, piece in self._parts.feed(chunk):
                    if stream == STDOUT:
                        found += piece
                    else:
                        self.said = (self.said + piece)[-SAID_BYTES:]
            except NotMultiplexed:
                return b""
            if found:
                return found
        return b""

    async def write(self, data: bytes) -> None:
        """Raises OSError."""
        if self._writer.transport.get_write_buffer_size() > len(data) + CHUNK * 64:
            raise BlockingIOError("it reads nothing")
        self._writer.write(data)
        await self._writer.drain()

    async def stop(self) -> None:
        """Remove the container. One that Docker does not remove now is removed later."""
        with anyio.CancelScope(shield=True):
            self._writer.close()
            with contextlib.suppress(OSError), anyio.move_on_after(REMOVE_S):
                await self._remove()
