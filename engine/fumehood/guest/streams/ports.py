"""The stream of connections to ports. Through it, the host connects to servers on the container's
loopback.

Guest side, used by the supervisor. Invariants: the host's connections reach only loopback, and only
in the container of a session; they are closed when the channel to the host closes.
"""

from __future__ import annotations

import errno
import selectors
import socket

from fumehood.guest.container import streams
from fumehood.guest.container.connections import Connections
from fumehood.guest.container.host import Host
from fumehood.guest.container.run import Run
from fumehood.protocol.connections import CLOSED, OPEN, Segment
from fumehood.protocol.framing import GATEWAY_PORT, MAX_PORT_CONNECTIONS
from fumehood.protocol.streams import NO_RUN, StreamFrame

LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


class Ports(Connections):
    """Opens connections to ports on loopback at the host's request."""

    def __init__(self, kind: str, host: Host, selector: selectors.BaseSelector) -> None:
        super().__init__(kind, host, selector)
        self.run_id = NO_RUN
        self._opening: dict[int, socket.socket] = {}

    def close(self) -> None:
        """Close all connections, including those that are being opened."""
        for number in list(self._opening):
            self._give_up(number)
        super().close()

    def on_segment(self, segment: Segment) -> None:
        """Process a segment: a message from the host about one connection. A segment `OPEN` asks
        for a new connection, and is answered exactly once, with `OPENED` or `CLOSED`.
        """
        if segment.step == OPEN:
            port = int.from_bytes(segment.data, "big")
            are_many = self.count + len(self._opening) >= MAX_PORT_CONNECTIONS
            is_refused = port in (0, GATEWAY_PORT) or are_many or self._host.keep is None
            self._connect(segment.number, port, [] if is_refused else list(LOOPBACK))
        elif segment.step == CLOSED and segment.number in self._opening:
            self._give_up(segment.number)
            self.tell(Segment(CLOSED, segment.number))
        else:
            super().on_segment(segment)

    def _connect(
        self, number: int, port: int, places: list[tuple[socket.AddressFamily, str]]
    ) -> None:
        """Connect to `port` without blocking. `places` are pairs of address family and address,
        which are tried in order. If one accepts the connection, use it as the connection `number`.
        If none does, tell the host that the connection is closed.
        """
        while places:
            family, address = places.pop(0)
            try:
                end = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue
            end.setblocking(False)
            code = end.connect_ex((address, port))
            if code == errno.EINPROGRESS:
                self._opening[number] = end
                self._selector.register(
                    end,
                    selectors.EVENT_WRITE,
                    lambda: self._on_connected(number, port, places),
                )
                return
            if code == 0:
                self._begin(number, end)
                return
            end.close()
        self.tell(Segment(CLOSED, number))

    def _on_connected(
        self, number: int, port: int, places: list[tuple[socket.AddressFamily, str]]
    ) -> None:
        end = self._opening.pop(number)
        self._selector.unregister(end)
        if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
            self._begin(number, end)
            return
        end.close()
        self._connect(number, port, places)

    def _begin(self, number: int, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.add(number, end)

    def _give_up(self, number: int) -> None:
        end = self._opening.pop(number)
        self._selector.unregister(end)
        end.close()


class End(streams.End):
    """Passes data between the host and ports in a session's container, over connections that the
    host asks for.
    """

    needs_sockets = True

    def __init__(self, kind: str, place: streams.Place) -> None:
        super().__init__(kind, place)
        self._ports = Ports(kind, place.host, place.selector)

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Process a frame from the host that belongs to a connection to a port."""
        self._ports.on_frame(frame)

    def leave(self) -> None:
        """Close all connections, because the host is gone."""
        self._ports.close()
