"""Requests to other services: one pool of connections for each engine, and bounded answers.

Host side. This module uses `httpcore2` directly, because a general
client follows redirects, keeps cookies, reads proxies from the environment, logs URLs and
decompresses without a limit. Invariants: every connection, even after a redirect, is to an address
that `addresses` has checked; headers and URLs with secrets are sent only to the origin of the
definition; an answer takes no more memory than its limit, even when decompressed; if a request ends
early, its connection is closed.
"""

from __future__ import annotations

import ssl
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import anyio
import anyio.to_thread

from fumehood.core.errors import (
    MAX_RETRY_AFTER_MS,
    EndedBy,
    EngineError,
    ExecutionError,
    NetworkError,
    OutputLimitExceeded,
    PermissionDenied,
    Timeout,
    UpstreamTimeout,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.long_text import shown_body
from fumehood.core.tool import SECRET_REFERENCE, ToolDefinition
from fumehood.executors.outcome import Outcome
from fumehood.outgoing.secret_values import SecretValues
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import url_faults
from fumehood.registry.secrets import NO_SECRETS, Origin, RestSettings, SecretBindings
from fumehood.registry.settings import WebToolSettings

if TYPE_CHECKING:
    import httpcore2

READ_AT_ONCE = 32
"""Maximum number of concurrent threads that read secrets."""

MAX_REDIRECTS = 5
"""Maximum number of redirects of one request."""

MAX_BODY_SHOWN = 4096
"""Maximum number of characters of a service's error response that are shown to the caller."""

MAX_ERROR_BYTES = 64 * 1024
"""Maximum number of bytes that are read from the body of an error response."""

PIECE_BYTES = 64 * 1024
"""Maximum size in bytes of decompressed data at a time, because one compressed byte can become a
thousand bytes."""

PACKED_OVERHEAD_BYTES = 64 * 1024
"""Bytes by which a compressed body may exceed the limit for the decompressed body."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_REDIRECTED = "The tool's service redirected the request to another host."
_SENDS = frozenset({"connection.start_tls.started", "http11.send_request_headers.started"})
"""Trace events of httpcore2 that precede the first bytes sent to a service."""

Headers = tuple[tuple[str, str], ...]
"""Pairs of name and value, in the order in which they are sent."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One HTTP request to another service. `secret_headers` are sent only to the origin of `url`,
    not after a redirect.
    """

    method: str
    url: str
    headers: Headers = ()
    secret_headers: Headers = ()
    body: bytes | None = None

    @property
    def shown(self) -> JsonObject:
        """The request as approvers see it: with references to secrets, but without the secrets'
        values. The caller must read it before it calls `fill_secrets`, whose result contains the
        values.

        The field `secrets` of the result maps each secret's name to the places at which the secret
        will be filled in. Each place is `url` or the name of a header.
        """
        headers = (*self.headers, *self.secret_headers)
        places: dict[str, list[str]] = {}
        # Other headers can contain the text of a reference, because arguments can have any text. No
        # secret is filled in there.
        for place, text in (("url", self.url), *self.secret_headers):
            for name in SECRET_REFERENCE.findall(text):
                places.setdefault(name, []).append(place)
        return {
            "method": self.method,
            "url": self.url,
            "host": Origin.of(self.url).shown,
            "headers": dict(headers),
            **(shown_body(self.body) if self.body else {}),
            "secrets": places,
        }


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """Status, headers (names in lower case) and the decompressed body of an answer.

    `is_cut` is True if only the beginning of the body was read, which is done only for error
    responses. `url` is the URL that answered, after all redirects.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    is_cut: bool = False

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case, or an empty text."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def retry_after_ms(self) -> int | None:
        """The delay in milliseconds that the service requests. None if missing or invalid."""
        return read_retry_after(self.headers.get("retry-after", ""), datetime.now(UTC))


class BodyTooLarge(Exception):
    """A successful answer exceeds its size limit."""


Relay = Callable[[bytes, str], Awaitable[None]]
"""Receives the next bytes of a successful answer, at most `PIECE_BYTES`, and its content type."""


class Attempt:
    """Records whether the requests of one call may have been sent."""

    was_sent = False
    """Whether a byte may have been sent to another service."""

    async def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Set `was_sent` if `event`, a trace event of the HTTP library, means that bytes are about
        to be sent.
        """
        if event in _SENDS:
            self.was_sent = True


class Upstreams:
    """Connections to other services, and the secrets for them. Connections are made on first use.

    `tls` replaces the default TLS settings, which use the host's certificate authorities. `setting`
    is the name of the setting for allowed addresses. Error messages mention this name. If
    `only_hosts` is given, only these hosts can be reached.
    """

    def __init__(
        self,
        settings: RestSettings | None = None,
        secrets: SecretBindings = NO_SECRETS,
        tls: ssl.SSLContext | None = None,
        web: WebToolSettings | None = None,
        setting: str = "rest.allowed_hosts",
        only_hosts: tuple[str, ...] | None = None,
    ) -> None:
        self.secrets = secrets
        self._reading = anyio.CapacityLimiter(READ_AT_ONCE)
        """Limits the threads that read secrets, because a locked keyring could otherwise block all
        threads of the engine."""
        settings = settings or RestSettings()
        self.stream_bytes = settings.stream_kb * 1024
        """Size limit of a relayed answer, in bytes."""
        self._allowed_hosts = settings.allowed_hosts
        self._setting = setting
        self._only_hosts = only_hosts
        self._tls = tls
        self._web = web or WebToolSettings()
        self._pool: httpcore2.AsyncConnectionPool | None = None

    @cached_property
    def fetches(self) -> Upstreams:
        """The connections of the tool `fetch_url`, which are separate from those of REST tools. No
        secrets are sent over them. If only REST tools may reach a host, these connections cannot
        reach it.
        """
        # These have their own pool, so they cannot use a connection that a REST tool has opened.
        return Upstreams(
            RestSettings(allowed_hosts=self._web.allowed_hosts), self.secrets, tls=self._tls,
            setting="web.allowed_hosts", only_hosts=self._web.only_hosts,
        )  # fmt: skip

    async def close(self) -> None:
        """Close all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()
        if "fetches" in self.__dict__:
            await self.fetches.close()

    async def read_secrets(self, tool: ToolDefinition, redactor: Redactor) -> dict[str, str]:
        """Return the secrets to which a tool's definition refers, as a dict from name to value.

        The redactor learns the values, because they may also appear in other tools' output or in
        the log.
        """
        texts = [tool.endpoint or "", *(tool.headers or {}).values()]
        if not any(map(SECRET_REFERENCE.search, texts)):
            return {}
        # A keyring may wait for its user. It is safe to abandon the thread, which only reads.
        secrets = await anyio.to_thread.run_sync(
            self.secrets.values, tool, abandon_on_cancel=True, limiter=self._reading
        )
        for value in secrets.values():
            redactor.learn(value)
        return secrets

    async def ask(
        self,
        request: UpstreamRequest,
        max_bytes: int,
        attempt: Attempt,
        values: SecretValues,
        relay: Relay | None = None,
    ) -> UpstreamAnswer:
        """Send a request, follow redirects of GET and HEAD, and return the answer.

        `max_bytes` is the maximum size of a successful answer. `attempt` records whether the
        request was sent. The values of all secrets of each contacted host are added to `values`. If
        `relay` is given, it receives the body of a successful answer, and the returned body is
        empty.

        Raises:
            BodyTooLarge: a successful answer exceeds `max_bytes`.
            PermissionDenied: an address is not allowed.
            NetworkError: there is no answer, or the answer is incomplete.
            ExecutionError: the request cannot be sent as HTTP, a redirect is not allowed, the
                answer's Content-Encoding is not supported, or a secret of a host has no usable
                value.
        """
        for redirects in range(MAX_REDIRECTS + 1):
            # A host can return a secret from an earlier request in any later answer.
            values.add(await self._values_of_host(request.url))
            try:
                answer = await self._ask_once(
                    request, max_bytes, attempt, relay, must_be_whole=values.longest > 0
                )
            except PermissionDenied as refused:
                if redirects:
                    refused.message = f"{_REDIRECTED} {refused.message}"
                raise
            location = answer.headers.get("location")
            is_read = request.method in ("GET", "HEAD")
            if answer.status not in _REDIRECTS or location is None or not is_read:
                return answer
            request = _redirected(request, location, values)
        raise ExecutionError(
            f"The tool's service redirected the request more than {MAX_REDIRECTS} times. Do not "
            "retry."
        )

    async def _values_of_host(self, url: str) -> list[str]:
        host = Origin.of(url).shown_host
        names = [name for name, one in self.secrets.settings.items() if one.is_of_host(host)]
        if not names:
            return []
        return await anyio.to_thread.run_sync(
            lambda: [self.secrets.value(name) for name in names],
            abandon_on_cancel=True, limiter=self._reading,
        )  # fmt: skip

    async def _ask_once(
        self,
        request: UpstreamRequest,
        max_bytes: int,
        attempt: Attempt,
        relay: Relay | None,
        *,
        must_be_whole: bool,
    ) -> UpstreamAnswer:
        import httpcore2  # imported here, because most engines have no REST tools

        from fumehood.outgoing.addresses import drop_what_follows

        if self._only_hosts is not None and not Origin.of(request.url).is_in(self._only_hosts):
            raise PermissionDenied(
                "The operator has not allowed this host (web.only_hosts). Do not retry."
            )
        try:
            async with self._connections().stream(
                request.method,
                _url(request),
                headers=[*_own_headers(request), *request.headers, *request.secret_headers],
                content=request.body,
                extensions={"trace": attempt.note},
            ) as answer:
                headers = _headers(answer.headers)
                is_success = 200 <= answer.status < 300
                most = max_bytes if is_success else min(max_bytes, MAX_ERROR_BYTES)
                kind = headers.get("content-type", "")
                if must_be_whole and answer.status == HTTPStatus.PARTIAL_CONTENT:
                    raise ExecutionError(
                        "The tool's service sent a part of its answer, which cannot be searched "
                        "for the host's secrets. Do not retry."
                    )
                body, is_cut = bytearray(), False
                async with aclosing(answer.aiter_stream()) as chunks:
                    pieces = _unpacked(chunks, headers.get("content-encoding", ""), most)
                    async with aclosing(pieces):
                        try:
                            async for piece in pieces:
                                if relay is not None and is_success:
                                    await relay(piece, kind)
                                else:
                                    body += piece
                        except BodyTooLarge:
                            is_cut = True
                drop_what_follows(answer)
                if is_cut and is_success:
                    raise BodyTooLarge
                return UpstreamAnswer(answer.status, headers, bytes(body), request.url, is_cut)
        except httpcore2.ConnectError as error:
            raise _not_secure(error) from None
        except httpcore2.LocalProtocolError:
            # The cause is left out because it quotes the header, which may contain a secret.
            raise ExecutionError("The tool's request cannot be sent as HTTP.") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, zlib.error):
            raise NetworkError(
                "The tool's service broke off its answer, or gave none that is HTTP."
            ) from None

    def _connections(self) -> httpcore2.AsyncConnectionPool:
        if self._pool is None:
            import httpcore2

            from fumehood.outgoing.addresses import IDLE_S, MAX_IDLE_CONNECTIONS, CheckedBackend

            self._pool = httpcore2.AsyncConnectionPool(
                ssl_context=self._tls or httpcore2.default_ssl_context(),
                max_connections=None,  # `sandbox.host` bounds the requests to each service
                max_keepalive_connections=MAX_IDLE_CONNECTIONS,
                keepalive_expiry=IDLE_S,
                network_backend=CheckedBackend(self._allowed_hosts, self._setting),
            )
        return self._pool


