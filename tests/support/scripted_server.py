"""A server on a Unix socket, scripted per connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fumehood.protocol import strict_json

TIMEOUT_S = 120

Steps = list[str]
"""The steps of one connection:

`answer` reads a request and answers it; `cut` reads one and answers half; `read` reads one and
does not answer; `half_close` sends no
more but stays; `hold` waits for the client to leave. At the end the connection is closed.
"""


class ScriptedServer:
    """Serves its scripts in order, one connection each; `requests` lists complete requests."""

    def __init__(self, path: Path, body: bytes, *scripts: Steps) -> None:
        self.requests: list[str] = []
        self.faults: list[Exception] = []
        self._body = body
        self._scripts = scripts
        self._done = [threading.Event() for _ in scripts]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_until_closed(self, connection: int) -> None:
        """Wait until the script of this connection, counted from 0, has ended."""
        assert self._done[connection].wait(TIMEOUT_S)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        for steps, done in zip(self._scripts, self._done, strict=True):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the test ended without it
            try:
                with connection:
                    connection.settimeout(TIMEOUT_S)
                    for step in steps:
                        self._play(step, connection)
            except Exception as fault:
                self.faults.append(fault)
            done.set()

    def _play(self, step: str, connection: socket.socket) -> None:
        if step == "half_close":
            connection.shutdown(socket.SHUT_WR)
        elif step == "hold":
            while connection.recv(65536):
                pass
        else:
            self.requests.append(_read_request(connection))
            if step in ("answer", "cut"):
                head = (
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(self._body)}\r\n\r\n"
                )
                sent = self._body[: len(self._body) // 2] if step == "cut" else self._body
                connection.sendall(head.encode() + sent)


@contextmanager
def scripted_server(path: Path, body: bytes, *scripts: Steps) -> Iterator[ScriptedServer]:
    """A server that answers with this body; an error inside it fails the test."""
    server = ScriptedServer(path, body, *scripts)
    try:
        yield server
    finally:
        server.close()
    assert server.faults == []


def _read_request(connection: socket.socket) -> str:
    """Read one whole request; return its method and path."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        raw += _received(connection)
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    fields = (line.lower().partition(":") for line in lines)
    length = sum(int(value) for name, _, value in fields if name == "content-length")
    while len(body) < length:
        body += _received(connection)
    if body:
        strict_json.loads(body)
    method, address, _ = lines[0].split(" ")
    return f"{method} {address}"


def _received(connection: socket.socket) -> bytes:
    chunk = connection.recv(65536)
    if not chunk:
        raise ConnectionError("the client left in the middle of a request")
    return chunk
