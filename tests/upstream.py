"""A real HTTP server on loopback that answers as it is told: well, late, brokenly, or not at all.

    with running_upstream() as upstream:
        upstream.script("/orders", Reply(503, headers={"retry-after": "1"}), Reply(200, b"{}"))
        ...
        assert upstream.count("/orders") == 2

Replies to one path are given in their order; the last one is repeated. Without a script a path
answers with an echo of the request. `requests` has everything that arrived.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 1 << 20
WAIT_S = 120
JSON = "application/json"


@dataclass(frozen=True)
class Received:
    """One request, as it arrived."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """One answer. Without other words it is whole, prompt and as long as it says."""

    status: int = 200
    body: bytes = b"{}"
    content_type: str | None = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None
    """The `Content-Length` that it claims, instead of the true one."""
    held: bool = False
    """Nothing is sent until `release` is called or the server ends."""
    held_body: bool = False
    """The head is sent, and the body is held."""
    held_after: int | None = None
    """So many bytes of the body are sent, and the rest is held."""
    drip_s: float | None = None
    """The body, or `raw`, goes out a byte at a time, with this pause between."""
    reset: bool = False
    """The connection is reset in the place of an answer."""
    reset_after: int | None = None
    """The connection is reset after that many bytes of the body."""
    endless: bool = False
    """The body, or `raw`, is sent again and again until the client goes; a body without a `length`
    in chunks."""
    then: bytes = b""
    """Sent behind the answer, in the same packet, though no request asks for it."""
    raw: bytes | None = None
    """Sent in the place of an HTTP answer; then the connection is closed."""


def packed(body: bytes, **more: Any) -> Reply:
    """A reply in gzip."""
    headers = {"content-encoding": "gzip", **more.pop("headers", {})}
    return Reply(body=gzip.compress(body), headers=headers, **more)


def bomb(megabytes: int) -> Reply:
    """A small body in gzip that unpacks to many megabytes of JSON."""
    return packed(b'"' + b"a" * (megabytes << 20) + b'"')


def redirect(location: str, status: int = 302, body: bytes = b"") -> Reply:
    return Reply(status, body, headers={"location": location})


Script = Callable[[Received], Reply]


def echo(request: Received) -> Reply:
    """The request as JSON."""
    told = {
        "method": request.method,
        "target": request.target,
        "headers": dict(request.headers),
        "body": request.body.decode("utf-8", "replace"),
    }
    return Reply(body=b"" if request.method == "HEAD" else json.dumps(told).encode())


class Upstream:
    """The server. Each connection has a thread; all of them end with it."""

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        speaks: bytes | None = None,
        at: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._speaks = speaks
        self._tls = tls
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self.requests: list[Received] = []
        self.connections = 0
        self.closed = 0
        self.answered = 0
        """Requests whose answer was sent to its end, and what follows it."""
        """How many connections their client has left."""
        self.arrived = threading.Condition()
        self._scripts: dict[str, list[Reply | Script]] = {}
        self._released = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self._tls is not None else 'http'}://{self.authority}"

    def script(self, path: str, *replies: Reply | Script) -> None:
        """What a path answers, in order; the last one for good."""
        self._scripts[path] = list(replies)

    def count(self, path: str) -> int:
        """How many requests to a path arrived."""
        return sum(request.path == path for request in self.requests)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something that the server sees has come true."""
        with self.arrived:
            assert self.arrived.wait_for(condition, WAIT_S)

    def push(self, data: bytes) -> None:
        """Send this on every open connection, though no request asks for it."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):  # its client has just left
                connection.sendall(data)

    def release(self) -> None:
        """Let go of what is held."""
        self._released.set()

    def start(self) -> None:
        self._threads[0].start()

    def stop(self) -> None:
        self._released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(
                target=self._serve, args=(connection, self.connections), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket, number: int) -> None:
        self._open.add(raw)
        connection = raw
        with contextlib.suppress(OSError, ssl.SSLError), raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._speaks is not None:
                raw.sendall(self._speaks)
                while raw.recv(4096):
                    pass
            elif self._tls is not None:
                connection = self._tls.wrap_socket(raw, server_side=True)
                self._open.add(connection)
            with connection, connection.makefile("rb") as reader:
                while (request := _read(reader, number)) is not None:
                    with self.arrived:
                        self.requests.append(request)
                        self.arrived.notify_all()
                    goes_on = self._answer(connection, request)
                    with self.arrived:
                        self.answered += 1
                        self.arrived.notify_all()
                    if not goes_on:
                        break
        self._open -= {raw, connection}
        with self.arrived:
            self.closed += 1
            self.arrived.notify_all()

    def _reply_to(self, request: Received) -> Reply:
        replies = self._scripts.get(request.path, [echo])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        return reply if isinstance(reply, Reply) else reply(request)

    def _answer(self, connection: socket.socket, request: Received) -> bool:
        """Whether the connection goes on."""
        reply = self._reply_to(request)
        if reply.held:
            self._wait(connection)
        if reply.reset:
            return _reset(connection)
        if reply.raw is not None:
            self._send(connection, reply, reply.raw)
            return False
        if reply.then:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        connection.sendall(head_of(reply))
        if reply.held_body:
            self._wait(connection)
        if reply.reset_after is not None:
            connection.sendall(reply.body[: reply.reset_after])
            return _reset(connection)
        if reply.held_after is not None:
            connection.sendall(reply.body[: reply.held_after])
            self._wait(connection)
        in_chunks = reply.endless and reply.length is None
        body = reply.body[reply.held_after or 0 :]
        self._send(connection, reply, _chunk(body) if in_chunks else body)
        if reply.then:
            connection.sendall(reply.then)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)
        return reply.length is None or reply.length == len(reply.body)

    def _send(self, connection: socket.socket, reply: Reply, data: bytes) -> None:
        if reply.drip_s is None:
            connection.sendall(data)
            while reply.endless:
                connection.sendall(data)
            return
        for byte in data:
            connection.sendall(bytes([byte]))
            self._released.wait(reply.drip_s)

    def _wait(self, connection: socket.socket) -> None:
        """Until it is released, or the client leaves."""
        connection.settimeout(0.02)
        while not self._released.wait(0.02):
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1, socket.MSG_PEEK):
                    raise OSError
        connection.settimeout(None)


def _read(reader: Any, number: int) -> Received | None:
    line = reader.readline(MAX_HEAD_BYTES)
    if line.count(b" ") != 2:  # the end, or no HTTP
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers: dict[str, str] = {}
    while (line := reader.readline(MAX_HEAD_BYTES)) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    body = reader.read(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body, number)


def head_of(reply: Reply) -> bytes:
    """Status line and headers."""
    length = len(reply.body) if reply.length is None else reply.length
    headers = dict(reply.headers)
    if reply.content_type is not None:
        headers.setdefault("content-type", reply.content_type)
    if reply.endless and reply.length is None:
        headers["transfer-encoding"] = "chunked"
    elif reply.status not in (204, 304):
        headers["content-length"] = str(length)
    rows = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {reply.status} Status\r\n{rows}\r\n".encode("latin-1")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reset(connection: socket.socket) -> bool:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


@contextmanager
def running_upstream(tls: ssl.SSLContext | None = None, **how: Any) -> Iterator[Upstream]:
    """A server that runs. One that `speaks` says this to everybody, and never anything else."""
    upstream = Upstream(tls, **how)
    upstream.start()
    try:
        yield upstream
    finally:
        upstream.stop()
