"""Requests to a port of a session. Such a request takes over its whole connection.

Host side. The owner of a session reaches its ports at `ANY /v1/sessions/{id}/ports/{port}/{path}`.
The head of the request is forwarded to the port, without the beginning of the address and the
caller's credential, and then the bytes of both sides pass unchanged. HTTP, event streams and
WebSocket therefore work, and no code here parses the session's data. With `Upgrade: tcp` no head is
forwarded, so that any protocol works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import anyio
from starlette.requests import Request

from fumehood.core.errors import InvalidParams, ShuttingDown
from fumehood.engine import Engine
from fumehood.http.caller import require_principal
from fumehood.http.peer import CallerStream, Handovers
from fumehood.sandbox.session_use import SessionAccess

ADDRESS = re.compile(rb"/v1/sessions/([^/?]+)/ports/([0-9]{1,5})(/.*)?", re.DOTALL)
ESCAPED_SLASH = re.compile(rb"%2f", re.IGNORECASE)

PORT_LOOK_S = 0.5
"""Seconds between checks whether the caller has disconnected or the engine is stopping."""

LEFT_S = 10.0
"""Seconds to deliver the bytes that a caller sent before it disconnected."""

SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: tcp\r\n\r\n"

_OURS = frozenset({b"authorization", b"connection", b"upgrade", b"keep-alive", b"te"})
"""Headers that are not forwarded. `connection` and `upgrade` get new values."""


@dataclass(frozen=True, slots=True)
class PortRequest:
    """A request to a port of a session that the caller owns."""

    engine: Engine
    session: SessionAccess
    port: int
    head: bytes
    """The request's head to forward to the session's server; empty with `Upgrade: tcp`."""

    async def serve(self, caller: CallerStream, first: bytes) -> None:
        """Connect to the session's port, and pass bytes in both directions. `first` contains the
        bytes that the caller has already sent after the head of its request.

        The method returns when the session's server ends its side of the connection, the caller
        disconnects, or the engine begins to stop.

        Raises:
            EngineError: the port cannot be reached; nothing was sent.
        """
        is_sent = anyio.Event()

        async def up() -> None:
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await port.send(self.head + first)
                async for piece in caller:
                    await port.send(piece)
                await port.send_eof()
            is_sent.set()

        async def watch() -> None:
            while not (caller.has_left or self.engine.is_draining):  # noqa: ASYNC110 - there is no event for it
                await anyio.sleep(PORT_LOOK_S)
            with anyio.move_on_after(0 if self.engine.is_draining else LEFT_S):
                await is_sent.wait()
            group.cancel_scope.cancel()

        async with (
            self.session.visit() as container,
            await container.connect(self.port) as port,
            anyio.create_task_group() as group,
        ):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                if not self.head:
                    await caller.send(SWITCHED)
                group.start_soon(up)
                group.start_soon(watch)
                async for piece in port:
                    await caller.send(piece)
            group.cancel_scope.cancel()


def is_for_port(path: bytes) -> bool:
    """Return whether a request with this path is for a port of a session."""
    return path.startswith(b"/v1/sessions/") and ADDRESS.fullmatch(path) is not None


def port_request(engine: Engine, request: Request, upgrade: bytes | None) -> PortRequest:
    """Check and parse a request to a session's port.

    `upgrade` is the protocol in the request's `Upgrade` header, in lower case, or None.

    Raises:
        Unauthorized, PermissionDenied: the caller is unknown, or may not call tools.
        ResourceNotFound: the caller has no such session.
        InvalidParams: the port is not a number from 1 to 65535.
        ShuttingDown: the engine is stopping.
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
    session = engine.sessions.access(caller, reference)
    if upgrade == b"tcp":
        return PortRequest(engine, session, port, b"")
    query = request.scope["query_string"]
    path = ESCAPED_SLASH.sub(b"/", found[3] or b"/")  # generated clients escape it in a path
    target = path + (b"?" + query if query else b"")
    head = [request.method.encode(), b" ", target, b" HTTP/1.1\r\n"]
    for name, value in _sent_on(request.scope["headers"], upgrade):
        head += [name, b": ", value, b"\r\n"]
    return PortRequest(engine, session, port, b"".join([*head, b"\r\n"]))


def _sent_on(
    headers: Iterable[tuple[bytes, bytes]], upgrade: bytes | None
) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name not in _OURS:
            yield name, value
    if upgrade is None:
        yield b"connection", b"close"  # the caller's next request may be for another address
    else:
        yield from ((b"connection", b"Upgrade"), (b"upgrade", upgrade))


HANDOVERS = [Handovers(is_for_port, port_request)]
