"""`AsyncTransport`: sends an `ApiRequest` over a Unix socket or TLS, and returns the answer.

Client side. Connections are kept and reused, although the daemon may have closed a connection since
its last use. Invariant: a request is sent a second time only if `may_send_again` allows it, and
never a third time.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import httpx2

from fumehood.client.api_request import ApiRequest
from fumehood.client.exchange import (
    BASE_URL,
    Endpoint,
    Progress,
    Write,
    may_send_again,
    read_answer,
    unavailable,
)

T = TypeVar("T")


class AsyncTransport:
    """Sends requests and waits for the answers. May be used by one event loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        if isinstance(endpoint.path, str):
            trusted = ssl.create_default_context()
            self._http = httpx2.AsyncClient(verify=trusted, base_url=endpoint.path)
            return
        # A Unix socket has no TLS: reading the host's certificate authorities would take 22 ms.
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        transport = httpx2.AsyncHTTPTransport(uds=str(endpoint.path), verify=no_tls)
        self._http = httpx2.AsyncClient(transport=transport, base_url=BASE_URL)

    async def send(self, request: ApiRequest[T]) -> T:
        """Send one request, and return its answer.

        Raises:
            DaemonUnavailable: no server answers, or the answer is incomplete. Exceptions of
                `request.read` are passed on.
            ValueError: the request's address is too long.
        """
        answer: list[bytes] = []
        await self._receive(request, answer.append, answer.append)
        return read_answer(request, b"".join(answer), self.endpoint)

    async def download(self, request: ApiRequest[None], write: Write) -> None:
        """Pass the bytes of an answer to `write` as they arrive.

        If the connection fails before the first byte of the answer, the request may be sent once
        more, according to `may_send_again`.

        Raises:
            DaemonUnavailable: no server answers, or the answer is incomplete.
            Refused: the engine refuses the request.
            ValueError: the request's address is too long.
        """
        refusal: list[bytes] = []
        if not await self._receive(request, write, refusal.append):
            read_answer(request, b"".join(refusal), self.endpoint)

    async def fetch(self, request: ApiRequest[None]) -> bytes:
        """Return the bytes of an answer. Raises for the same reasons as `download`."""
        content = bytearray()
        await self.download(request, content.extend)
        return bytes(content)

    async def upload(
        self, request: ApiRequest[T], chunks: AsyncIterator[bytes], size: int | None
    ) -> T:
        """Send a request whose body is `chunks`, and return its answer. `size` is the size of the
        body in bytes, or None if it is unknown.

        The request is sent only once, even if the connection fails, because `chunks` cannot be read
        again.

        Raises:
            DaemonUnavailable: no server answers, or the answer is incomplete. Exceptions of
                `request.read` are passed on.
            ValueError: the request's address is too long.
        """
        progress = Progress()
        try:
            answer = await self._http.request(
                request.method,
                request.path,
                content=chunks,
                headers=self.endpoint.upload_headers(request, size),
                timeout=self.endpoint.timeout(request),
                extensions={"trace": progress.note_async},
            )
        except httpx2.InvalidURL as error:
            raise ValueError(f"The request cannot be sent: {error}.") from None
        except httpx2.HTTPError as error:
            failed = unavailable(request, self.endpoint, error, progress)
        else:
            return read_answer(request, answer.content, self.endpoint)
        raise failed

    def begun(self, request: ApiRequest[Any], progress: Progress) -> Any:
        """Return a context manager that sends a request and waits until the answer begins.

        The context manager yields the answer before its body is read. `progress` records whether
        the head of the request was sent.
        """
        return self._http.stream(
            request.method,
            request.path,
            content=request.content,
            headers=self.endpoint.headers(request),
            timeout=self.endpoint.timeout(request),
            extensions={"trace": progress.note_async},
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def _receive(self, request: ApiRequest[Any], write: Write, write_refusal: Write) -> bool:
        """Pass an answer to `write`, or to `write_refusal` if the answer's status is an error.

        Return True if the status is a success.
        """
        for is_last in (False, True):
            progress, has_begun = Progress(), False
            try:
                async with self.begun(request, progress) as answer:
                    take = write if answer.is_success else write_refusal
                    async for chunk in answer.aiter_bytes():
                        has_begun = True
                        take(chunk)
                    return bool(answer.is_success)
            except httpx2.InvalidURL as error:
                raise ValueError(f"The request cannot be sent: {error}.") from None
            except httpx2.HTTPError as error:
                failed = unavailable(request, self.endpoint, error, progress)
                if is_last or has_begun or not may_send_again(request, error, progress):
                    break
        # Outside the handler, so that the library's error and its references are freed.
        raise failed
