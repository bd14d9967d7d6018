"""Forwards a local port to a port of a session, for a browser or any protocol.

Used by `fumehood sessions port` and the console. For a browser, the local port has its own origin:
an unguessable host name below `localhost`. The session's pages therefore share no cookies, storage
or workers with other pages, and a page that does not know the name cannot reach them. Invariant:
unless `is_tcp` is set, a connection whose first request does not name that host receives no data
from the session.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import h11
from anyio.streams.stapled import MultiListener

from fumehood.client.api_request import address
from fumehood.protocol.framing import MAX_HEAD_BYTES, MAX_PORT_CONNECTIONS

NO_IPV6 = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT})
"""Errors for `::1` on a machine without IPv6, where no other process can use `::1` either."""

HEAD_S = 5.0
"""Seconds within which the head of a connection's first request must arrive."""

PIECE_BYTES = 64 * 1024
NOT_HERE = "This is not the link that fumehood has printed, or it is too old.\n"


class NotForwarded(Exception):
    """The engine did not open the port. The message says why."""


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Forwards a local port to the port `port` of a session."""

    engine: Path
    """The callers' socket."""
    credential: str | None
    session: str
    port: int
    is_tcp: bool
    """Whether to forward any bytes, instead of only HTTP requests to the link."""
    tell: Callable[[str], None]
    """Receives the reason if one connection cannot be forwarded."""

    async def serve(self, local_port: int, for_s: float, on_ready: Callable[[str], None]) -> None:
        """Accept connections on a local port for `for_s` seconds, and forward them to the session's
        port.

        A `local_port` of 0 means any free port. Once the port is open, `on_ready` is called with
        the text to show to the user: `HOST:PORT` if `is_tcp` is True, otherwise the link for a
        browser.

        Raises:
            OSError: the local port cannot be used.
        """
        listener, bound = await _listen(local_port)
        host = f"{secrets.token_hex(8)}.localhost:{bound}"
        connected = 0

        async def forward(caller: anyio.abc.SocketStream) -> None:
            nonlocal connected
            async with caller:
                if connected < MAX_PORT_CONNECTIONS:
                    connected += 1
                    try:
                        await self._forward(caller, host)
                    finally:
                        connected -= 1

        try:
            on_ready(f"127.0.0.1:{bound}" if self.is_tcp else f"http://{host}/")
            with anyio.move_on_after(for_s):
                await listener.serve(forward)
        finally:
            with anyio.CancelScope(shield=True):  # otherwise the second address would stay open
                await listener.aclose()

    async def _forward(self, caller: anyio.abc.SocketStream, host: str) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            head = b"" if self.is_tcp else await self._head(caller, host)
            if head is None:
                await caller.send(_refusal(NOT_HERE))
                return
            try:
                session, first = await self._connect()
                async with session:
                    await session.send(head)
                    await caller.send(first)
                    await splice(caller, session, may_half_close=self.is_tcp)
            except NotForwarded as error:
                self.tell(str(error))
                if not self.is_tcp:
                    await caller.send(_refusal(f"{error}\n", b"502 Bad Gateway"))

    async def _head(self, caller: anyio.abc.ByteStream, host: str) -> bytes | None:
        """Receive the head of the first request on the connection `caller`.

        Once the head is complete, return all received bytes. Return None if the head is invalid,
        arrives too late, or names a host other than `host`.
        """
        parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        first = b""
        with anyio.move_on_after(HEAD_S):
            while True:
                try:
                    piece = await caller.receive(PIECE_BYTES)
                    parser.receive_data(piece)
                    event = parser.next_event()
                except (anyio.EndOfStream, h11.RemoteProtocolError):
                    return None
                first += piece
                if isinstance(event, h11.Request):
                    names = [value for name, value in event.headers if name == b"host"]
                    return first if names == [host.encode()] else None
                if event is not h11.NEED_DATA:
                    return None
        return None

    async def _connect(self) -> tuple[anyio.abc.ByteStream, bytes]:
        """Connect to the session's port, through the engine.

        Return the stream, and the bytes that have already arrived on it.

        Raises:
            NotForwarded: the engine does not open the port.
            OSError: the engine cannot be reached.
        """
        stream = await anyio.connect_unix(self.engine)
        try:
            path = address("sessions", self.session, "ports", str(self.port))
            lines = [f"POST {path} HTTP/1.1", "host: fumehood", "connection: Upgrade"]
            lines.append("upgrade: tcp")
            if self.credential is not None:
                lines.append(f"authorization: Bearer {self.credential}")
            await stream.send("\r\n".join([*lines, "", ""]).encode())
            head, first = await _until_head_ends(stream)
        except BaseException:
            await stream.aclose()
            raise
        if not head.startswith(b"HTTP/1.1 101 "):
            await stream.aclose()
            raise NotForwarded(_reason(first))
        return stream, first


async def _listen(local_port: int) -> tuple[anyio.abc.Listener[anyio.abc.SocketStream], int]:
    """Listen on the same port of `127.0.0.1` and `::1`, and return the listener and the port. A
    `local_port` of 0 means any free port.

    Both addresses are used because a browser may try `::1` first, and another user of the machine
    could otherwise listen there.

    Raises:
        OSError: the port cannot be used.
    """
    for is_last in (False, False, False, True):
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=local_port)
        port: int = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610
        try:
            other = await anyio.create_tcp_listener(local_host="::1", local_port=port)
        except OSError as error:
            if error.errno in NO_IPV6:
                return listener, port
            await listener.aclose()
            if local_port or is_last:
                raise
        else:
            return MultiListener([listener, other]), port
    raise AssertionError  # the last try raises


async def splice(
    caller: anyio.abc.SocketStream, session: anyio.abc.ByteStream, *, may_half_close: bool
) -> None:
    """Pass bytes in both directions until the session's side ends.

    If `may_half_close` is False, stop also when the caller's side ends.
    """

    async def up() -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for piece in caller:
                await session.send(piece)
            await session.send_eof()
        # A browser never closes only one direction.
        if not may_half_close:
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(up)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for piece in session:
                await caller.send(piece)
        group.cancel_scope.cancel()


async def _until_head_ends(stream: anyio.abc.ByteStream) -> tuple[bytes, bytes]:
    """Return the head of the engine's answer, and the bytes received after it."""
    received = b""
    while b"\r\n\r\n" not in received and len(received) < MAX_HEAD_BYTES:
        try:
            received += await stream.receive(PIECE_BYTES)
        except anyio.EndOfStream:
            break
    head, _, rest = received.partition(b"\r\n\r\n")
    return head, rest


def _reason(body: bytes) -> str:
    """Return the message in the body of the engine's refusal, or a general message if there is
    none.
    """
    from fumehood.protocol.strict_json import StrictJsonError, loads

    try:
        refusal = loads(body)
        return str(refusal["error"]["message"])
    except (StrictJsonError, ValueError, TypeError, KeyError):
        return "The engine did not open the port."


def _refusal(words: str, status: bytes = b"403 Forbidden") -> bytes:
    body = words.encode()
    head = b"HTTP/1.1 %s\r\ncontent-type: text/plain; charset=utf-8\r\n" % status
    return head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
