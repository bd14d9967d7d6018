"""A Unix socket proxy that cuts a daemon's answers after some bytes."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.http import connect


class CuttingProxy:
    """Passes connections on to `target`; closes `count` of them after `least` to `most` bytes.

    The first one gets `most`, because a client without any event cannot resume.
    """

    def __init__(
        self, path: Path, target: Path, chance: random.Random, least: int, most: int, count: int
    ) -> None:
        self.path = path
        self.cuts = 0
        self._target = target
        self._chance = chance
        self._bytes = (least, most)
        self._count = count
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=600)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            with client, connect(self._target) as server, suppress(OSError):
                self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        """Forward one request, in one piece or as head and body, and part of its answer."""
        thread = threading.Thread(target=_copy, args=(client, server), daemon=True)
        thread.start()
        least, most = self._bytes
        left = self._chance.randint(least, most) if self.cuts else most
        if self.cuts == self._count:
            left = 1 << 30
        while left and (chunk := server.recv(left)):
            client.sendall(chunk)
            left -= len(chunk)
        self.cuts += not left
        for one in (client, server):
            one.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=600)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(
    path: Path, target: Path, *, least: int, most: int, count: int, seed: int = 1
) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(path, target, random.Random(seed), least, most, count)
    try:
        yield proxy
    finally:
        proxy.close()
