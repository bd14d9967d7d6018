"""`fumehood mcp`: a client's standard input and output on one side, a daemon's `/mcp` on the other.

Client side, in a process of its own, which must answer within half a second of its start: the
standard library is all that it needs. Each request has a thread and a connection of its own while
it is answered; connections are kept and used again. Invariants: a request is sent a second time
only where the daemon cannot have acted on it; a request that the client has cancelled has no
response, and its connection is closed, which ends the call; nothing but messages is written.
"""

from __future__ import annotations

import base64
import http.client
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO
from urllib.parse import urlencode

from fumehood.core.json_types import JsonObject
from fumehood.mcp.messages import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    MAX_MESSAGE_BYTES,
    NAMED_BY,
    TOOLS_CHANGED,
    VERSION_KEY,
    RpcError,
    encode_call,
    meta_of,
    read_message,
)
from fumehood.protocol import strict_json

MAX_REQUESTS = 64
"""Requests at once, subscriptions included."""

CONNECT_S = 5.0
RESTART_S = 3.0
"""How long a daemon that has gone is waited for, before a request fails."""

PAUSE_S = 0.1
"""Between two attempts to connect."""

LAST_ANSWERS_S = 1.0
"""How long the requests of a client that has closed its output may still be answered."""

TOO_LONG = RpcError(INVALID_REQUEST, f"The message is over {MAX_MESSAGE_BYTES >> 20} MB.")
ANSWER = b'{"jsonrpc":"2.0","id":'
"""How `messages.py` begins a response, and nothing else."""

ANSWER_TO_NOBODY = ANSWER + b"null"

READS = frozenset({"initialize", "ping", "server/discover", "tools/list", "resources/read"})
"""Requests that may be sent twice."""

HEADERS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
PRINTABLE = range(0x20, 0x7F)


class Unavailable(Exception):
    """No daemon answers; nothing was sent."""


@dataclass(eq=False, slots=True)
class _Flight:
    """One request that is being answered."""

    id: str | int
    message: JsonObject
    raw: bytes
    connection: _Connection | None = None
    is_cancelled: bool = False


