"""A small HTTP client on a Unix socket that can also misbehave."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


@dataclass
class Answer:
    """Status, headers and parsed body of one answer."""

    status: int
    headers: dict[str, str]
    body: Any

    @property
    def code(self) -> str | None:
        """The envelope's error code, or None for a success or a body without an envelope."""
        error = self.body["error"] if isinstance(self.body, dict) else None
        return None if error is None else error["code"]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("fumehood", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connect(self._path)


class SocketClient:
    """Keeps one connection; `raw` opens a new one for arbitrary bytes."""

    def __init__(self, path: Path, credential: str | None = None) -> None:
        self.path = path
        self._connection = _Connection(path)
        self._headers = {} if credential is None else {"authorization": f"Bearer {credential}"}

    def call(self, tool: str, arguments: Any = None, **options: Any) -> Answer:
        body: dict[str, Any] = {"arguments": arguments if arguments is not None else {}}
        if options:
            body["options"] = options
        return self.post(f"/v1/tools/{tool}/call", json.dumps(body).encode())

    def calculate(self, expression: str, **options: Any) -> Answer:
        return self.call("calculator", {"expression": expression}, **options)

    def run(self, code: str, **options: Any) -> Answer:
        return self.call("run_restricted_python", {"code": code}, **options)

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: bytes, content_type: str | None = "application/json") -> Answer:
        headers = {} if content_type is None else {"content-type": content_type}
        return self.request("POST", path, body, headers)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        self._connection.request(method, path, body, {**self._headers, **(headers or {})})
        response = self._connection.getresponse()
        raw = response.read()
        lowered = {key.lower(): value for key, value in response.getheaders()}
        is_json = lowered.get("content-type") == "application/json"
        return Answer(response.status, lowered, json.loads(raw) if is_json and raw else raw)

    def close(self) -> None:
        self._connection.close()

    @staticmethod
    def answers(path: Path) -> bool:
        """Whether the socket accepts connections."""
        try:
            connect(path).close()
        except OSError:
            return False
        return True


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Read to the end, even from a peer that resets with unread data."""
    chunks = []
    with suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def split_answer(raw: bytes) -> Answer:
    """Status and body of an answer that was read to the end."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    return Answer(status, {}, json.loads(body))
