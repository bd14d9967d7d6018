"""Connections from the host to the ports of a session's container.

Host side. Only the host opens such connections; the guest may open none. A connection belongs to
the session's container, and not to one of its runs.
"""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel

from fumehood.core.errors import InvalidParams, NetworkError, SandboxUnavailable
from fumehood.core.hosts import MAX_PORT
from fumehood.protocol.connections import CLOSED, FINISHED, OPEN, OPENED, Segment
from fumehood.protocol.framing import GATEWAY_PORT, MAX_PORT_CONNECTIONS, FrameError
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.streams import Stream, StreamKind, StreamPort

CONNECT_S = 10.0
"""Maximum seconds to connect to a port. A busy server may need some time to accept a connection."""


class PortConnection(Connection):
    """One connection from the host to a port of a session."""

    async def send_eof(self) -> None:
        """Tell the program that the host sends no more bytes. The program can still send bytes to
        the host.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._is_gone:
            self._tell(FINISHED)


class PortConnections(Connections):
    """All connections to the ports of one session's container. The host opens the connections and
    numbers them.
    """

    def __init__(self, port: StreamPort) -> None:
        super().__init__(port, lambda connection: None)
        self._opening: dict[int, asyncio.Future[PortConnection] | None] = {}
        """The requests to connect that the guest has not answered: number of the connection →
        future of the waiting caller, or None if the caller has given up.
        """

    async def connect(self, port: int) -> PortConnection:
        """Connect to a port on the container's loopback interface, and return the connection.

        Raises:
            InvalidParams: `port` is the gateway's port, or not a valid port number.
            NetworkError: nothing listens on the port, or nothing accepts the connection in time.
            SandboxUnavailable: there are too many connections, or the container has ended.
        """
        if not 0 < port <= MAX_PORT or port == GATEWAY_PORT:
            raise InvalidParams(f"A port is from 1 to {MAX_PORT}, and not {GATEWAY_PORT}.")
        if len(self._open) + len(self._opening) >= MAX_PORT_CONNECTIONS:
            raise SandboxUnavailable(
                f"The session has {MAX_PORT_CONNECTIONS} connections already.", retry_after_ms=1000
            )
        if self._is_closed:
            raise _ended()
        self._last += 1
        number = self._last
        waiting: asyncio.Future[PortConnection] = asyncio.get_running_loop().create_future()
        self._opening[number] = waiting
        self.send(Segment(OPEN, number, port.to_bytes(2, "big")))
        with anyio.move_on_after(CONNECT_S):
            try:
                return await waiting
            except asyncio.CancelledError:
                self._drop(number)
                raise
        raise NetworkError(f"What listens on port {port} does not accept a connection.")

    def _on_segment(self, segment: Segment) -> None:
        if segment.number not in self._opening:
            if segment.step == OPENED:
                raise FrameError("a connection that nobody asked for")
            super()._on_segment(segment)
            return
        waiting = self._opening.pop(segment.number)
        if segment.step not in (OPENED, CLOSED):
            raise FrameError("a connection's segment before it was opened")
        if waiting is None or waiting.done():
            return
        if segment.step == CLOSED:
            waiting.set_exception(NetworkError("Nothing listens on this port."))
        else:
            opened = self._open[segment.number] = PortConnection(self, segment.number)
            waiting.set_result(opened)

    def interrupt(self) -> None:
        """Close all connections. New connections can still be opened."""
        for number in [*self._opening, *self._open]:
            self._drop(number)

    def _drop(self, number: int) -> None:
        self.send(Segment(CLOSED, number))
        opened = self._open.pop(number, None)
        if opened is not None:
            opened.lose()
        elif number in self._opening:
            waiting, self._opening[number] = self._opening[number], None  # the answer comes later
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())

    def close(self) -> None:
        """Break all connections. Afterwards, no new connection can be opened."""
        super().close()
        for waiting in self._opening.values():
            if waiting is not None and not waiting.done():
                waiting.set_exception(_ended())
        self._opening.clear()


def _ended() -> SandboxUnavailable:
    return SandboxUnavailable("The session's container has ended.", retry_after_ms=1000)


PORTS = Stream(StreamKind("ports"), PortConnections)
"""The stream of a session's ports."""
