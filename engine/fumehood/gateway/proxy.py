"""The HTTP proxy for programs: HTTP, HTTPS and WebSocket.

Host side, in the event loop. Everything that a program sends is treated as hostile. The proxy
decrypts the program's TLS, so that each request can be judged separately. The engine sends the
request over a connection of its own, to a checked address and with the usual certificate check.
Invariants:

* A request is judged before any part of it is sent.
* A request is sent at most once.
* A program gets a refusal as an HTTP answer with the reason. Its connection never just closes.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.lowlevel
import h11
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSStream

from fumehood.core.errors import EngineError, NetworkError, PermissionDenied
from fumehood.gateway.authority import Authority, Hello
from fumehood.gateway.door import SENT, Door
from fumehood.gateway.placeholders import BodyWatch, HeldRequest
from fumehood.gateway.request import (
    TUNNEL,
    Place,
    ProgramRequest,
    Refusal,
    malformed,
    passed_on,
    read_request,
)
from fumehood.outgoing.addresses import CHECKED_CONNECTION, CheckedBackend, drop_what_follows
from fumehood.outgoing.secret_values import SecretValues
from fumehood.protocol import strict_json
from fumehood.protocol.framing import MAX_HEAD_BYTES
from fumehood.sandbox.streams import RunClock

if TYPE_CHECKING:
    import httpcore2

PIECE_BYTES = 64 * 1024

TLS_RECORD = b"\x16"
"""The first byte of a client's TLS handshake. *Source*: RFC 8446, section 5.1."""

TURN_EVENTS = 64
"""After this many chunks of a body, the proxy lets other tasks of the event loop run."""

SMALL_CHUNKS = 10_000
"""If a body has more chunks than this, its chunks must have at least `LEAST_BYTES` on average,
because every chunk costs the engine about the same time, however small it is.
"""

LEAST_BYTES = 256

CONNECT_S = 30.0
"""Maximum seconds for connecting to a host. Once connected, only the program's own time limit
applies.
"""

BROKEN = (
    anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, ssl.SSLError, OSError
)  # fmt: skip
"""The errors that the proxy gets if a program's connection ends early."""


class _Peer:
    """A program's HTTP connection to the proxy."""

    def __init__(self, stream: anyio.abc.ByteStream, clock: RunClock) -> None:
        self.stream = stream
        self.clock = clock
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.has_answered = False
        """Whether the proxy has begun to answer the current request."""
        self.request: ProgramRequest | None = None
        """The current request, or None if it could not be parsed."""
        self.digest = hashlib.sha256()
        """The hash of that part of the current request's body that was read. Only kept if there is
        a tape.
        """

    async def event(self) -> Any:
        """Wait for the next HTTP event from the program, and return it.

        Raises:
            h11.RemoteProtocolError: the program does not send valid HTTP.
        """
        while (event := self.http.next_event()) is h11.NEED_DATA:
            if self.http.they_are_waiting_for_100_continue:
                await self.send(h11.InformationalResponse(status_code=100, headers=[]))
            try:
                data = await self.stream.receive(PIECE_BYTES)
            except anyio.EndOfStream:
                data = b""
            self.http.receive_data(data)
        return event

    async def send(self, *events: Any) -> None:
        """Send HTTP events, such as a response and its body, to the program in a single write."""
        data = b"".join(self.http.send(event) or b"" for event in events)
        if data:
            await self.stream.send(data)

    async def body(self, door: Door) -> AsyncIterator[bytes]:
        """Yield the body of the current request in pieces. Before a piece is yielded, its bytes are
        charged to the limits and budgets of the call.

        Raises:
            Refusal: the body contains a placeholder, has too many small chunks, or exceeds a limit.
        """
        watch, pieces, count, total = BodyWatch(door.placeholders), bytearray(), 0, 0
        while True:
            event = self.http.next_event() if pieces else await self.event()
            if isinstance(event, h11.Data):
                pieces += event.data
                count, total = count + 1, total + len(event.data)
                if count % TURN_EVENTS == 0:
                    await anyio.lowlevel.checkpoint()  # lets other tasks run
                    _require_large(count, total, door)
                if len(pieces) < PIECE_BYTES:
                    continue
            if pieces:
                door.sent(len(pieces))
                if door.tape is not None:
                    self.digest.update(pieces)
                if (name := watch.add(bytes(pieces))) is not None:
                    raise door.misused(name, "it may only be in a header")
                yield bytes(pieces)
                pieces.clear()
            if not isinstance(event, h11.Data) and event is not h11.NEED_DATA:
                return

    async def refuse(self, refusal: Refusal, door: Door) -> None:
        """Send a refusal to the program as the answer to its current request. If there is a tape,
        record the refusal there too.
        """
        error = {"code": refusal.code, "message": refusal.message}
        body = strict_json.dumps({"error": error})
        headers = [
            ("content-type", "application/json"), ("content-length", str(len(body))),
        ]  # fmt: skip
        if self.http.their_state is not h11.DONE:  # the rest of the request's body is not read
            headers.append(("connection", "close"))
        self.has_answered = True
        if self.request is not None:
            kept = [(name.encode(), value.encode()) for name, value in headers]
            following = door.follow(self.request, refusal.status, kept)
            if following is not None:
                following.add(body)
                following.finish(None)
        response = h11.Response(status_code=refusal.status, headers=headers)
        await self.send(response, h11.Data(data=body), h11.EndOfMessage())


