"""Ports of sessions: `ANY /v1/sessions/{id}/ports/{port}/{path}`, for the session's owner.

Host side. The server's protocol hands the whole connection over: the head of the request is sent
on, without the address's beginning and the caller's credential, and after it the bytes of both
sides pass as they are. So HTTP, event streams and WebSocket work, and nothing here reads what the
session says. With `Upgrade: tcp` only bytes pass, for any protocol. Invariant: a connection that
was handed over carries no other request of the API.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.abc
from starlette.requests import Request

from fumehood.core.errors import InvalidParams, ShuttingDown
from fumehood.engine import Engine
from fumehood.http.caller import require_principal
from fumehood.sandbox.session_use import SessionProcesses

ADDRESS = re.compile(rb"/v1/sessions/([^/?]+)/ports/([0-9]{1,5})(/.*)?", re.DOTALL)

PIECE_BYTES = 64 * 1024
LOOK_S = 0.5
"""Seconds between looks whether the caller has left, or the engine stops."""

LEFT_S = 10.0
"""Seconds to deliver what a caller sent before it left."""

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: tcp\r\n\r\n"

_OURS = frozenset({b"authorization", b"connection", b"upgrade", b"keep-alive", b"te"})
"""Headers that are not sent on as they are."""


def has_left(connection: socket.socket) -> bool:
    """Whether the peer has closed both directions of the connection.

    Over TCP also True if the peer has only stopped sending, which looks the same there.

    *Source*: unix_poll of Linux: POLLHUP if both directions are shut.
    """
    gone = select.POLLHUP if connection.family == socket.AF_UNIX else select.POLLRDHUP
    poll = select.poll()
    poll.register(connection.fileno(), gone)
    return any(events & (gone | select.POLLHUP) for _, events in poll.poll(0))


class CallerStream(anyio.abc.ByteStream):
    """The connection of a caller, once it is handed over."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(self._reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        loop = asyncio.get_running_loop()
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)
        transport.resume_reading()

    async def receive(self, max_bytes: int = PIECE_BYTES) -> bytes:
        """Return the next bytes. Raises as anyio's streams do."""
        try:
            data = await self._reader.read(max_bytes)
        except OSError:
            raise anyio.BrokenResourceError from None
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes, as far as the caller reads them. Raises as anyio's streams do."""
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    @property
    def has_left(self) -> bool:
        """Whether the caller has closed both directions. Over TCP one is enough."""
        return self._transport.is_closing() or has_left(self._transport.get_extra_info("socket"))

    async def send_eof(self) -> None:
        """Do nothing: the end of the connection tells it."""

    async def aclose(self) -> None:
        """Close the connection."""
        self._writer.close()


@dataclass(frozen=True, slots=True)
class PortRequest:
    """A request to a port of a session that the caller owns."""

    processes: SessionProcesses
    port: int
    head: bytes
    """The head for the session's server; empty with `Upgrade: tcp`."""


def is_for_port(path: bytes) -> bool:
    """Whether this is the address of a port of a session."""
    return path.startswith(b"/v1/sessions/") and ADDRESS.fullmatch(path) is not None


def port_request(engine: Engine, request: Request, upgrade: bytes | None) -> PortRequest:
    """Return what a request to a port asks for. `upgrade` is the protocol that it wants to change
    to, in lower case.

    Raises:
        Unauthorized, PermissionDenied: the caller is unknown, or may not call tools.
        ResourceNotFound: the caller has no such session.
        InvalidParams: it cannot be a port.
        ShuttingDown: the engine stops.
    """
    caller = require_principal(request)
    if engine.is_draining:
        raise ShuttingDown("The engine is stopping. Retry when it runs again.")
    found = ADDRESS.fullmatch(request.scope["raw_path"])
    assert found is not None  # by `is_for_port`
    port = int(found[2])
    if not 0 < port < 1 << 16:
        raise InvalidParams("A port is a number from 1 to 65535.", fields=["port"])
    reference = found[1].decode("ascii", "replace")
    processes = engine.sessions.processes(caller, reference)
    if upgrade == b"tcp":
        return PortRequest(processes, port, b"")
    query = request.scope["query_string"]
    target = (found[3] or b"/") + (b"?" + query if query else b"")
    head = [request.method.encode(), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in _sent_on(request.scope["headers"], upgrade):
        head += [name, b": ", value, b"\r\n"]
    return PortRequest(processes, port, b"".join([*head, b"\r\n"]))


def _sent_on(
    headers: Iterable[tuple[bytes, bytes]], upgrade: bytes | None
) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name not in _OURS:
            yield name, value
    if upgrade is None:
        yield b"connection", b"close"  # what follows an answer would not be for this address
    else:
        yield from ((b"connection", b"Upgrade"), (b"upgrade", upgrade))


async def pass_bytes(
    engine: Engine, asked: PortRequest, caller: CallerStream, first: bytes
) -> None:
    """Connect to the port, and pass bytes both ways until the port's side is done, the caller has
    left, or the engine begins to stop. `first` came after the head.

    Raises:
        EngineError: there is no connection; nothing was sent.
    """
    is_sent = anyio.Event()

    async def up() -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await port.send(asked.head + first)
            async for piece in caller:
                await port.send(piece)
            await port.send_eof()
        is_sent.set()

    async def watch() -> None:
        while not (caller.has_left or engine.is_draining):  # noqa: ASYNC110 - nothing tells it
            await anyio.sleep(LOOK_S)
        with anyio.move_on_after(0 if engine.is_draining else LEFT_S):
            await is_sent.wait()
        group.cancel_scope.cancel()

    async with asked.processes.connect(asked.port) as port, anyio.create_task_group() as group:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            if not asked.head:
                await caller.send(SWITCHED)
            group.start_soon(up)
            group.start_soon(watch)
            async for piece in port:
                await caller.send(piece)
        group.cancel_scope.cancel()
