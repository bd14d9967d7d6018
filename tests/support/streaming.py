"""A raw event stream client that reads only on request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fumehood.streams.sse import Decoder, Frame
from support.http import connect


class RawStream:
    """One connection that streams a call."""

    def __init__(self, path: Path, tool: str, arguments: Any, headers: str = "", **options: Any):
        body = json.dumps({"arguments": arguments, "options": options}).encode()
        head = (
            f"POST /v1/tools/{tool}/sse HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        )
        head += f"{headers}content-length: {len(body)}\r\n\r\n"
        self._send(path, head.encode() + body)

    @classmethod
    def of_call(cls, path: Path, call_id: str, headers: str = "", query: str = "") -> RawStream:
        """A stream of an earlier call."""
        stream = cls.__new__(cls)
        head = f"GET /v1/calls/{call_id}/events{query} HTTP/1.1\r\nhost: x\r\n{headers}\r\n"
        stream._send(path, head.encode("latin-1"))
        return stream

    def _send(self, path: Path, request: bytes) -> None:
        self.connection = connect(path)
        # Little is under way then, so that who does not read is noticed.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.connection.sendall(request)
        self._file = self.connection.makefile("rb")
        self._decoder = Decoder()
        self.status = 0
        self.headers: dict[str, str] = {}

    def begin(self) -> int:
        """The status and the headers."""
        self.status = int(self._file.readline().split()[1])
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        return self.status

    def chunks(self) -> Iterator[bytes]:
        """The body in the server's chunks."""
        while True:
            size = int(self._file.readline(), 16)
            yield self._file.read(size)
            self._file.readline()
            if size == 0:
                return

    def events(self) -> Iterator[Frame]:
        """Yield every event as it arrives."""
        if not self.status:
            self.begin()
        for chunk in self.chunks():
            yield from self._decoder.feed(chunk)

    def data(self) -> list[tuple[str, Any]]:
        """Kind and data of every remaining event."""
        return [(frame.kind, json.loads(frame.data)) for frame in self.events()]

    def body(self) -> Any:
        """The JSON body of an answer that is not a stream."""
        self.begin()
        return json.loads(self._file.read(int(self.headers["content-length"])))

    def leave(self) -> None:
        self._file.close()
        self.connection.close()


@contextmanager
def streaming(path: Path, tool: str, arguments: Any, **options: Any) -> Iterator[RawStream]:
    """A stream that is closed at the end."""
    stream = RawStream(path, tool, arguments, **options)
    try:
        yield stream
    finally:
        stream.leave()


@contextmanager
def resuming(
    path: Path, call_id: str, after: str | None = None, *, by: str = "header", headers: str = ""
) -> Iterator[RawStream]:
    """A stream of an earlier call, resumed after an event and closed at the end."""
    query = ""
    if after is not None and by == "header":
        headers += f"last-event-id: {after}\r\n"
    elif after is not None:
        query = f"?last_event_id={quote(after)}"
    stream = RawStream.of_call(path, call_id, headers, query)
    try:
        yield stream
    finally:
        stream.leave()


def call_id_of(frame: Frame) -> str:
    found: str = json.loads(frame.data)["metadata"]["call_id"]
    return found
