"""Takeover: another engine becomes the host of a session whose own engine is gone.

Guest side. The next engine runs `relay` in the container (`docker exec`); it hands its own standard
input and output to the supervisor, through a socket in the container's network namespace, and waits
until the supervisor lets go. Programs reach that socket too, so the kernel's word counts: only a
process of root is heard. Invariant: a host with a lower or equal epoch is refused.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

ADDRESS = "\0fumehood-takeover"
"""Abstract: it needs no directory that is writable and out of the programs' reach."""

DESCRIPTORS = 2
EPOCH_BYTES = 16
PATIENCE_S = 2.0
"""Seconds that a relay may take to send its descriptors after it has connected."""

REFUSED = 3
"""Exit code of a relay that was refused."""

_CREDENTIALS = struct.Struct("3i")


class Takeover:
    """The supervisor's end: listens for relays, and holds the one whose descriptors it uses."""

    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(ADDRESS)
        self.listener.listen()
        self.listener.setblocking(False)
        self._relay: socket.socket | None = None

    @property
    def processes(self) -> int:
        """Number of processes of the current relay."""
        return int(self._relay is not None)

    def accept(self, epoch: int) -> tuple[int, int, int] | None:
        """The epoch, input and output of a new host whose epoch is above `epoch`, or None."""
        try:
            relay, _ = self.listener.accept()
        except OSError:
            return None
        if not _is_root(relay):
            relay.close()
            return None
        relay.settimeout(PATIENCE_S)
        try:
            said, descriptors, _, _ = socket.recv_fds(relay, EPOCH_BYTES, DESCRIPTORS)
        except OSError:
            relay.close()
            return None
        if len(descriptors) != DESCRIPTORS or not said.isdigit() or int(said) <= epoch:
            for descriptor in descriptors:
                os.close(descriptor)
            relay.close()
            return None
        self.let_go()
        self._relay = relay
        readable, writable = descriptors
        return int(said), readable, writable

    def let_go(self) -> None:
        """End the current relay."""
        if self._relay is not None:
            self._relay.close()
            self._relay = None


def relay(config: dict[str, Any]) -> None:
    """Hand this process's standard input and output to the supervisor, and wait for its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(ADDRESS)
        socket.send_fds(end, [str(int(config["epoch"])).encode()], [0, 1])
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(null, descriptor)
        end.recv(1)
    os._exit(REFUSED)


def _is_root(peer: socket.socket) -> bool:
    shown = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(shown)[1] == 0)
