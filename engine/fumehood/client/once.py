"""HTTP over a Unix socket with the standard library alone, for processes that must start quickly.

Client side. The library behind `Client` takes longer to import than a call takes, so commands that
send one request use `send_once`, and `fumehood mcp` keeps connections of the class `Connection`.
Invariant: a request is never sent a second time.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from fumehood.client.api_request import ANSWER_GRACE_S, CONNECT_TIMEOUT_S, ApiRequest

T = TypeVar("T")


class Response:
    """The response to one request. Its methods raise OSError if the connection ends too early.

    The daemon's data is trusted, so it is not limited in size.
    """

    def __init__(self, reader: BinaryIO) -> None:
        self._reader = reader
        status = reader.readline().split(b" ")
        if len(status) < 2 or not status[0].startswith(b"HTTP/1."):
            raise ConnectionError("no response")
        self.headers: dict[str, str] = {}
        while (line := reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        self.is_stream = self.headers.get("content-type", "").startswith("text/event-stream")

    def read(self) -> bytes:
        """Return the whole body. Raises OSError if the body breaks off."""
        if "transfer-encoding" in self.headers:
            return b"".join(self._chunks())
        return self._exactly(_size(self.headers.get("content-length", "0"), 10))

    def events(self) -> Iterator[bytes]:
        """Yield the data of each server-sent event. The daemon writes an event's data on one line.

        Raises OSError if the stream breaks off.
        """
        rest = b""
        for chunk in self._chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line[6:] for line in lines if line.startswith(b"data: "))

    def _chunks(self) -> Iterator[bytes]:
        while size := _size(self._reader.readline().strip(), 16):
            yield self._exactly(size)
            self._exactly(2)
        self._exactly(2)

    def _exactly(self, size: int) -> bytes:
        try:
            body = self._reader.read(size) if size >= 0 else b""
        except (MemoryError, OverflowError):  # an engine sends nothing that large
            body = b""
        if len(body) != size:
            raise ConnectionError("the response broke off")
        return body


def _size(digits: str | bytes, base: int) -> int:
    """Parse the size of a body or of one chunk, written with the number base `base`. Raises
    ConnectionError if the text is not a number.
    """
    try:
        return int(digits, base)
    except ValueError:
        raise ConnectionError("the response broke off") from None


class Connection:
    """A connection to a daemon's socket. Raises OSError if no process listens on the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(CONNECT_TIMEOUT_S)
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(None)  # a call may wait for a human
        self._reader = self._socket.makefile("rb")

    def ask(
        self, method: str, address: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Response:
        """Send one request, its head and body in one piece, and return the response.

        Raises OSError if the connection fails.
        """
        lines = [f"{method} {address} HTTP/1.1", "host: fumehood", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return Response(self._reader)

    def limit(self, seconds: float) -> None:
        """Set a time limit for all later reads. A read raises TimeoutError if no data arrives for
        `seconds`.
        """
        self._socket.settimeout(seconds)

    def is_open(self) -> bool:
        """Whether the connection can be used for another request.

        False if the daemon has closed the connection, or has sent data that was not requested.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Shut the connection down. A read in another thread then ends immediately."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def send_once(path: Path, request: ApiRequest[T], credential: str | None = None) -> T:
    """Send one request to the engine's socket `path`, and return its answer.

    Raises:
        DaemonUnavailable: no engine answers, the answer is incomplete, or `request.read` raises
            ValueError because the answer does not come from an engine of this version. Other
            exceptions of `request.read` are passed on.
    """
    headers = dict(request.headers)
    if credential is not None:
        headers["authorization"] = f"Bearer {credential}"
    if request.content is not None:
        headers["content-type"] = "application/json"
    try:
        connection = Connection(path)
    except OSError as error:
        from fumehood.client.exchange import not_reached

        raise not_reached(path, error) from None
    connection.limit(request.work_s + ANSWER_GRACE_S)
    try:
        raw = connection.ask(request.method, request.path, headers, request.content or b"").read()
    except (OSError, ValueError) as error:
        from fumehood.client.exchange import no_answer

        raise no_answer(request, path, error) from None
    finally:
        connection.close()
    try:
        return request.read(raw)
    except ValueError:
        from fumehood.client.exchange import no_engine

        raise no_engine(request, path) from None
