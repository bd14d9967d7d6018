"""One request over a connection of its own, with the standard library alone.

Client side. A command that sends one request and ends would spend most of its time importing
the HTTP library, which keeps connections and follows events. Invariant: a request is sent once. If
no connection was made nothing was sent, and `Transport` tries instead, which can say why.
"""

from __future__ import annotations

import http.client
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fumehood.client.api_request import ANSWER_GRACE_S, CONNECT_TIMEOUT_S, ApiRequest

T = TypeVar("T")


def send_once(path: Path, request: ApiRequest[T], credential: str | None = None) -> T:
    """The answer to one request. Raises as a `Client` does."""
    if credential is not None:
        headers = {**request.headers, "authorization": f"Bearer {credential}"}
        request = replace(request, headers=headers)
    connection = _Connection(path, request.work_s + ANSWER_GRACE_S)
    try:
        connection.connect()
    except OSError:
        return _explain_or_send(path, request)
    try:
        headers = {"content-type": "application/json"} if request.content is not None else {}
        connection.request(
            request.method, request.path, request.content, {**headers, **request.headers}
        )
        raw = connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        from fumehood.client.exchange import no_answer

        raise no_answer(request, path, error) from None
    finally:
        connection.close()
    try:
        return request.read(raw)
    except ValueError:
        from fumehood.client.exchange import no_engine

        raise no_engine(request, path) from None


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


def _explain_or_send(path: Path, request: ApiRequest[T]) -> T:
    from fumehood.client.exchange import Endpoint
    from fumehood.client.sync.transport import Transport

    return Transport(Endpoint(path, None, CONNECT_TIMEOUT_S, ANSWER_GRACE_S)).send(request)
