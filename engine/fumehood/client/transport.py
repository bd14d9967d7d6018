"""From an `ApiRequest` to its answer over one Unix socket: time limits, and when to send again.

Client side, the only place that knows HTTP. A connection is kept and used again; the daemon
may have closed it meanwhile. Invariant: a request is sent a second time only where the first
cannot have been received (its head is known not to have been sent whole), or where it is a
GET, which changes nothing; never a third time.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import httpx2

from fumehood.client.ask import ANSWER_GRACE_S as ANSWER_GRACE_S
from fumehood.client.ask import CONNECT_TIMEOUT_S as CONNECT_TIMEOUT_S
from fumehood.client.ask import ApiRequest
from fumehood.client.errors import DaemonUnavailable
from fumehood.client.following import Following, is_followed
from fumehood.core.events import Event

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


@dataclass(frozen=True, slots=True)
class Place:
    """A socket, who asks there, and how long to wait."""

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

    def headers(self, ask: ApiRequest[Any]) -> dict[str, str]:
        """Those of one request."""
        headers = dict(ask.headers)
        if self.credential is not None:
            headers["authorization"] = f"Bearer {self.credential}"
        if ask.content is not None:
            headers["content-type"] = "application/json"
        return headers

    def upload_headers(self, ask: ApiRequest[Any], size: int | None) -> dict[str, str]:
        """Those of a body that is sent in pieces; without a size it is sent in chunks."""
        headers = {**self.headers(ask), "content-type": "application/octet-stream"}
        if size is not None:
            headers["content-length"] = str(size)
        return headers

    def timeout(self, ask: ApiRequest[Any]) -> httpx2.Timeout:
        """How long to wait for the connection, and for the answer."""
        return httpx2.Timeout(ask.work_s + self.grace_s, connect=self.connect_timeout_s)


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


def may_send_again(ask: ApiRequest[Any], error: httpx2.HTTPError, progress: Progress) -> bool:
    """Whether a failed request may be sent once more."""
    return isinstance(error, DROPPED) and (ask.method in CHANGES_NOTHING or progress.did_head_fail)


class BlockingTransport:
    """Sends and waits. May be used by several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        transport = httpx2.HTTPTransport(uds=str(place.path))
        self._http = httpx2.Client(transport=transport, base_url=BASE_URL)

    def send(self, ask: ApiRequest[T]) -> T:
        """The answer to one request. Raises DaemonUnavailable, and what `ask.read` raises."""
        return _read(ask, self._exchange(ask), self._place)

    def send_all(self, asks: Generator[ApiRequest[T], T, R]) -> R:
        """Send what is asked for until it has come to its result."""
        try:
            ask = next(asks)
            while True:
                ask = asks.send(self.send(ask))
        except StopIteration as end:
            result: R = end.value
            return result

    def download(self, ask: ApiRequest[None], write: Write) -> None:
        """Hand the bytes of an answer to `write` as they come.

        A request that fails before the first of them is sent once more, as `send` does.

        Raises:
            DaemonUnavailable: nobody answers, or the bytes ended before their end.
            Refused: from `ask.read`, where the engine says no instead.
        """
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                with self._http.stream(
                    ask.method,
                    ask.path,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ) as answer:
                    if not answer.is_success:
                        return _read(ask, answer.read(), self._place)
                    for chunk in answer.iter_bytes():
                        has_begun = True
                        write(chunk)
                    return None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or has_begun or not may_send_again(ask, error, progress):
                    break
        raise failed

    def upload(self, ask: ApiRequest[T], chunks: Iterator[bytes], size: int | None) -> T:
        """Send a body in pieces. It is sent once: its pieces are gone with it.

        Raises:
            DaemonUnavailable: nobody answers, or not to the end.
        """
        progress = Progress()
        try:
            raw = self._http.request(
                ask.method,
                ask.path,
                content=chunks,
                headers=self._place.upload_headers(ask, size),
                timeout=self._place.timeout(ask),
                extensions={"trace": progress.note},
            ).content
        except httpx2.HTTPError as error:
            failed = _unavailable(ask, self._place, error, progress)
        else:
            return _read(ask, raw, self._place)
        raise failed

    def follow(self, ask: ApiRequest[Event]) -> Iterator[Event]:
        """The events of a call as they come. Closing the iterator closes the connection.

        Raises:
            DaemonUnavailable: nobody answers, or the events ended before the answer.
        """
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                with self._http.stream(
                    ask.method,
                    ask.path,
                    content=ask.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ) as answer:
                    has_begun = True
                    if not is_followed(answer.headers):
                        yield _read(ask, answer.read(), self._place)
                        return
                    following = Following()
                    for chunk in answer.iter_raw():
                        yield from _events(following, chunk, ask, self._place)
                    return following.finish(ask)
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or has_begun or not may_send_again(ask, error, progress):
                    break
        raise failed

    def close(self) -> None:
        """Close every connection."""
        self._http.close()

    def _exchange(self, ask: ApiRequest[Any]) -> bytes:
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress = Progress()
            try:
                return self._http.request(
                    ask.method,
                    ask.path,
                    content=ask.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note},
                ).content
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or not may_send_again(ask, error, progress):
                    break
        # Outside the handler: the library's error, with all that hangs on it, is gone by now.
        raise failed


