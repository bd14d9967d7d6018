"""`fumehood mcp`: connects an MCP client's standard input and output to the path `/mcp` of a
daemon.

Client side, in a process that the MCP client starts. It must answer within half a second after its
start, so this module needs only the standard library. The thread that reads a message also answers
it, while another thread reads the next one. Each request has a connection of its own until it is
answered. Idle connections are used again. If no daemon is running, this process answers some
requests itself, and calls fail with the reason. Invariants:

* A request is sent to the daemon only once.
* A request that the client has cancelled gets no response. Its connection is closed, which ends the
  call.
* Only messages are written to standard output.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader, FileIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

from fumehood.client.once import Connection, Response
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.mcp.server.messages import (
    ENVELOPE_KEY,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    OWN_TOOLS,
    TOOLS_CHANGED,
    UNCACHED,
    VERSION_KEY,
    RpcError,
    discovered,
    encode_call,
    encode_result,
    failed,
    handshake_version,
    initialized,
    is_id,
    meta_of,
    read_message,
    stamped,
)
from fumehood.protocol import strict_json

MAX_REQUESTS = 256
"""Maximum number of requests at the same time, including subscriptions. Further requests are
refused.
"""

RESTART_S = 3.0
"""Seconds for which a request waits for a daemon that was reachable before. The daemon may be
restarting.
"""

API_S = 310.0
"""Maximum seconds to wait until the daemon has created or ended a session. All calls wait
meanwhile. This is slightly more than the daemon's time limit for copying a project.
"""

PAUSE_S = 0.1
"""Seconds between two attempts to connect."""

LAST_ANSWERS_S = 1.0
"""Seconds that requests have to finish after the client has closed standard input."""

TOO_LONG = RpcError(INVALID_REQUEST, f"The message is over {MAX_BODY_BYTES >> 20} MB.")
ANSWER = b'{"jsonrpc":"2.0","id":'
"""How every response begins that `messages.py` encodes. No other message begins like this."""

ANSWER_TO_NOBODY = ANSWER + b"null"
"""How a response begins if the id of its request could not be read."""

JSON = {"content-type": "application/json"}

LATER = "later"
"""Stands for the id of the client's own session in all requests except calls. For these, the daemon
does not look the session up; it only matters that there is one.
"""

MISSING = b'"code":"RESOURCE_NOT_FOUND"'
"""Bytes in every answer that says that a session has ended. They also occur in other answers, so
this is only a quick first test.
"""

SESSION_OVER = (
    "RESOURCE_NOT_FOUND: The session has ended; its files and variables are gone. Nothing ran. "
    "Repeat the call: it begins a new session."
)


class Unavailable(Exception):
    """No daemon answers, or the daemon refuses to create a session. The client's request was not
    sent.
    """


@dataclass(eq=False, slots=True)
class _Forwarded:
    """A message from the client that this process forwards to the daemon.

    It is a request, or the client's response to a request from the daemon.
    """

    message: JsonObject
    raw: bytes
    connection: Connection | None = None
    is_cancelled: bool = False
    session: str = ""
    """The id of the client's own session, if this is a call that runs in it. Otherwise ""."""

    @property
    def id(self) -> str | int:
        request_id: str | int = self.message["id"]
        return request_id

    @property
    def method(self) -> str | None:
        """The method of a request, or None for a response."""
        return self.message.get("method")

    @property
    def is_modern(self) -> bool:
        return VERSION_KEY in meta_of(self.message)

    @property
    def key(self) -> tuple[str | int, bool]:
        return self.id, self.method is None


