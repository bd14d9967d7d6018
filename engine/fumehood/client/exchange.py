"""Rules for requests to an engine: headers, time limits, and whether to send a request again.

Client side. `AsyncTransport` and its generated twin follow these rules. Invariant: a request may be
sent a second time only if it is a GET, which changes nothing, or if the engine cannot have received
the first attempt. The engine cannot have received an attempt whose head was not sent completely.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from fumehood.client.api_request import ApiRequest, DaemonUnavailable
from fumehood.client.once import Connection
from fumehood.protocol.engine_paths import ConfigError, read_engine_paths

T = TypeVar("T")

Write = Callable[[bytes], object]
"""A function that receives the next bytes of an answer."""

BASE_URL = "http://fumehood"
HEAD_FAILED = "http11.send_request_headers.failed"
"""The name of the trace event which reports that a request's head could not be sent. *Source*:
httpcore2's event names."""

NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
DROPPED = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
"""Errors that mean that the server has closed the connection. Timeouts are not among them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an engine, the credential to send, and the limits for connecting and waiting.

    `path` is the path of a Unix socket, or the address of an engine on another machine,
    `https://HOST:PORT`. The client waits for an answer `grace_s` seconds longer than the engine may
    work on the request.
    """

    path: Path | str
    credential: str | None = field(repr=False)
    connect_timeout_s: float
    grace_s: float

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid or missing credential, or an invalid time."""
        credential = self.credential
        if isinstance(self.path, str) and credential is None:
            raise ValueError("An engine on another machine needs a token as credential.")
        if credential is not None and not (
            credential.strip() and credential.isascii() and credential.isprintable()
        ):
            raise ValueError("This is not a credential.")
        for name in ("connect_timeout_s", "grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of seconds over 0.")

    def headers(self, request: ApiRequest[Any]) -> dict[str, str]:
        """Return the headers of one request."""
        headers = dict(request.headers)
        if self.credential is not None:
            headers["authorization"] = f"Bearer {self.credential}"
        if request.content is not None:
            headers["content-type"] = "application/json"
        return headers

    def upload_headers(self, request: ApiRequest[Any], size: int | None) -> dict[str, str]:
        """Return the headers of a request whose body is sent in pieces.

        If `size` is None, the body is sent with chunked encoding.
        """
        headers = {**self.headers(request), "content-type": "application/octet-stream"}
        if size is not None:
            headers["content-length"] = str(size)
        return headers

    def timeout(self, request: ApiRequest[Any]) -> httpx2.Timeout:
        """Return the time limits for the connection and for the answer."""
        return httpx2.Timeout(request.work_s + self.grace_s, connect=self.connect_timeout_s)


def place_of(given: Path | str | None, *, control: bool) -> Path | str:
    """Return `given` (a socket's path, or the address of an engine on another machine) or, if
    `given` is None, the path of the configured socket. `control` selects the control socket.

    Raises:
        ValueError: the address does not begin with `https://`.
        ConfigError: `given` is None, and the configuration is invalid.
    """
    if given is None:
        paths = read_engine_paths(os.environ)
        if paths is None:
            raise ConfigError(
                "The engine's socket cannot be found, because the configuration is wrong: "
                "`fumehood config show` says where. Correct it, or name the socket."
            )
        return paths.control_socket_path if control else paths.socket_path
    if isinstance(given, str) and "://" in given:
        if not given.startswith("https://"):
            raise ValueError("The address of an engine on another machine begins with https://.")
        return given
    return Path(given)


def require_listener(path: Path) -> None:
    """Raise DaemonUnavailable if no process listens on the socket. This function sends no data."""
    try:
        Connection(path).close()
    except OSError as error:
        raise not_reached(path, error) from None


class Progress:
    """Records whether an attempt to send a request failed while the request's head was sent.

    After such a failure, the engine cannot have received the request. After any other failure, the
    engine may have received it.
    """

    def __init__(self) -> None:
        self.did_head_fail = False

    def note(self, event: str, _: Any) -> None:
        """Record the HTTP library's trace event `event` if it reports that the request's head could
        not be sent. Ignore every other event.
        """
        self.did_head_fail = self.did_head_fail or event == HEAD_FAILED

    async def note_async(self, event: str, _: Any) -> None:
        """Do the same as `note`, for the asynchronous HTTP library."""
        self.note(event, _)


def may_send_again(request: ApiRequest[Any], error: httpx2.HTTPError, progress: Progress) -> bool:
    """Return True if a request that failed with `error` may be sent once more.

    A request may be sent again if the server closed the connection, and either the request is a GET
    or the engine cannot have received the request. `progress` is the record of the failed attempt.
    """
    return isinstance(error, DROPPED) and (request.method == "GET" or progress.did_head_fail)


def read_answer(request: ApiRequest[T], raw: bytes, endpoint: Endpoint) -> T:
    try:
        return request.read(raw)
    except ValueError:
        raise no_engine(request, endpoint.path) from None


def no_engine(request: ApiRequest[Any], path: Path | str) -> DaemonUnavailable:
    """Return the error for an answer that does not come from an engine of this version."""
    return DaemonUnavailable(
        f"The server on {path} is not a fumehood engine of this version.",
        may_have_acted=request.method != "GET",
    )


def unavailable(
    request: ApiRequest[Any], endpoint: Endpoint, error: httpx2.HTTPError, progress: Progress
) -> DaemonUnavailable:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return not_reached(endpoint.path, error)
    was_sent = not (isinstance(error, NEVER_SENT) or progress.did_head_fail)
    return no_answer(request, endpoint.path, error, was_sent=was_sent)


def no_answer(
    request: ApiRequest[Any], path: Path | str, error: Exception, *, was_sent: bool = True
) -> DaemonUnavailable:
    """Return the error for a connection on which no complete answer arrived. `error` is the cause.

    If `was_sent` is False, the engine certainly did not receive the request.
    """
    may_have_acted = was_sent and request.method != "GET"
    words = "It is unknown whether the request took effect. " if may_have_acted else ""
    return DaemonUnavailable(
        f"The connection to {path} gave no answer ({type(error).__name__}). {words}"
        "See the engine's log; it may have been stopped, or the server is not a fumehood engine.",
        may_have_acted=may_have_acted,
    )


def not_reached(path: Path | str, error: BaseException) -> DaemonUnavailable:
    if isinstance(path, str):
        return DaemonUnavailable(f"No engine answers on {path}: {error}.")
    if _is_forbidden(error):
        return DaemonUnavailable(
            f"Permission denied: {path}. If the engine is a service, your user must be "
            "in the socket's group; log in again after joining it."
        )
    return DaemonUnavailable(f"No engine answers on {path}. {_how_to_start(path)}")


def _how_to_start(path: Path) -> str:
    """Return advice on how to start an engine with this socket.

    For a service's socket, the advice is to ask an administrator.
    """
    names = path.parts[-2:]
    is_laid_out = names in (("engine", "engine.sock"), ("control", "control.sock"))
    is_system_s = path.is_relative_to("/run") and not path.is_relative_to("/run/user")
    if is_laid_out or is_system_s:
        return (
            "It is the socket of a service, which is not running. Ask the machine's "
            "administrator to start it: systemctl start fumehood"
        )
    return "Start one with: fumehood serve"


def _is_forbidden(error: BaseException) -> bool:
    """Return True if the error or one of its causes is a PermissionError."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PermissionError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