def concluded(
    outcome: Outcome, error: EngineError, attempt: Attempt, tool: ToolDefinition
) -> Outcome:
    """Return `outcome` with `error` added. `attempt` says whether the request was sent.

    If it was sent, and `error` is a network error or a timeout, add advice to the error's message:
    whether the caller should repeat the call.
    """
    error.was_sent = attempt.was_sent
    if isinstance(error, NetworkError | UpstreamTimeout) and error.was_sent:
        _advise(error, tool)
    return replace(outcome, ended_by=_ended_by(error), error=error)


def _advise(error: NetworkError | UpstreamTimeout, tool: ToolDefinition) -> None:
    """Add advice to the error on whether to repeat the request, which was sent. It advises a
    repetition only if the tool is idempotent or the service answered with status 503.
    """
    turned_away = (error.details or {}).get("status") == 503
    error.may_retry = error.may_retry and (tool.idempotent or turned_away)
    advice = "Repeat the call later." if error.may_retry else "It may or may not have taken effect."
    error.message = f"{error.message} {advice}"


def _ended_by(error: EngineError) -> EndedBy:
    match error:
        case Timeout():
            return EndedBy.WALL_TIME
        case OutputLimitExceeded():
            return EndedBy.OUTPUT
        case _:
            return EndedBy.EXCEPTION


