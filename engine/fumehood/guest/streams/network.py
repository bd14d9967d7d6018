"""The stream of connections to the gateway. Programs reach the gateway as an HTTP proxy on
loopback.

Guest side, used by the supervisor and by the front of an operator's program. The bytes are not
parsed here; the host parses them. Invariants: bytes are relayed only during a run with network, and
connections made at other times are closed at once; after a run, none of its connections is left.
"""

from __future__ import annotations

import os
import selectors
import socket

from fumehood.guest.container import streams
from fumehood.guest.container.connections import Connections
from fumehood.guest.container.host import Host
from fumehood.guest.container.run import Run
from fumehood.protocol.connections import MAX_CONNECTIONS
from fumehood.protocol.framing import GATEWAY_PORT, TRUST_FILE
from fumehood.protocol.streams import StreamFrame

BACKLOG = 128


class Relay(Connections):
    """Accepts the connections of programs, and relays them to the gateway."""

    def __init__(self, kind: str, host: Host, selector: selectors.BaseSelector) -> None:
        super().__init__(kind, host, selector)
        self._numbers = 0
        self._trust = ""
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", GATEWAY_PORT))  # before any program can
        self._listener.listen(BACKLOG)
        selector.register(self._listener, selectors.EVENT_READ, self._on_connection)

    def begin(self, run_id: int, trust: str) -> None:
        """From now on, relay the connections of the run `run_id` to the gateway. `trust` contains
        the certificates that clients should trust, in PEM. Raises OSError if the certificates
        cannot be stored.
        """
        if trust != self._trust:
            with open(f"{TRUST_FILE}.new", "w") as file:
                file.write(trust)
            os.replace(f"{TRUST_FILE}.new", TRUST_FILE)
            self._trust = trust
        self.turn_away()
        self.run_id = run_id

    def end(self) -> None:
        """Close all connections, and relay nothing until `begin` is called again."""
        self.run_id = None
        self.close()

    def turn_away(self) -> None:
        """Close the connections that are not accepted yet, because a program of an earlier run has
        opened them.
        """
        for _ in range(2 * BACKLOG):  # no more of them can wait
            accepted = self._accepted()
            if accepted is None:
                return
            accepted.close()

    def _on_connection(self) -> None:
        accepted = self._accepted()
        if accepted is None:
            return
        if self.run_id is None or self.count >= MAX_CONNECTIONS:
            accepted.close()
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 2 pieces take 40 ms
        self._numbers += 1
        self.add(self._numbers, accepted)

    def _accepted(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except OSError:
            return None


class End(streams.End):
    """Relays the connections of the current run's program, if the run has network."""

    needs_sockets = True

    def __init__(self, kind: str, place: streams.Place) -> None:
        super().__init__(kind, place)
        self._relay = Relay(kind, place.host, place.selector)

    def begin(self, run: Run, told: str) -> None:
        """From now on, relay the connections of `run` to the gateway. `told` contains the
        certificates that clients should trust, in PEM. Raises OSError if they cannot be stored.
        """
        self._relay.begin(run.id, told)

    def on_frame(self, run: Run | None, frame: StreamFrame) -> None:
        """Process a frame from the host for a connection of the current run."""
        self._relay.on_frame(frame)

    def end(self) -> None:
        """Close the run's connections."""
        self._relay.end()

    def clear(self) -> None:
        """Close the connections that killed programs have begun and that were not accepted yet."""
        self._relay.turn_away()

    def leave(self) -> None:
        """Close all connections, because the host is gone."""
        self._relay.end()
