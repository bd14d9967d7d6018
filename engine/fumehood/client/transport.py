"""From an `ApiRequest` to its answer over one Unix socket: time limits, and when to send again.

Client side, the only place that knows HTTP. A connection is kept and used again; the daemon
may have closed it meanwhile. Invariant: a request is sent a second time only where the first
cannot have been received (its head is known not to have been sent whole), or where it is a
GET, which changes nothing; never a third time.
"""

from __future__ import annotations

import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import httpx2

from fumehood.client.api_request import ANSWER_GRACE_S as ANSWER_GRACE_S
from fumehood.client.api_request import CONNECT_TIMEOUT_S as CONNECT_TIMEOUT_S
from fumehood.client.api_request import ApiRequest
from fumehood.client.errors import DaemonUnavailable
from fumehood.core.events import ErrorEvent, Event, ResultEvent, event_of
from fumehood.protocol import sse, strict_json

T = TypeVar("T")
R = TypeVar("R")

Write = Callable[[bytes], object]
"""Takes the next bytes of an answer."""

BASE_URL = "http://fumehood"
HEAD_FAILED = "http11.send_request_headers.failed"
"""*Source*: the names of httpcore2's trace events."""

NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
DROPPED = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)
"""What a connection says that the other side has closed. Timeouts are not among them."""

CHANGES_NOTHING = frozenset({"GET"})
"""Methods of requests that may arrive twice."""

BROKEN_OFF = (
    "The events of the call ended before its answer. See the engine's log and the call log."
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A socket, the credential to send there, and how long to wait."""

    path: Path
    credential: str | None = field(repr=False)
    connect_timeout_s: float
    grace_s: float

    def __post_init__(self) -> None:
        """Refuse what could not be sent, and times that would never end or begin."""
        credential = self.credential
        if credential is not None and not (credential.isascii() and credential.isprintable()):
            raise ValueError("That is no credential.")
        for name in ("connect_timeout_s", "grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number of seconds over 0.")

    def headers(self, request: ApiRequest[Any]) -> dict[str, str]:
        """Those of one request."""
        headers = dict(request.headers)
        if self.credential is not None:
            headers["authorization"] = f"Bearer {self.credential}"
        if request.content is not None:
            headers["content-type"] = "application/json"
        return headers

    def upload_headers(self, request: ApiRequest[Any], size: int | None) -> dict[str, str]:
        """Those of a body that is sent in pieces; without a size it is sent in chunks."""
        headers = {**self.headers(request), "content-type": "application/octet-stream"}
        if size is not None:
            headers["content-length"] = str(size)
        return headers

    def timeout(self, request: ApiRequest[Any]) -> httpx2.Timeout:
        """How long to wait for the connection, and for the answer."""
        return httpx2.Timeout(request.work_s + self.grace_s, connect=self.connect_timeout_s)


def found_socket(*, control: bool) -> Path:
    """The callers' socket, or the control socket, of this environment and configuration.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from fumehood.protocol.sockets import (
        find_sockets,  # reads settings; most clients are told a path
    )

    found = find_sockets()
    return found.control_socket_path if control else found.socket_path


def require_listener(path: Path) -> None:
    """Raise DaemonUnavailable where nothing listens on the socket. Nothing is sent."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except OSError as error:
            raise _not_reached(path, error) from None


class Progress:
    """How far one attempt came, told by the HTTP library while it sends.

    Only what is told counts: from silence it follows that the request may have arrived.
    """

    def __init__(self) -> None:
        self.did_head_fail = False

    def note(self, event: str, _: Any) -> None:
        """Take one event of the library's."""
        self.did_head_fail = self.did_head_fail or event == HEAD_FAILED

    async def note_async(self, event: str, _: Any) -> None:
        """The same, as the asynchronous library calls it."""
        self.note(event, _)


def may_send_again(request: ApiRequest[Any], error: httpx2.HTTPError, progress: Progress) -> bool:
    """Whether a failed request may be sent once more."""
    return isinstance(error, DROPPED) and (
        request.method in CHANGES_NOTHING or progress.did_head_fail
    )


def is_followed(headers: Mapping[str, str]) -> bool:
    """Whether an answer is events, and not an envelope."""
    return headers.get("content-type", "").partition(";")[0].strip() == sse.MEDIA_TYPE