def _require_large(count: int, total: int, door: Door) -> None:
    if count > SMALL_CHUNKS and total < count * LEAST_BYTES:
        raise door.refused(400, "INVALID_REQUEST", "The body is in too many small chunks.")


def _unsearchable(status: int, headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return None if an answer with this status and these headers can be searched for secrets.
    Otherwise return a clause that says why not.
    """
    if status == HTTPStatus.PARTIAL_CONTENT or any(name == b"content-range" for name, _ in headers):
        return "it sent a part of its answer"
    if any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers):
        return "it compressed its answer"
    return None


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


class Proxy:
    """The HTTP proxy for one call's program. Serves all connections of the program."""

    def __init__(
        self,
        door: Door,
        authority: Authority,
        upstream: httpcore2.AsyncConnectionPool,
        backend: CheckedBackend,
    ) -> None:
        self._door = door
        self._authority = authority
        self._upstream = upstream
        self._backend = backend

    async def serve(self, stream: anyio.abc.ByteStream, clock: RunClock) -> None:
        """Serve one connection of the program until the connection ends. `clock` is the program's
        clock.
        """
        try:
            with suppress(*BROKEN, h11.LocalProtocolError, Refusal):
                await self._serve(_Peer(stream, clock), None)
        finally:
            with anyio.CancelScope(shield=True), suppress(*BROKEN):
                await stream.aclose()

    async def _serve(self, peer: _Peer, inside: Place | None) -> None:
        """Serve the requests that arrive on a connection, until the connection ends.

        If the connection runs inside a decrypted tunnel, `inside` is the place to which the tunnel
        leads. Otherwise, it is None.
        """
        while True:
            peer.has_answered, peer.request, peer.digest = False, None, hashlib.sha256()
            try:
                event = await peer.event()
                if not isinstance(event, h11.Request):
                    return
                self._door.count()
                if inside is None and event.method == b"CONNECT":
                    await self._tunnel(peer, event)
                    return
                request = peer.request = read_request(
                    event.method, event.target, event.headers.raw_items(), inside
                )
                try:
                    await self._exchange(peer, request)
                except Refusal as refusal:
                    await self._door.note_refusal(request, refusal)
                    raise
            except h11.RemoteProtocolError as error:
                if peer.has_answered:
                    return
                self._door.count()
                status = error.error_status_hint
                unclear = self._door.refused(status, "INVALID_REQUEST", f"{error}.")
                await peer.refuse(unclear, self._door)
            except Refusal as refusal:
                if peer.has_answered:
                    return
                await peer.refuse(refusal, self._door)
            if {peer.http.our_state, peer.http.their_state} != {h11.DONE}:
                return
            peer.http.start_next_cycle()

    async def _tunnel(self, peer: _Peer, event: h11.Request) -> None:
        """Accept the CONNECT request `event`, and serve its tunnel until the tunnel ends.

        If the operator has configured the target as a tunnel, the connection is passed through
        without decryption. Otherwise, the requests that arrive through it are served.

        Raises:
            Refusal: the target is invalid, or the connection must not be passed through.
        """
        authority = event.target.decode("ascii", "replace")
        if ":" not in authority.rpartition("]")[2]:
            raise malformed("CONNECT needs a host and a port")
        place = Place.of("https", authority)
        await peer.event()  # the end of the request: CONNECT has no body
        established = h11.Response(status_code=200, headers=[], reason="Connection established")
        if self._door.is_tunnel(place):
            if self._door.is_answered:
                raise self._door.refused(
                    502, "NETWORK_ERROR", "Receipts do not record undecrypted connections."
                )
            if self._door.tape is not None:
                self._door.tape.skip()
            request = ProgramRequest(TUNNEL, place, "", (), 0, is_upgrade=False)
            await self._pass_unopened(peer, request, established)
            return
        await peer.send(established)
        before = peer.http.trailing_data[0] or await peer.stream.receive(PIECE_BYTES)
        buffered = BufferedByteStream(peer.stream)
        buffered.feed_data(before)
        stream: anyio.abc.ByteStream = buffered
        if before.startswith(TLS_RECORD):
            context = self._authority.context_for(place.host)
            stream = await TLSStream.wrap(
                stream, server_side=True, ssl_context=context, standard_compatible=False
            )
        else:
            place = Place("http", place.host, place.port)
        await self._serve(_Peer(stream, peer.clock), place)

    async def _pass_unopened(
        self, peer: _Peer, request: ProgramRequest, established: h11.Response
    ) -> None:
        """Judge a TLS connection by its host only, and pass it through without decryption.

        `established` is the response with which the proxy accepts the CONNECT request.

        Raises:
            Refusal: the connection is not allowed, or would need approval. Also raised if the
                server name in the program's TLS handshake is not the host, or if the host cannot be
                reached.
        """
        door, place = self._door, request.place
        try:
            if not door.judge(request) or door.held_back is not None:
                raise door.refused(
                    403, "PERMISSION_DENIED", f"Connections to {place.authority} are not "
                    "decrypted, so an approver could not see their content.",
                )  # fmt: skip
            await door.note(SENT, request)
            peer.has_answered = True
            await peer.send(established)
            hello, begun = Hello(), bytearray(peer.http.trailing_data[0])
            name = hello.feed(bytes(begun))
            while name is None and len(begun) < MAX_HEAD_BYTES:
                piece = await peer.stream.receive(PIECE_BYTES)
                begun += piece
                name = hello.feed(piece)
            if name != place.host:
                raise door.refused(
                    403, "PERMISSION_DENIED",
                    f"Connections to {place.authority} are not decrypted, so they must use TLS for "
                    "this name.",
                )  # fmt: skip
            try:
                upstream = await self._backend.connect_tcp(place.host, place.port, CONNECT_S)
            except PermissionDenied as error:
                raise door.refused(502, error.code, error.message) from None
            except EngineError as error:
                raise door.failed(error.message) from None
            door.use.tunnels += 1
            try:
                await self._relay(peer, upstream, bytes(begun))
            finally:
                with anyio.CancelScope(shield=True):
                    await upstream.aclose()
        except Refusal as refusal:
            await door.note_refusal(request, refusal)
            raise

    async def _exchange(self, peer: _Peer, request: ProgramRequest) -> None:
        """Judge a request, send it, and pass the host's answer to the program. If the request needs
        approval, wait for the approval before it is sent.

        If the call has a tape that answers requests, send nothing, and answer with the tape's
        recorded answer.

        Raises:
            Refusal: the request was refused or held back, or the host failed.
        """
        door = self._door
        if door.is_answered:
            await self._play(peer, request)
            return
        is_sent = door.judge(request)
        if door.held_back is not None and not (is_sent and request.is_read):
            with door.holding():
                raise door.hold_back(request, await self._whole(peer, request))
        if is_sent:
            if not request.is_read:
                await door.note(SENT, request)
            content = peer.body(door) if request.length != 0 else None
            if content is None:
                await peer.event()  # the end of a request without a body
            await self._send(peer, request, content)
            return
        with door.holding():
            await self._hold(peer, request, await self._whole(peer, request))

    async def _play(self, peer: _Peer, request: ProgramRequest) -> None:
        """Read a request to its end, and answer it with the answer that the tape (a recording) has
        for it.

        Raises Refusal if the tape has no answer.
        """
        if request.length == 0:
            await peer.event()  # the end of the request
        else:
            async for _ in peer.body(self._door):
                pass
        answer = self._door.play(request, peer.digest.hexdigest())
        following = self._door.follow(request, answer.status, answer.headers)
        peer.has_answered = True
        await peer.send(h11.Response(status_code=answer.status, headers=list(answer.headers)))
        self._door.received(len(answer.body))
        await peer.send(h11.Data(data=answer.body), h11.EndOfMessage())
        if following is not None:
            following.add(answer.body)
            following.finish(answer.digest)

    async def _hold(self, peer: _Peer, request: ProgramRequest, body: bytes) -> None:
        """Request a human's approval of a request with the body `body`. If it is approved, send the
        request, and pass the host's answer to the program.

        Raises:
            Refusal: the request was not approved, or the approval could not be requested.
        """
        door = self._door

        async def send() -> EngineError | None:
            try:
                await self._send(peer, request, _once(body) if body else None, len(body))
            except Refusal as refusal:
                if not peer.has_answered:
                    await peer.refuse(refusal, door)
                return NetworkError(refusal.message, retryable=False)
            except (*BROKEN, h11.LocalProtocolError):
                return None  # it was sent; its program did not read the whole answer
            return None

        error = await door.ask(request, body, send, peer.clock)
        if error is not None and not peer.has_answered:
            raise door.refused(403, error.code, error.message)

    async def _whole(self, peer: _Peer, request: ProgramRequest) -> bytes:
        """Read and return the whole body of a request, so that an approver can see it. Raises
        Refusal if the body is too long.
        """
        door, body = self._door, b""
        door.require_short(request.length or 0)
        async for piece in peer.body(door):
            body += piece
            door.require_short(len(body))
        return body

    async def _send(
        self,
        peer: _Peer,
        request: ProgramRequest,
        content: AsyncIterator[bytes] | None,
        length: int | None = None,
    ) -> None:
        async with self._answered(request, content, length) as (answer, values):
            await self._answer(peer, request, answer, values)

    async def deliver(self, held: HeldRequest) -> int:
        """Send a request that a trial held back, and return the HTTP status of the answer. The
        caller must have a human's approval of the request.

        Raises:
            Refusal: the request is no longer allowed, or the host failed.
        """
        request, door = held.request, self._door
        door.placeholders = held.placeholders  # those of the trial's program
        door.count()
        door.judge(request)
        await door.note(SENT, request)
        door.sent(len(held.body))
        content = _once(held.body) if held.body else None
        async with self._answered(request, content, len(held.body)) as (answer, _):
            async for piece in answer.aiter_stream():
                door.received(len(piece))
            return answer.status

    @asynccontextmanager
    async def _answered(
        self, request: ProgramRequest, content: AsyncIterator[bytes] | None, length: int | None
    ) -> AsyncIterator[tuple[httpcore2.Response, SecretValues]]:
        """Send a request to its host. Yield two values: the host's answer, and the values of the
        secrets for which the answer must be searched.

        `content` is the body, or None if there is no body. `length` is the size of the body in
        bytes. None means the length that the request itself declares.

        Raises:
            Refusal: a secret has no usable value, the address is not allowed, or the host failed.
        """
        import httpcore2

        length = request.length if length is None else length
        place = request.place
        try:
            own, values = await self._door.placeholders.put_in(request)
        except Refusal as refusal:
            raise self._door.refused(refusal.status, refusal.code, refusal.message) from None
        headers = [(b"host", place.authority.encode()), *own]
        if request.is_upgrade:
            headers += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
        if content is not None:
            # Without this header, a server that takes the body for a second request would answer
            # that too.
            headers.append((b"connection", b"close"))
        if content is not None and length is None:
            headers.append((b"transfer-encoding", b"chunked"))
        elif content is not None or request.method not in ("GET", "HEAD", "OPTIONS"):
            headers.append((b"content-length", str(length).encode()))
        url = httpcore2.URL(
            scheme=place.scheme, host=place.host.strip("[]"), port=place.port,
            target=request.target.encode(),
        )  # fmt: skip
        try:
            async with self._upstream.stream(
                request.method, url, headers=headers, content=content,
                extensions={"timeout": {"connect": CONNECT_S}},
            ) as answer:  # fmt: skip
                yield answer, values
                drop_what_follows(answer)
        except PermissionDenied as error:
            raise self._door.refused(403, error.code, error.message) from None
        except (EngineError, httpcore2.TimeoutException) as error:
            raise self._door.failed(str(error)) from None
        except httpcore2.ConnectError:
            raise self._door.failed(
                "No secure connection to the host could be made: is its certificate valid for its "
                "name?"
            ) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError):
            raise self._door.failed("The host's answer is incomplete, or is not HTTP.") from None

    async def _answer(
        self,
        peer: _Peer,
        request: ProgramRequest,
        answer: httpcore2.Response,
        values: SecretValues,
    ) -> None:
        """Pass the host's answer to the program, but without the values of secrets.

        `values` are the values of the secrets that the host may have received. If they occur in the
        answer, they are replaced.

        Raises:
            Refusal: the answer cannot be searched for these secrets.
        """
        headers = passed_on(answer.headers)
        self._door.received(sum(len(name) + len(value) for name, value in headers))
        if values.longest and (fault := _unsearchable(answer.status, headers)) is not None:
            raise self._door.refused(
                502, "NETWORK_ERROR", f"A secret is bound to the host, and {fault}, so the answer "
                "cannot be searched for the secret.",
            )  # fmt: skip
        if values.longest:
            headers = [
                (name, values.text(value.decode("latin-1")).encode("latin-1"))
                for name, value in headers
                if name != b"content-length" and not values.finds_in_name(name.decode("latin-1"))
            ]
        peer.has_answered = True
        following = self._door.follow(request, answer.status, headers)
        if answer.status == 101:
            headers += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
            await peer.send(h11.InformationalResponse(status_code=101, headers=headers))
            upstream = answer.extensions["network_stream"]
            await self._relay(peer, upstream, peer.http.trailing_data[0])
            return
        await peer.send(h11.Response(status_code=answer.status, headers=headers))
        stream, count, total = values.stream(), 0, 0
        async for piece in answer.aiter_stream():
            self._door.received(len(piece))
            count, total = count + 1, total + len(piece)
            if count % TURN_EVENTS == 0:
                await anyio.lowlevel.checkpoint()
                _require_large(count, total, self._door)
            if values.longest:
                piece = stream.feed(piece.decode("latin-1")).encode("latin-1")
            if following is not None:
                following.add(piece)
            await peer.send(h11.Data(data=piece))
        rest = stream.finish().encode("latin-1")
        if following is not None:
            following.add(rest)
            following.finish(peer.digest.hexdigest())
        await peer.send(h11.Data(data=rest), h11.EndOfMessage())

    async def _relay(
        self, peer: _Peer, upstream: httpcore2.AsyncNetworkStream, data: bytes
    ) -> None:
        """Pass bytes in both directions between the program and the host, until one of them closes
        its connection. `upstream` is the connection to the host; `data` are the first bytes from
        the program.
        """
        upstream.get_extra_info(CHECKED_CONNECTION).relay()

        import httpcore2

        ended = (*BROKEN, Refusal, httpcore2.NetworkError)

        async def there(group: anyio.abc.TaskGroup, data: bytes) -> None:
            with suppress(*ended):
                while True:
                    if data:
                        self._door.sent(len(data))
                        await upstream.write(data)
                    data = await peer.stream.receive(PIECE_BYTES)
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(there, group, data)
            with suppress(*ended):
                while data := await upstream.read(PIECE_BYTES):
                    self._door.received(len(data))
                    await peer.stream.send(data)
            group.cancel_scope.cancel()