class _Connection(http.client.HTTPConnection):
    """To a daemon's socket. The head of a request and its body leave in one piece."""

    def __init__(self, path: Path) -> None:
        super().__init__("fumehood")
        self._path = path
        self.is_used = False
        """Whether a request was answered before."""

    def connect(self) -> None:
        """Connect to the socket. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(None)  # a call may wait for a human

    def is_open(self) -> bool:
        """Whether the daemon has neither closed it nor sent what nobody asked for."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close it for the daemon, and for the thread that reads from it."""
        with suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class Bridge:
    """One client and one daemon. `address` is the daemon's with the options of all requests."""

    path: Path
    address: str
    output: FileIO
    """Not buffered: a thread could hold the buffer when the process ends."""
    _session: str = ""
    _flights: dict[str | int, _Flight] = field(default_factory=dict)
    _idle: list[_Connection] = field(default_factory=list)
    _free: int = 0
    """Threads that wait for a request."""
    _waiting: SimpleQueue[_Flight] = field(default_factory=SimpleQueue)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _listener: threading.Thread | None = None

    def run(self, reading: BinaryIO) -> None:
        """Serve the client until it closes its output. Then what still runs is ended."""
        for line in _lines(reading):
            try:
                if line is None:
                    raise TOO_LONG
                if line.strip():
                    self._take(read_message(line), line.strip())
            except RpcError as error:
                self._write(error.encode(None))
        deadline = time.monotonic() + LAST_ANSWERS_S
        while self._has_calls() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for request_id in list(self._flights):
                self._cancel(request_id)

    def _has_calls(self) -> bool:
        with self._lock:
            return any(
                f.message["method"] != "subscriptions/listen" for f in self._flights.values()
            )

    def _take(self, message: JsonObject, raw: bytes) -> None:
        method = message.get("method")
        if method is None:
            self._start(_Flight("", message, raw))  # the answer to a question of the daemon's
        elif "id" in message:
            self._begin(_Flight(message["id"], message, raw))
        elif method == "notifications/cancelled":
            request_id = message.get("params", {}).get("requestId")
            if isinstance(request_id, str | int):
                with self._lock:
                    self._cancel(request_id)
        elif method == "notifications/initialized" and self._listener is None:
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()

    def _begin(self, flight: _Flight) -> None:
        with self._lock:
            fault = ""
            if flight.id in self._flights:
                fault = "A request with this id is not answered yet."
            elif len(self._flights) >= MAX_REQUESTS:
                fault = f"There are already {MAX_REQUESTS} requests. Send fewer at a time."
            else:
                self._flights[flight.id] = flight
        if fault:
            self._write(RpcError(INVALID_REQUEST, fault).encode(flight.id))
        else:
            self._start(flight)

    def _start(self, flight: _Flight) -> None:
        """Hand it to a thread that has nothing to do, or to a new one."""
        with self._lock:
            has_thread = self._free > 0
            self._free -= has_thread
        self._waiting.put(flight)
        if not has_thread:
            threading.Thread(target=self._work, daemon=True).start()

    def _cancel(self, request_id: str | int) -> None:
        flight = self._flights.pop(request_id, None)
        if flight is not None:
            flight.is_cancelled = True
            if flight.connection is not None:
                flight.connection.abort()

    def _work(self) -> None:
        while True:
            flight = self._waiting.get()
            try:
                self._exchange(flight)
            except (OSError, http.client.HTTPException, Unavailable) as error:
                self._fail(flight, error)
            with self._lock:
                self._flights.pop(flight.id, None)
                self._free += 1

    def _fail(self, flight: _Flight, error: Exception) -> None:
        if flight.is_cancelled or "method" not in flight.message:
            return
        if isinstance(error, Unavailable):
            words = str(error)
        else:
            words = "The connection to the engine broke off before the answer."
            if flight.message["method"] == "tools/call":
                words += " It is unknown whether the call took effect: look before you repeat it."
        self._answer(flight, RpcError(INTERNAL_ERROR, words).encode(flight.id))

    # -- one exchange --------------------------------------------------------------------

    def _exchange(self, flight: _Flight) -> None:
        """Send a request and write what comes. Raises OSError, HTTPException, Unavailable."""
        try:
            self._exchange_once(flight)
        except (OSError, http.client.HTTPException):
            connection = flight.connection
            if connection is not None:
                connection.close()
            is_stale = connection is not None and connection.is_used
            if flight.is_cancelled or not is_stale or flight.message.get("method") not in READS:
                raise
            self._exchange_once(flight)

    def _exchange_once(self, flight: _Flight) -> None:
        with self._lock:
            if flight.is_cancelled:
                return
            connection = flight.connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.is_open():
            connection = self._connected()
            with self._lock:
                flight.connection = connection
                if flight.is_cancelled:
                    connection.abort()
        response = self._send(connection, "POST", flight.raw, self._headers_of(flight.message))
        if flight.message.get("method") == "initialize":
            self._session = response.getheader("mcp-session-id", "")
        if _is(response, "text/event-stream"):
            self._pass_on(response, flight)
        else:
            body = response.read()
            if "method" in flight.message:
                is_own = body.startswith(ANSWER) and not body.startswith(ANSWER_TO_NOBODY)
                self._answer(flight, body if is_own else _refused(flight, body))
        connection.is_used = True
        with self._lock:
            flight.connection = None
            self._idle.append(connection)

    def _pass_on(self, response: http.client.HTTPResponse, flight: _Flight) -> None:
        """Write each event as it comes; one of them is the response."""
        is_answered = False
        for event in _events(response):
            is_answered = event.startswith(ANSWER)
            if is_answered:
                self._answer(flight, event)
            elif not flight.is_cancelled:
                self._write(event)
        if not is_answered:
            raise http.client.IncompleteRead(b"")

    def _answer(self, flight: _Flight, answer: bytes) -> None:
        """Write the response; no other request can have this id before."""
        with self._lock:
            if flight.is_cancelled:
                return
            self._flights.pop(flight.id, None)
        self._write(answer)

    def _send(
        self, connection: _Connection, method: str, body: bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection.request(method, self.address, body, headers)
        return connection.getresponse()

    def _connected(self) -> _Connection:
        """A new connection; a daemon that starts again is waited for. Raises Unavailable."""
        deadline = time.monotonic() + RESTART_S
        while True:
            connection = _Connection(self.path)
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline or isinstance(error, PermissionError):
                    raise Unavailable(not_reached(self.path, error)) from None
                time.sleep(PAUSE_S)
            else:
                return connection

    def _headers_of(self, message: JsonObject) -> dict[str, str]:
        version, method = meta_of(message).get(VERSION_KEY), message.get("method", "")
        if version is None:
            return self._session_headers()
        told = {"mcp-protocol-version": str(version), "mcp-method": method}
        name = message["params"].get(NAMED_BY.get(method, ""))
        if isinstance(name, str):
            told["mcp-name"] = name
        return {**HEADERS, **{key: _header_text(value) for key, value in told.items()}}

    def _session_headers(self) -> dict[str, str]:
        session = self._session
        if not session:
            return HEADERS
        version = session.partition(".")[0]
        return {**HEADERS, "mcp-session-id": session, "mcp-protocol-version": version}

    # -- changes of the list -------------------------------------------------------------

    def _listen(self) -> None:
        """Pass on what the daemon says by itself; after a restart the list may be another."""
        has_followed = False
        while True:
            connection = _Connection(self.path)
            with suppress(OSError, http.client.HTTPException):
                connection.connect()
                response = self._send(connection, "GET", None, self._session_headers())
                if has_followed:
                    self._write(encode_call(TOOLS_CHANGED))
                has_followed = _is(response, "text/event-stream")
                for event in _events(response):
                    self._write(event)
            connection.close()
            time.sleep(RESTART_S / 2)

    def _write(self, message: bytes) -> None:
        rest = memoryview(message + b"\n")
        with self._writing, suppress(OSError):  # a client that has gone reads nothing
            while rest:
                rest = rest[self.output.write(rest) :]


def ask_daemon(path: Path, method: str, address: str, body: JsonObject | None = None) -> JsonObject:
    """One request to the daemon's own API, and the envelope that answers it.

    Raises:
        Unavailable: no daemon answers.
    """
    connection = _Connection(path)
    content = None if body is None else strict_json.dumps(body)
    try:
        connection.request(method, address, content, HEADERS if content else {})
        envelope: JsonObject = strict_json.loads(connection.getresponse().read())
        return envelope
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(not_reached(path, error)) from None
    finally:
        connection.close()


def not_reached(path: Path, error: Exception) -> str:
    """Why there is no engine, and what to do."""
    if isinstance(error, PermissionError):
        return f"Permission denied: {path}. Your user must be in the socket's group."
    return f"No engine answers on {path}. Start one with: fumehood serve"


def _lines(reading: BinaryIO) -> Iterator[bytes | None]:
    """Each line, None for one that is too long, of which little is kept."""
    while line := reading.readline(MAX_MESSAGE_BYTES + 1):
        if len(line) <= MAX_MESSAGE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = reading.readline(1 << 16)
        yield None


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of each event; the daemon writes it on one line."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].rstrip(b"\n")


def _is(response: http.client.HTTPResponse, media_type: str) -> bool:
    return response.getheader("content-type", "").partition(";")[0] == media_type


def _refused(flight: _Flight, body: bytes) -> bytes:
    """The response to a request that the daemon refused before it was a message."""
    try:
        error = strict_json.loads(body)["error"]
        is_message = body.startswith(ANSWER)
        words = error["message"] if is_message else f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        words = "The server on the socket is not an engine of this version."
    return RpcError(INTERNAL_ERROR, words).encode(flight.id)


def _header_text(text: str) -> str:
    """*Source*: streamable HTTP from 2026-07-28 on: other text than ASCII in base64."""
    if text == text.strip() and all(ord(c) in PRINTABLE for c in text):
        return text
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


def serve(path: Path, query: dict[str, str]) -> None:
    """Serve the client of this process's standard input and output."""
    address = f"/mcp?{urlencode(query)}" if query else "/mcp"
    with FileIO(sys.stdout.fileno(), "w", closefd=False) as output:
        Bridge(path, address, output).run(sys.stdin.buffer)