class Following:
    """One stream. `feed` gives the events that some bytes completed."""

    def __init__(self) -> None:
        self.is_over = False
        """The answer was among them; nothing comes after it."""
        self._decoder = sse.Decoder()

    def feed(self, chunk: bytes) -> list[Event]:
        """Raises ValueError where it is no engine that speaks."""
        events = []
        for frame in self._decoder.feed(chunk):
            event = event_of(frame.kind, frame.id, strict_json.loads(frame.data))
            if event is not None:
                events.append(event)
                self.is_over = isinstance(event, ResultEvent | ErrorEvent)
        return events

    def finish(self, request: ApiRequest[Event]) -> None:
        """The bytes have ended. Raises DaemonUnavailable where the answer is missing."""
        if not self.is_over:
            raise DaemonUnavailable(f"{BROKEN_OFF} {request.path}", may_have_acted=True)


class BlockingTransport:
    """Sends and waits. May be used by several threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        transport = httpx2.HTTPTransport(uds=str(endpoint.path))
        self._http = httpx2.Client(transport=transport, base_url=BASE_URL)

    def send(self, request: ApiRequest[T]) -> T:
        """The answer to one request. Raises DaemonUnavailable, and what `request.read` raises."""
        return _read(request, self._exchange(request), self._endpoint)

    def send_all(self, requests: Generator[ApiRequest[T], T, R]) -> R:
        """Send what is asked for until it has come to its result."""
        try:
            request = next(requests)
            while True:
                request = requests.send(self.send(request))
        except StopIteration as end:
            result: R = end.value
            return result

    def download(self, request: ApiRequest[None], write: Write) -> None:
        """Hand the bytes of an answer to `write` as they come.

        A request that fails before the first of them is sent once more, as `send` does.

        Raises:
            DaemonUnavailable: nobody answers, or the bytes ended before their end.
            Refused: from `request.read`, where the engine says no instead.
        """
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                with self._http.stream(
                    request.method,
                    request.path,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ) as answer:
                    if not answer.is_success:
                        return _read(request, answer.read(), self._endpoint)
                    for chunk in answer.iter_bytes():
                        has_begun = True
                        write(chunk)
                    return None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or has_begun or not may_send_again(request, error, progress):
                    break
        raise failed

    def upload(self, request: ApiRequest[T], chunks: Iterator[bytes], size: int | None) -> T:
        """Send a body in pieces. It is sent once: its pieces are gone with it.

        Raises:
            DaemonUnavailable: nobody answers, or not to the end.
        """
        progress = Progress()
        try:
            raw = self._http.request(
                request.method,
                request.path,
                content=chunks,
                headers=self._endpoint.upload_headers(request, size),
                timeout=self._endpoint.timeout(request),
                extensions={"trace": progress.note},
            ).content
        except httpx2.HTTPError as error:
            failed = _unavailable(request, self._endpoint, error, progress)
        else:
            return _read(request, raw, self._endpoint)
        raise failed

    def follow(self, request: ApiRequest[Event]) -> Iterator[Event]:
        """The events of a call as they come. Closing the iterator closes the connection.

        Raises:
            DaemonUnavailable: nobody answers, or the events ended before the answer.
        """
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                with self._http.stream(
                    request.method,
                    request.path,
                    content=request.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ) as answer:
                    has_begun = True
                    if not is_followed(answer.headers):
                        yield _read(request, answer.read(), self._endpoint)
                        return
                    following = Following()
                    for chunk in answer.iter_raw():
                        yield from _events(following, chunk, request, self._endpoint)
                    return following.finish(request)
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or has_begun or not may_send_again(request, error, progress):
                    break
        raise failed

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def _exchange(self, request: ApiRequest[Any]) -> bytes:
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress = Progress()
            try:
                return self._http.request(
                    request.method,
                    request.path,
                    content=request.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ).content
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or not may_send_again(request, error, progress):
                    break
        # Outside the handler: the library's error, with all that hangs on it, is gone by now.
        raise failed


class AwaitingTransport:
    """The same for one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        transport = httpx2.AsyncHTTPTransport(uds=str(endpoint.path))
        self._http = httpx2.AsyncClient(transport=transport, base_url=BASE_URL)

    async def send(self, request: ApiRequest[T]) -> T:
        """The answer to one request. Raises DaemonUnavailable, and what `request.read` raises."""
        return _read(request, await self._exchange(request), self._endpoint)

    async def send_all(self, requests: Generator[ApiRequest[T], T, R]) -> R:
        """Send what is asked for until it has come to its result."""
        try:
            request = next(requests)
            while True:
                request = requests.send(await self.send(request))
        except StopIteration as end:
            result: R = end.value
            return result

    async def download(self, request: ApiRequest[None], write: Write) -> None:
        """Hand the bytes of an answer to `write` as they come. Raises as the other one."""
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                async with self._http.stream(
                    request.method,
                    request.path,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                ) as answer:
                    if not answer.is_success:
                        return _read(request, await answer.aread(), self._endpoint)
                    async for chunk in answer.aiter_bytes():
                        has_begun = True
                        write(chunk)
                    return None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or has_begun or not may_send_again(request, error, progress):
                    break
        raise failed

    async def upload(self, request: ApiRequest[T], chunks: Iterator[bytes], size: int | None) -> T:
        """Send a body in pieces, each read in a thread. Raises as the other one."""
        progress = Progress()
        try:
            answer = await self._http.request(
                request.method,
                request.path,
                content=_in_threads(chunks),
                headers=self._endpoint.upload_headers(request, size),
                timeout=self._endpoint.timeout(request),
                extensions={"trace": progress.note_async},
            )
        except httpx2.HTTPError as error:
            failed = _unavailable(request, self._endpoint, error, progress)
        else:
            return _read(request, answer.content, self._endpoint)
        raise failed

    async def follow(self, request: ApiRequest[Event]) -> AsyncGenerator[Event, None]:
        """The events of a call as they come. Raises as the other one."""
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                async with self._http.stream(
                    request.method,
                    request.path,
                    content=request.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                ) as answer:
                    has_begun = True
                    if not is_followed(answer.headers):
                        yield _read(request, await answer.aread(), self._endpoint)
                        return
                    following = Following()
                    async for chunk in answer.aiter_raw():
                        for event in _events(following, chunk, request, self._endpoint):
                            yield event
                    following.finish(request)
                    return
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or has_begun or not may_send_again(request, error, progress):
                    break
        raise failed

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _exchange(self, request: ApiRequest[Any]) -> bytes:
        headers, timeout = self._endpoint.headers(request), self._endpoint.timeout(request)
        for is_last in (False, True):
            progress = Progress()
            try:
                answer = await self._http.request(
                    request.method,
                    request.path,
                    content=request.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                )
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(request, self._endpoint, error, progress)
                if is_last or not may_send_again(request, error, progress):
                    break
            else:
                return answer.content
        raise failed


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What is read from a file would keep the event loop waiting."""
    while (chunk := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
        yield chunk


def _read(request: ApiRequest[T], raw: bytes, endpoint: Endpoint) -> T:
    try:
        return request.read(raw)
    except ValueError:
        raise no_engine(request, endpoint.path) from None


def _events(
    following: Following, chunk: bytes, request: ApiRequest[Event], endpoint: Endpoint
) -> list[Event]:
    try:
        return following.feed(chunk)
    except ValueError:
        raise no_engine(request, endpoint.path) from None


def no_engine(request: ApiRequest[Any], path: Path) -> DaemonUnavailable:
    """Something answers, and not as an engine does."""
    return DaemonUnavailable(
        f"What answers on {path} is not a fumehood engine of this version.",
        may_have_acted=request.method not in CHANGES_NOTHING,
    )


def _unavailable(
    request: ApiRequest[Any], endpoint: Endpoint, error: httpx2.HTTPError, progress: Progress
) -> DaemonUnavailable:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return _not_reached(endpoint.path, error)
    was_sent = not (isinstance(error, NEVER_SENT) or progress.did_head_fail)
    return no_answer(request, endpoint.path, error, was_sent=was_sent)


def no_answer(
    request: ApiRequest[Any], path: Path, error: Exception, *, was_sent: bool = True
) -> DaemonUnavailable:
    """A connection was made, and no answer came of it."""
    may_have_acted = was_sent and request.method not in CHANGES_NOTHING
    words = "Whether the engine acted on it is not known. " if may_have_acted else ""
    return DaemonUnavailable(
        f"The connection to {path} gave no answer ({type(error).__name__}). {words}"
        "See the engine's log; it may have been stopped, or it is no fumehood engine.",
        may_have_acted=may_have_acted,
    )


def _not_reached(path: Path, error: BaseException) -> DaemonUnavailable:
    if _is_forbidden(error):
        return DaemonUnavailable(
            f"You may not open {path}. Where the engine is a service, your user must be "
            "in the socket's group, and log in anew after joining it."
        )
    return DaemonUnavailable(f"No engine answers on {path}. {_how_to_start(path)}")


def _how_to_start(path: Path) -> str:
    """A service's socket is not the caller's to open: an engine of its own would not be there."""
    names = path.parts[-2:]
    is_laid_out = names in (("engine", "engine.sock"), ("control", "control.sock"))
    is_system_s = path.is_relative_to("/run") and not path.is_relative_to("/run/user")
    if is_laid_out or is_system_s:
        return (
            "It is the socket of a service, which is not running. Ask who administers this "
            "machine to start it: systemctl start fumehood"
        )
    return "Start one with: fumehood serve"


def _is_forbidden(error: BaseException) -> bool:
    """Whether the system refused to open the socket, as the library's errors hang together."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PermissionError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
