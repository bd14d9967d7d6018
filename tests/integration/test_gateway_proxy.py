"""The gateway's proxy as a hostile or odd client meets it: raw bytes in, real servers behind it."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.abc
import h11
import httpcore2
import pytest
from anyio.streams.tls import TLSStream

from fumehood.core.errors import EngineError
from fumehood.core.json_types import JsonObject
from fumehood.gateway.authority import Authority
from fumehood.gateway.door import Door, Send
from fumehood.gateway.placeholders import Placeholders
from fumehood.gateway.proxy import Proxy
from fumehood.gateway.settings import GatewaySettings
from fumehood.outgoing.addresses import CheckedBackend
from fumehood.policy.model import Decision, Verdict
from fumehood.sandbox.streams import RunClock
from support.wait import DEADLINE_S
from upstream import Reply, Upstream, running_upstream

pytestmark = pytest.mark.anyio
OURS, THEIRS = Authority(None), Authority(None)
BY_DEFAULT = Decision(Verdict.ASK, "default: they ask")


class NoClock:
    """A clock that nobody pauses."""

    def pause(self, *, is_paused: bool) -> None: ...


async def forget(kind: str, fields: JsonObject) -> None:
    """Keep no audit log."""


async def no_secret(name: str) -> str:
    raise AssertionError(name)


async def refuse_all(arguments: JsonObject, send: Send, clock: RunClock) -> EngineError | None:
    return EngineError("no")


@asynccontextmanager
async def proxy(
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost"),
    *,
    is_public: bool = False,
    max_requests: int = 1000,
    tunnels: tuple[str, ...] = (),
    decision: Decision = BY_DEFAULT,
) -> AsyncIterator[tuple[Door, int]]:
    """A proxy on loopback, in front of servers there."""
    settings = GatewaySettings(
        hosts=hosts, writes="allow", max_mb=1, max_requests=max_requests, tunnels=tunnels
    )
    door = Door(
        hosts,
        settings,
        lambda facts: decision,
        refuse_all,
        Placeholders({}, (), no_secret),
        forget,
    )
    backend = CheckedBackend(() if is_public else hosts, "gateway.allowed_hosts")
    pool = httpcore2.AsyncConnectionPool(
        ssl_context=ssl.create_default_context(cadata=THEIRS.certificate), network_backend=backend
    )
    serving = Proxy(door, OURS, pool, backend)
    async with (
        pool,
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):

        async def serve(stream: anyio.abc.ByteStream) -> None:
            await serving.serve(stream, NoClock())

        group.start_soon(listener.serve, serve)
        yield door, listener.extra(anyio.abc.SocketAttribute.local_port)
        group.cancel_scope.cancel()


@pytest.fixture
def upstream_tls() -> Iterator[Upstream]:
    with running_upstream(THEIRS.context_for("localhost")) as running:
        yield running


async def all_of(stream: anyio.abc.ByteStream) -> bytes:
    """Everything until the end."""
    found = b""
    with anyio.fail_after(DEADLINE_S):
        try:
            while True:
                found += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return found


async def talk(port: int, *pieces: bytes) -> bytes:
    """Send raw bytes, and return what comes until the other side closes."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        for piece in pieces:
            await stream.send(piece)
            await anyio.sleep(0.01)
        await stream.send_eof()
        return await all_of(stream)