@dataclass(eq=False)
class Bridge:
    """Connects one MCP client to one daemon.

    `path` is the path of the daemon's socket. `query` is added to the URL of each request.
    """

    path: Path
    query: Mapping[str, str]
    has_own_session: bool
    """Whether calls run in a session that belongs to this client alone. The first call creates this
    session.
    """
    reading: BinaryIO
    writing: FileIO
    """The stream to the client. It has no buffer, because a thread could hold the buffer's lock
    when the process ends.
    """
    preset: str | None = None
    """The preset for the client's own session, or None."""
    project: Path | None = None
    """The directory that is copied into the client's own session, or None. Its path contains no
    links.
    """

    _session: str = ""
    """The id of the MCP session, which the daemon has returned for `initialize`. "" if there is
    none.
    """
    _own: str = ""
    """The id of the client's own session in the engine, which keeps files and variables between
    calls. "" while there is none.
    """
    _unsent: bytes = b""
    """An `initialize` that this process has answered without a daemon. It is sent as soon as a
    daemon is reachable. Otherwise empty.
    """
    _was_there: bool = False
    """Whether the last attempt to connect to the daemon succeeded."""
    _all_forwarded: dict[tuple[str | int, bool], _Forwarded] = field(default_factory=dict)
    _idle: list[Connection] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _own_lock: threading.Lock = field(default_factory=threading.Lock)
    _write_lock: threading.Lock = field(default_factory=threading.Lock)
    _read_lock: threading.Lock = field(default_factory=threading.Lock)
    _answering: int = 0
    """Number of responses that are being written."""
    _followers: int = 0
    """Number of threads that wait to read the next message."""
    _listens: bool = False
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Serve the client until it closes standard input. Then cancel the requests that do not
        finish in time.
        """
        self._lines = _lines(self.reading)
        self._add_follower()
        self._over.wait()
        deadline = time.monotonic() + LAST_ANSWERS_S
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._lock:
            for forwarded in list(self._all_forwarded.values()):
                self._cancel(forwarded.id)

    def close(self) -> None:
        """End the client's own session in the engine, if there is one. Raises Unavailable."""
        with self._own_lock:
            if self._own:
                ask_daemon(self.path, "DELETE", f"/v1/sessions/{self._own}")

    def _is_busy(self) -> bool:
        with self._lock:
            calls = (f.method != "subscriptions/listen" for f in self._all_forwarded.values())
            return self._answering > 0 or any(calls)

    def _add_follower(self) -> None:
        self._followers += 1
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._read_lock:
                forwarded = None if self._over.is_set() else self._next_forwarded()
                if forwarded is None:
                    self._over.set()
                    return
                with self._lock:
                    self._followers -= 1
                    if not self._followers:
                        self._add_follower()
            try:
                self._exchange(forwarded)
            except Exception as error:  # whatever happens on the socket, the client gets a response
                self._fail(forwarded, error)
            with self._lock:
                # Meanwhile, a later request may have the same id.
                if self._all_forwarded.get(forwarded.key) is forwarded:
                    del self._all_forwarded[forwarded.key]
                self._followers += 1

    # -- messages from the client ---------------------------------------------------------

    def _next_forwarded(self) -> _Forwarded | None:
        """Read messages until one of them must be forwarded to the daemon, and return it. Messages
        that need no daemon are processed here.

        Return None at the end of the input.
        """
        for line in self._lines:
            try:
                if line is None:
                    raise TOO_LONG
                raw = line.strip()
                message = read_message(raw) if raw else {}
            except RpcError as error:
                self._write(error.encode(None))
                continue
            if "id" not in message:
                self._take(message)
            elif self._enter(forwarded := _Forwarded(message, raw)):
                return forwarded
        return None

    def _take(self, notification: JsonObject) -> None:
        method = notification.get("method")
        if method == "notifications/cancelled":
            request_id = notification.get("params", {}).get("requestId")
            if is_id(request_id):
                self._cancel(request_id)
        elif method == "notifications/initialized" and not self._listens:
            self._listens = True
            threading.Thread(target=self._listen, daemon=True).start()

    def _enter(self, forwarded: _Forwarded) -> bool:
        fault = ""
        with self._lock:
            if forwarded.key in self._all_forwarded:
                fault = "A request with this id is not answered yet."
            elif len(self._all_forwarded) >= MAX_REQUESTS:
                fault = f"There are already {MAX_REQUESTS} requests. Send fewer at a time."
            else:
                self._all_forwarded[forwarded.key] = forwarded
        if fault and forwarded.method is not None:
            self._write(RpcError(INVALID_REQUEST, fault).encode(forwarded.id))
        return not fault

    def _cancel(self, request_id: str | int) -> None:
        with self._lock:
            forwarded = self._all_forwarded.pop((request_id, False), None)
            if forwarded is not None:
                forwarded.is_cancelled = True
                if forwarded.connection is not None:
                    forwarded.connection.abort()

    # -- one exchange --------------------------------------------------------------------

    def _exchange(self, forwarded: _Forwarded) -> None:
        """Forward a message to the daemon, and write the daemon's answer to the client.

        Raises:
            Unavailable: no daemon answers.
            OSError, ValueError: the connection broke off, or the answer is invalid.
        """
        if self.has_own_session and forwarded.method == "tools/call":
            forwarded.session = self._own_session()
        address = self._address(forwarded.session if forwarded.method == "tools/call" else LATER)
        connection = self._connection()
        with self._lock:
            forwarded.connection = connection
            if forwarded.is_cancelled:
                connection.abort()
        try:
            if self._unsent and forwarded.method != "initialize":
                self._initialize(connection)
            response = connection.ask("POST", address, self._headers(forwarded), forwarded.raw)
            if forwarded.method == "initialize":
                self._session = response.headers.get("mcp-session-id", "")
            if response.is_stream:
                self._pass_on(response, forwarded)
            else:
                body = response.read()
                is_own = body.startswith(ANSWER) and not body.startswith(ANSWER_TO_NOBODY)
                self._answer(forwarded, body if is_own else _refused(forwarded, body))
        except BaseException:
            connection.close()
            raise
        with self._lock:
            forwarded.connection = None
        self._keep(connection)

    def _address(self, session: str) -> str:
        own = {"session_id": session} if self.has_own_session and session else {}
        options = {**self.query, **own}
        return f"/mcp?{urlencode(options)}" if options else "/mcp"

    def _own_session(self) -> str:
        """Return the id of the session in the engine that only this client uses. Create the session
        if there is none.

        If the engine has no containers, return "", so that calls run without a session. If a preset
        or a project was given, raise Unavailable instead, because calls without a session would
        ignore the preset and the project.

        Raises:
            Unavailable: no daemon answers, or the daemon refuses to create a session.
        """
        with self._own_lock:
            if not self._own:
                self._keep(self._connection())  # waits for a daemon that is restarting
                made = self._created()
                error = made["error"]
                is_described = self.preset is not None or self.project is not None
                if error is None:
                    self._own = made["data"]["session"]["id"]
                elif is_described or error["code"] != "SANDBOX_UNAVAILABLE":
                    raise Unavailable(f"{error['code']}: {error['message']}")
                # Without containers, each call that needs one reports this by itself.
            return self._own

    def _created(self) -> JsonObject:
        """Ask the daemon to create a session, and return its answer. Raises Unavailable."""
        wanted = {"agent_id": self.query.get("agent_id"), "preset": self.preset}
        body = {name: value for name, value in wanted.items() if value is not None}
        if self.project is None:
            return ask_daemon(self.path, "POST", "/v1/sessions", body)
        claimed = ask_daemon(self.path, "POST", "/v1/projects", {"directory": str(self.project)})
        if claimed["error"] is not None:
            return claimed
        from fumehood.client.files import proof

        project = claimed["data"]["project"]
        try:
            with proof(self.project, project["proof"]):
                body["project"] = project["id"]
                return ask_daemon(self.path, "POST", "/v1/sessions", body)
        except OSError as error:
            raise Unavailable(f"{self.project} cannot be used: {error.strerror}.") from None

    def _initialize(self, connection: Connection) -> None:
        """Send the client's `initialize` request to the daemon. It was not sent before, because
        this process answered it while no daemon was running.
        """
        response = connection.ask("POST", self._address(LATER), JSON, self._unsent)
        self._session = response.headers.get("mcp-session-id", "")
        self._unsent = b""
        response.read()

    def _pass_on(self, response: Response, forwarded: _Forwarded) -> None:
        """Write each event in the stream `response` to the client as it arrives. `forwarded` is the
        request that the daemon answers with this stream.

        Raises:
            ConnectionError: the stream ended without the answer to the request.
        """
        is_answered = False
        for event in response.events():
            is_answered = event.startswith(ANSWER)
            if is_answered:
                self._answer(forwarded, event)
            elif not forwarded.is_cancelled:
                self._write(event)
        if not is_answered:
            raise ConnectionError("no response among the events")

    def _answer(self, forwarded: _Forwarded, answer: bytes) -> None:
        """Write the response to a request. From now on, the client may use the id of the request
        again.
        """
        if forwarded.session and MISSING in answer and is_without_session(answer):
            with self._own_lock:  # the next call creates another one
                if self._own == forwarded.session:
                    self._own = ""
            answer = _result(forwarded, failed(SESSION_OVER))
        with self._lock:
            if forwarded.is_cancelled or forwarded.method is None:
                return
            self._all_forwarded.pop(forwarded.key, None)
            self._answering += 1
        try:
            self._write(answer)
        finally:
            with self._lock:
                self._answering -= 1

    def _fail(self, forwarded: _Forwarded, error: Exception) -> None:
        words = "The connection to the engine broke off before the answer."
        if isinstance(error, Unavailable):
            words = str(error)
            if forwarded.method == "initialize":
                self._unsent = forwarded.raw
            alone = _answer_alone(forwarded, words)
            if alone is not None:
                self._answer(forwarded, _result(forwarded, alone))
                return
        elif forwarded.method == "tools/call":
            words += " It is unknown whether the call took effect: look before you repeat it."
        self._answer(forwarded, RpcError(INTERNAL_ERROR, words).encode(forwarded.id))

    def _headers(self, forwarded: _Forwarded) -> Mapping[str, str]:
        if forwarded.is_modern or not self._session:
            return JSON
        return {**JSON, "mcp-session-id": self._session}

    def _connection(self) -> Connection:
        """Return an idle connection to the daemon, or a new one.

        If the daemon was reachable before, try for `RESTART_S` seconds to connect.

        Raises:
            Unavailable: no daemon answers in time.
        """
        with self._lock:
            kept = self._idle.pop() if self._idle else None
        if kept is not None:
            if kept.is_open():
                return kept
            kept.close()
        deadline = time.monotonic() + (RESTART_S if self._was_there else 0)
        while True:
            try:
                made = Connection(self.path)
                self._was_there = True
                return made
            except OSError as error:
                if time.monotonic() > deadline or isinstance(error, PermissionError):
                    self._was_there = False
                    raise Unavailable(not_reached(self.path, error)) from None
            time.sleep(PAUSE_S)

    def _keep(self, connection: Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    # -- notifications of changes ----------------------------------------------------------

    def _listen(self) -> None:
        """Forward the notifications that the daemon sends without a request.

        After each new connection, notify the client that the list of tools may have changed.
        """
        has_followed = bool(self._unsent)
        while True:
            with suppress(OSError, ValueError):
                headers = {"mcp-session-id": self._session} if self._session else {}
                response = Connection(self.path).ask("GET", self._address(LATER), headers)
                if has_followed:
                    self._write(encode_call(TOOLS_CHANGED))
                has_followed = response.is_stream
                for event in response.events() if has_followed else ():
                    self._write(event)
            time.sleep(RESTART_S / 2)

    def _write(self, message: bytes) -> None:
        rest = memoryview(message + b"\n")
        with self._write_lock, suppress(OSError):  # the client may have closed the stream
            while rest:
                rest = rest[self.writing.write(rest) :]


def serve(
    path: Path,
    query: Mapping[str, str],
    *,
    has_own_session: bool = False,
    preset: str | None = None,
    project: Path | None = None,
) -> None:
    """Serve the MCP client on the standard input and output of this process.

    `path` is the path of the daemon's socket. `query` is added to the URL of each request. If
    `has_own_session` is True, calls run in a session that is created for this client, from `preset`
    and `project`.

    Raises:
        Unavailable: the client's own session could not be ended.
    """
    # `sys.stdin` is not used, because the interpreter cannot exit cleanly while a thread reads it.
    reading = BufferedReader(FileIO(sys.stdin.fileno(), closefd=False))
    with FileIO(sys.stdout.fileno(), "w", closefd=False) as writing:
        bridge = Bridge(path, query, has_own_session, reading, writing, preset, project)
        try:
            bridge.run()
        finally:
            bridge.close()


def ask_daemon(path: Path, method: str, address: str, body: JsonObject | None = None) -> JsonObject:
    """Send one request to the HTTP API of the daemon, and return the envelope of the answer. `path`
    is the path of the daemon's socket.

    Raises:
        Unavailable: no daemon answers.
    """
    content = b"" if body is None else strict_json.dumps(body)
    try:
        connection = Connection(path)
        try:
            connection.limit(API_S)
            answer = connection.ask(method, address, JSON if content else {}, content).read()
        finally:
            connection.close()
        envelope: JsonObject = strict_json.loads(answer)
        return envelope
    except (OSError, ValueError) as error:
        raise Unavailable(not_reached(path, error)) from None


def not_reached(path: Path, error: Exception) -> str:
    """Return a message that says why no engine answers on the socket `path`, and what to do."""
    if isinstance(error, PermissionError):
        return f"Permission denied: {path}. Your user must be in the socket's group."
    return f"No engine answers on {path}. Start one with: fumehood serve"


def _answer_alone(forwarded: _Forwarded, words: str) -> JsonObject | None:
    """Return the result with which this process itself answers a request, because no daemon
    answers. `words` is the reason for this.

    Return None if the request needs a daemon.
    """
    if forwarded.method == "initialize":
        wanted = forwarded.message.get("params", {}).get("protocolVersion")
        return initialized(handshake_version(wanted))
    results = {
        "ping": {},
        "server/discover": discovered(),
        "tools/list": {"tools": OWN_TOOLS, **(UNCACHED if forwarded.is_modern else {})},
        "tools/call": failed(words),
    }
    return results.get(forwarded.method or "")


def _result(forwarded: _Forwarded, result: JsonObject) -> bytes:
    shown = stamped(result) if forwarded.is_modern else result
    return encode_result(forwarded.id, strict_json.dumps(shown))


def is_without_session(answer: bytes) -> bool:
    """Return whether an answer says that the session had already ended, so that the call did not
    run.
    """
    try:
        error = strict_json.loads(answer)["result"]["_meta"][ENVELOPE_KEY]["error"]
        return (error["code"], error["fields"]) == ("RESOURCE_NOT_FOUND", ["session_id"])
    except (ValueError, LookupError, TypeError):  # also a result that is nested too deeply
        return False


def _lines(reading: BinaryIO) -> Iterator[bytes | None]:
    """Yield each line of the input. If a line is over `MAX_BODY_BYTES`, discard it and yield
    None.
    """
    while line := reading.readline(MAX_BODY_BYTES + 1):
        if len(line) <= MAX_BODY_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = reading.readline(1 << 16)
        yield None


def _refused(forwarded: _Forwarded, body: bytes) -> bytes:
    """Return the response to a request that the daemon refused before it read the message. `body`
    is the daemon's answer: an envelope, or an error without an id.
    """
    try:
        error = strict_json.loads(body)["error"]
        is_message = body.startswith(ANSWER)
        words = error["message"] if is_message else f"{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        words = "The server on the socket is not an engine of this version."
    return RpcError(INTERNAL_ERROR, words).encode(forwarded.id)