class AwaitingTransport:
    """The same for one event loop."""

    def __init__(self, place: Place) -> None:
        self._place = place
        transport = httpx2.AsyncHTTPTransport(uds=str(place.path))
        self._http = httpx2.AsyncClient(transport=transport, base_url=BASE_URL)

    async def send(self, ask: ApiRequest[T]) -> T:
        """The answer to one request. Raises DaemonUnavailable, and what `ask.read` raises."""
        return _read(ask, await self._exchange(ask), self._place)

    async def send_all(self, asks: Generator[ApiRequest[T], T, R]) -> R:
        """Send what is asked for until it has come to its result."""
        try:
            ask = next(asks)
            while True:
                ask = asks.send(await self.send(ask))
        except StopIteration as end:
            result: R = end.value
            return result

    async def download(self, ask: ApiRequest[None], write: Write) -> None:
        """Hand the bytes of an answer to `write` as they come. Raises as the other one."""
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                async with self._http.stream(
                    ask.method,
                    ask.path,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                ) as answer:
                    if not answer.is_success:
                        return _read(ask, await answer.aread(), self._place)
                    async for chunk in answer.aiter_bytes():
                        has_begun = True
                        write(chunk)
                    return None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or has_begun or not may_send_again(ask, error, progress):
                    break
        raise failed

    async def upload(self, ask: ApiRequest[T], chunks: Iterator[bytes], size: int | None) -> T:
        """Send a body in pieces, each read in a thread. Raises as the other one."""
        progress = Progress()
        try:
            answer = await self._http.request(
                ask.method,
                ask.path,
                content=_in_threads(chunks),
                headers=self._place.upload_headers(ask, size),
                timeout=self._place.timeout(ask),
                extensions={"trace": progress.note_async},
            )
        except httpx2.HTTPError as error:
            failed = _unavailable(ask, self._place, error, progress)
        else:
            return _read(ask, answer.content, self._place)
        raise failed

    async def follow(self, ask: ApiRequest[Event]) -> AsyncGenerator[Event, None]:
        """The events of a call as they come. Raises as the other one."""
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                async with self._http.stream(
                    ask.method,
                    ask.path,
                    content=ask.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                ) as answer:
                    has_begun = True
                    if not is_followed(answer.headers):
                        yield _read(ask, await answer.aread(), self._place)
                        return
                    following = Following()
                    async for chunk in answer.aiter_raw():
                        for event in _events(following, chunk, ask, self._place):
                            yield event
                    following.finish(ask)
                    return
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or has_begun or not may_send_again(ask, error, progress):
                    break
        raise failed

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _exchange(self, ask: ApiRequest[Any]) -> bytes:
        headers, timeout = self._place.headers(ask), self._place.timeout(ask)
        for is_last in (False, True):
            progress = Progress()
            try:
                answer = await self._http.request(
                    ask.method,
                    ask.path,
                    content=ask.content,
                    headers=headers,
                    timeout=timeout,
                    extensions={"trace": progress.note_async},
                )
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = _unavailable(ask, self._place, error, progress)
                if is_last or not may_send_again(ask, error, progress):
                    break
            else:
                return answer.content
        raise failed


async def _in_threads(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """What is read from a file would keep the event loop waiting."""
    while (chunk := await anyio.to_thread.run_sync(next, chunks, None)) is not None:
        yield chunk


def _read(ask: ApiRequest[T], raw: bytes, place: Place) -> T:
    try:
        return ask.read(raw)
    except ValueError:
        raise no_engine(ask, place.path) from None


def _events(
    following: Following, chunk: bytes, ask: ApiRequest[Event], place: Place
) -> list[Event]:
    try:
        return following.feed(chunk)
    except ValueError:
        raise no_engine(ask, place.path) from None


def no_engine(ask: ApiRequest[Any], path: Path) -> DaemonUnavailable:
    """Something answers, and not as an engine does."""
    return DaemonUnavailable(
        f"What answers on {path} is not a fumehood engine of this version.",
        may_have_acted=ask.method not in CHANGES_NOTHING,
    )


def _unavailable(
    ask: ApiRequest[Any], place: Place, error: httpx2.HTTPError, progress: Progress
) -> DaemonUnavailable:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return _not_reached(place.path, error)
    was_sent = not (isinstance(error, NEVER_SENT) or progress.did_head_fail)
    return no_answer(ask, place.path, error, was_sent=was_sent)


def no_answer(
    ask: ApiRequest[Any], path: Path, error: Exception, *, was_sent: bool = True
) -> DaemonUnavailable:
    """A connection was made, and no answer came of it."""
    may_have_acted = was_sent and ask.method not in CHANGES_NOTHING
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
