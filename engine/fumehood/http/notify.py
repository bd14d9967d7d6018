"""Words to the service manager that started this process, where one listens.

Host side. The protocol of sd_notify(3) without its library: one datagram to the socket
that `NOTIFY_SOCKET` names. Nothing depends on it; nobody listening is no fault.
"""

from __future__ import annotations

import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


class ServiceManager:
    """Whoever waits to hear that the engine serves, or stops; perhaps nobody."""

    def __init__(self, address: str | None) -> None:
        self._address = address

    @classmethod
    def of_this_process(cls) -> ServiceManager:
        """The one of the environment. The variable goes, so that no child speaks for us."""
        return cls(os.environ.pop("NOTIFY_SOCKET", None))

    def tell(self, state: str) -> None:
        """Send one word, without waiting."""
        if not self._address or self._address[0] not in "/@":
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), address)
        except OSError:
            pass  # it has gone; the engine serves without it
