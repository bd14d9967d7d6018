"""One request over a connection of its own, with the standard library alone.

Client side. A command that asks one thing and ends would spend most of its time on importing
`transport`, whose HTTP library keeps connections, follows events and is asynchronous besides.
Invariant: a request is sent once. Where no connection was made nothing was sent, and `transport`
tries instead, which knows how to say why.
"""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from typing import Any, TypeVar

from fumehood.client.ask import ANSWER_GRACE_S, CONNECT_TIMEOUT_S, ApiRequest

T = TypeVar("T")


def send_once(path: Path, ask: ApiRequest[T]) -> T:
    """The answer to one request. Raises as a `Client` does."""
    connection = _Connection(path, ask.work_s + ANSWER_GRACE_S)
    try:
        connection.connect()
    except OSError:
        return _explain_or_send(path, ask)
    try:
        headers = {"content-type": "application/json"} if ask.content is not None else {}
        connection.request(ask.method, ask.path, ask.content, {**headers, **ask.headers})
        raw = connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        from fumehood.client.transport import no_answer

        raise no_answer(ask, path, error) from None
    finally:
        connection.close()
    try:
        return ask.read(raw)
    except ValueError:
        from fumehood.client.transport import no_engine

        raise no_engine(ask, path) from None


class _Connection(http.client.HTTPConnection):
    """To a Unix socket. A request leaves in one piece: a program that is no engine may answer and
    close before it has read all of it.
    """

    def __init__(self, path: Path, answer_timeout_s: float) -> None:
        super().__init__("fumehood")
        self._path = path
        self._answer_timeout_s = answer_timeout_s
        self._unsent = b""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._answer_timeout_s)

    def send(self, data: Any) -> None:
        self._unsent += data

    def getresponse(self) -> http.client.HTTPResponse:
        self.sock.sendall(self._unsent)
        return super().getresponse()


def _explain_or_send(path: Path, ask: ApiRequest[T]) -> T:
    from fumehood.client.transport import BlockingTransport, Place

    return BlockingTransport(Place(path, None, CONNECT_TIMEOUT_S, ANSWER_GRACE_S)).send(ask)