def _not_secure(error: httpcore2.ConnectError) -> EngineError:
    """Return the error that the caller gets if the TLS handshake with a service failed. All other
    failures to connect are reported by `CheckedBackend`.
    """
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args):
        return NetworkError(
            "The certificate of the tool's service is not valid for its name, so nothing was "
            "sent. Do not retry.",
            retryable=False,
        )
    return NetworkError("No secure connection to the tool's service could be made.")


def _own_headers(request: UpstreamRequest) -> Headers:
    """Return the headers that HTTP itself requires, which definitions cannot set."""
    length = (("content-length", str(len(request.body))),) if request.body is not None else ()
    return (("host", Origin.of(request.url).shown), ("accept-encoding", "gzip"), *length)


def _url(request: UpstreamRequest) -> httpcore2.URL:
    import httpcore2

    origin, parts = Origin.of(request.url), urlsplit(request.url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return httpcore2.URL(
        scheme=origin.scheme, host=origin.host, port=origin.port, target=target.encode("ascii")
    )


def _redirected(request: UpstreamRequest, location: str, values: SecretValues) -> UpstreamRequest:
    """Return the request for the target of a redirect. `location` is the target, relative to the
    URL of `request`.

    If the target has another origin than `request`, the headers with secrets are removed. `values`
    are the secrets that its URL must not contain.

    Raises:
        ExecutionError: the target is invalid, is not HTTPS although `request` was, or would send a
            secret to another origin.
    """
    before = Origin.of(request.url)
    try:
        url = urljoin(request.url, location).partition("#")[0]
    except ValueError:
        url = ""
    if any(url_faults(url)) or (before.scheme == "https" and not url.startswith("https://")):
        raise ExecutionError(
            "The tool's service redirected the request to an address that is not followed. Do not "
            "retry."
        )
    if Origin.of(url) == before:
        return replace(request, url=url)
    if values.finds(url):
        raise ExecutionError(
            "The tool's service redirected the request to another host with a secret in the "
            "address, which is not followed. Do not retry."
        )
    return replace(request, url=url, secret_headers=())


def _headers(rows: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return a dict from the name of each header, in lower case, to its value. If a header is
    repeated, its first value counts.
    """
    found: dict[str, str] = {}
    for name, value in rows:
        found.setdefault(name.decode("ascii").lower(), value.decode("latin-1"))
    return found


async def _unpacked(
    chunks: AsyncIterable[bytes], encoding: str, most: int
) -> AsyncGenerator[bytes, None]:
    """Yield the decompressed body in pieces, at most `most` bytes in total.

    Raises:
        BodyTooLarge: the body is longer.
        ExecutionError: the service used an unsupported Content-Encoding.
        zlib.error: the compressed data is invalid or truncated.
    """
    encoding = encoding.strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise ExecutionError(
            "The tool's service used an unsupported Content-Encoding. Do not retry."
        )
    unpacker = zlib.decompressobj(wbits=31) if "gzip" in encoding else None
    left, received = most, 0
    async for chunk in chunks:
        received += len(chunk)
        piece = b""
        while chunk or len(piece) == PIECE_BYTES:  # the decompressor may hold more output
            if unpacker is None:
                piece, chunk = chunk[:PIECE_BYTES], chunk[PIECE_BYTES:]
            else:
                piece = unpacker.decompress(chunk, PIECE_BYTES)
                chunk = unpacker.unconsumed_tail
                if unpacker.unused_data:  # it would be kept and copied with each chunk
                    raise zlib.error("the packed body is not whole")
            if left and piece:
                yield piece[:left]
            if len(piece) > left or received > most + PACKED_OVERHEAD_BYTES:
                raise BodyTooLarge
            left -= len(piece)
    if unpacker is not None and received and not unpacker.eof:
        raise zlib.error("the packed body is not whole")


def read_retry_after(value: str, now: datetime) -> int | None:
    """Parse the value of the header `Retry-After`: a number of seconds, or a date.

    Return milliseconds, at most `MAX_RETRY_AFTER_MS`, or None if the value is invalid.
    """
    # *Source*: RFC 9110, section 10.2.3.
    if value.isascii() and value.isdigit():
        return min(int(value[:12]) * 1000, MAX_RETRY_AFTER_MS)
    try:
        until = parsedate_to_datetime(value)
        wait_s = (until.replace(tzinfo=until.tzinfo or UTC) - now).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0, int(wait_s * 1000)), MAX_RETRY_AFTER_MS)


__all__ = ["Attempt", "BodyTooLarge", "Relay", "UpstreamAnswer", "UpstreamRequest", "Upstreams"]