@asynccontextmanager
async def tunnel(
    port: int, authority: str, name: str | None = "localhost", end: Authority = OURS
) -> AsyncIterator[anyio.abc.ByteStream]:
    """TLS through a tunnel, with this name in the handshake."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode())
        assert b" 200 " in await stream.receive()
        context = ssl.create_default_context(cadata=end.certificate)
        context.check_hostname = False
        yield await TLSStream.wrap(
            stream, hostname=name, ssl_context=context, standard_compatible=False, server_side=False
        )


TWO_LENGTHS = (
    "POST {url}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n"
    "\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"
)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET {url}/ HTTP/1.1\r\nHost: {host}\r\nX : a\r\n\r\n", 400),
        ("GET {url}/ HTTP/1.1\r\nHost: {host}\r\nX: a\rb\r\n\r\n", 400),
        ("GET {url}/ HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n", 400),
        ("GET {url}/ HTTP/1.1\r\n\r\n", 400),
        ("POST {url}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        ("POST {url}/ HTTP/1.1\r\nHost: {host}\r\nContent-Length: +1\r\n\r\nx", 400),
        (TWO_LENGTHS, 400),
        ("POST {url}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: x, chunked\r\n\r\n", 501),
        ("POST {url}/ HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n", 400),
        ("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405),
        ("\x16\x03\x01\x02\x00\x01\x00", 400),
        ("GET {url}/ HTTP/1.1\r\nHost: {host}\r\nX: " + "a" * 200_000 + "\r\n\r\n", 431),
    ],
)  # fmt: skip
async def test_attack_malformed_request_is_answered_and_nothing_of_it_is_sent(
    upstream: Upstream, head: str, status: int
) -> None:
    """Twin: the same connection, with requests that are whole, below."""
    async with proxy() as (door, port):
        raw = head.format(url=upstream.url, host=upstream.authority).encode("latin-1")
        answer = await talk(port, raw)
    assert f" {status} ".encode() in answer, answer
    assert b'{"error":{"code":' in answer
    assert not any(request.path == "/smuggled" for request in upstream.requests)
    assert door.use.bytes_in == 0


async def test_requests_of_one_connection_are_served_in_turn_however_they_are_cut(
    upstream: Upstream,
) -> None:
    upstream.script("/parts", Reply(body=b"x" * 300_000))
    upstream.script("/empty", Reply(304, body=b""))
    raw = b"".join(
        line.format(url=upstream.url, host=upstream.authority).encode()
        for line in (
            "GET {url}/parts HTTP/1.1\r\nHost: {host}\r\n\r\n",
            "HEAD {url}/parts HTTP/1.1\r\nHost: {host}\r\n\r\n",
            "GET {url}/empty HTTP/1.1\r\nHost: {host}\r\n\r\n",
            "POST {url}/bare HTTP/1.1\r\nHost: {host}\r\n\r\n",
            "POST {url}/whole HTTP/1.1\r\nHost: {host}\r\nContent-Length: 3\r\nX: a\r\n b\r\n\r\nxyz",
            "OPTIONS {url}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
        )
    )
    async with proxy() as (door, port):
        whole = await talk(port, raw)
        bytewise = await talk(port, *(raw[at : at + 97] for at in range(0, len(raw), 97)))
    for answer in (whole, bytewise):
        client = h11.Connection(h11.CLIENT)
        statuses = []
        for method in ("GET", "HEAD", "GET", "POST", "POST", "OPTIONS"):
            client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
            client.send(h11.EndOfMessage())
            if method == "GET" and not statuses:
                client.receive_data(answer)
            while not isinstance(event := client.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    statuses.append(event.status_code)
            if method != "OPTIONS":
                client.start_next_cycle()
        assert statuses == [200, 200, 304, 200, 200, 200]
    bodies = [request.body for request in upstream.requests if request.method == "POST"]
    assert bodies == [b"", b"xyz"] * 2
    assert door.use.requests == 12


async def test_tls_ends_here_and_the_names_must_agree(upstream_tls: Upstream) -> None:
    place = f"localhost:{upstream_tls.port}"
    request = f"GET /a HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()
    async with proxy() as (_, port):
        for name in ("localhost", None):  # a client may leave the name out
            async with tunnel(port, place, name) as stream:
                await stream.send(request)
                assert b" 200 " in await all_of(stream)
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream)):
            async with tunnel(port, place, "other.test"):
                pass
        async with tunnel(port, place) as stream:  # another host inside than outside
            await stream.send(request.replace(place.encode(), b"other.test"))
            assert b" 400 " in await all_of(stream)
        async with tunnel(port, "unasked.test:443", None) as stream:
            await stream.send(b"GET / HTTP/1.1\r\nHost: unasked.test\r\nConnection: close\r\n\r\n")
            answer = await all_of(stream)
            assert b" 403 " in answer
            assert b"did not ask for" in answer
    assert len(upstream_tls.requests) == 2


async def test_tunnel_passes_unopened_to_the_host_that_its_tls_names(
    upstream_tls: Upstream,
) -> None:
    """The client trusts the server's authority, and not the gateway's. Twin: without the setting
    it meets the gateway's certificate.
    """
    place = f"localhost:{upstream_tls.port}"
    request = (
        f"POST /a HTTP/1.1\r\nHost: {place}\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    )
    async with proxy(tunnels=("localhost",)) as (door, port):
        async with tunnel(port, place, end=THEIRS) as stream:
            await stream.send(request.encode())
            assert b" 200 " in await stream.receive()
        report = door.use.report()
        assert (report.requests, report.tunnels, report.denied) == (1, 1, 0)
        assert report.bytes_out > len(request)
    async with proxy() as (_, port):
        with pytest.raises(ssl.SSLError):
            async with tunnel(port, place, end=THEIRS):
                pass


async def test_hello_of_a_tunnel_may_come_byte_by_byte(upstream_tls: Upstream) -> None:
    place = f"localhost:{upstream_tls.port}"
    async with proxy(tunnels=("localhost",)) as (door, port):
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            head = f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n"
            await stream.send(head.encode())
            assert b" 200 " in await stream.receive()
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            context = ssl.create_default_context(cadata=THEIRS.certificate)
            client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            for byte in outgoing.read():
                await stream.send(bytes([byte]))
            assert (await stream.receive()).startswith(b"\x16")  # the server's hello
        assert door.use.tunnels == 1


@pytest.mark.parametrize("name", ["other.test", None])
async def test_attack_tunnel_whose_tls_names_another_host_or_none_sends_nothing(
    upstream_tls: Upstream, name: str | None
) -> None:
    async with proxy(tunnels=("localhost",)) as (door, port):
        with pytest.raises((ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream)):
            async with tunnel(port, f"localhost:{upstream_tls.port}", name, THEIRS):
                pass
        assert (door.use.denied, door.use.tunnels) == (1, 0)
    assert upstream_tls.connections == 0


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01"])
async def test_attack_what_is_no_tls_does_not_pass_a_tunnel(
    upstream: Upstream, first: bytes
) -> None:
    place = f"localhost:{upstream.port}"
    async with proxy(tunnels=("localhost",)) as (door, port):
        answer = await talk(
            port, f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode(), first
        )
        assert answer.count(b"HTTP/1.1") == 1  # nothing after the tunnel's own answer
        assert door.use.tunnels == 0
    assert upstream.connections == 0


@pytest.mark.parametrize("verdict", [Verdict.ASK, Verdict.DENY])
async def test_tunnel_that_a_rule_asks_about_or_denies_is_refused(
    upstream_tls: Upstream, verdict: Verdict
) -> None:
    place = f"localhost:{upstream_tls.port}"
    async with proxy(tunnels=("localhost",), decision=Decision(verdict, "rule:one")) as (_, port):
        answer = await talk(port, f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    assert b" 403 " in answer
    assert upstream_tls.connections == 0


async def test_server_with_a_wrong_certificate_gets_nothing() -> None:
    with running_upstream(OURS.context_for("localhost")) as other:
        place = f"localhost:{other.port}"
        async with proxy() as (_, port), tunnel(port, place) as stream:
            head = f"GET / HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n"
            await stream.send(head.encode())
            answer = await all_of(stream)
        assert b" 502 " in answer
        assert b"certificate" in answer
        assert other.requests == []


async def test_attack_name_of_a_private_address_is_refused(upstream: Upstream) -> None:
    async with proxy(is_public=True) as (door, port):
        for host in ("localhost", "127.0.0.1"):
            place = f"{host}:{upstream.port}"
            raw = f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n"
            answer = await talk(port, raw.encode())
            assert b" 403 " in answer
            assert b"not public" in answer
    assert upstream.connections == 0
    assert door.use.denied == 2


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(reset=True), b" 502 "),
        (Reply(raw=b"hello\r\n\r\n"), b" 502 "),
        (Reply(body=b"x" * 90_000, reset_after=10_000), b" 200 "),
        (Reply(endless=True, body=b"y" * 65_536), b" 200 "),
    ],
    ids=["reset", "no HTTP", "cut", "endless"],
)
async def test_server_that_fails_or_never_ends_is_cut_off(
    upstream: Upstream, reply: Reply, told: bytes
) -> None:
    upstream.script("/", reply)
    async with proxy() as (door, port):
        raw = f"GET {upstream.url}/ HTTP/1.1\r\nHost: {upstream.authority}\r\n\r\n"
        answer = await talk(port, raw.encode())
    assert told in answer
    assert len(answer) < 2 << 20
    assert door.use.bytes_in <= (1 << 20) + 65_536


async def test_body_that_never_ends_is_cut_off(upstream: Upstream) -> None:
    head = (
        f"POST {upstream.url}/ HTTP/1.1\r\nHost: {upstream.authority}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    )
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    async with proxy() as (door, port), await anyio.connect_tcp("127.0.0.1", port) as stream:
        await stream.send(head.encode())
        sent = 0
        with suppress(anyio.BrokenResourceError):
            for _ in range(200):
                await stream.send(chunk)
                sent += 1
        assert sent < 200
    assert door.use.bytes_out <= (1 << 20) + 65_536 + 1000


async def test_body_in_chunks_passes_as_it_comes() -> None:
    from aiohttp import web

    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(text="ok")

    application = web.Application()
    application.router.add_post("/", take)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    place = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    raw = (
        f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nTransfer-Encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    async with proxy() as (_, port):
        assert b" 200 " in await talk(
            port, *(raw.encode()[at : at + 9] for at in range(0, len(raw), 9))
        )
    await runner.cleanup()
    assert bodies == [b"abcde"]


async def test_client_that_waits_for_permission_to_send_its_body_gets_it(
    upstream: Upstream,
) -> None:
    async with proxy() as (_, port), await anyio.connect_tcp("127.0.0.1", port) as stream:
        head = (
            f"POST {upstream.url}/ HTTP/1.1\r\nHost: {upstream.authority}\r\nContent-Length: 2\r\n"
            "Expect: 100-continue\r\nConnection: close\r\n\r\n"
        )
        await stream.send(head.encode())
        with anyio.fail_after(DEADLINE_S):
            assert b" 100 " in await stream.receive()
        await stream.send(b"ok")
        assert b" 200 " in await all_of(stream)
    assert upstream.requests[0].body == b"ok"


async def test_attack_flood_of_what_is_no_request_ends_with_the_quota(upstream: Upstream) -> None:
    raw = f"GET / HTTP/1.1\r\nHost: {upstream.authority}\r\n\r\n".encode()
    async with proxy(max_requests=5) as (_, port):
        answers = [await talk(port, raw) for _ in range(12)]
    assert [answer.split()[1] for answer in answers] == [b"400"] * 10 + [b"429"] * 2
    assert upstream.requests == []


async def test_websocket_passes_both_ways() -> None:
    from websockets.asyncio.client import connect
    from websockets.asyncio.server import serve

    async def echo(socket) -> None:
        async for message in socket:
            await socket.send(message)

    async with serve(echo, "127.0.0.1", 0) as server, proxy() as (door, port):
        theirs = server.sockets[0].getsockname()[1]
        async with connect(
            f"ws://localhost:{theirs}/chat", proxy=f"http://127.0.0.1:{port}"
        ) as socket:
            for message in ("hello", os.urandom(100_000)):
                await socket.send(message)
                assert await socket.recv() == message
    assert door.use.bytes_out > 100_000
    assert door.use.bytes_in > 100_000


async def test_many_clients_that_say_nothing_hold_no_other_up(upstream: Upstream) -> None:
    raw = f"GET {upstream.url}/ HTTP/1.1\r\nHost: {upstream.authority}\r\nConnection: close\r\n\r\n"
    async with proxy() as (_, port):
        silent = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(200)]
        for one in silent[:100]:
            await one.send(b"GET http")
        assert b" 200 " in await talk(port, raw.encode())
        for one in silent:
            await one.aclose()
