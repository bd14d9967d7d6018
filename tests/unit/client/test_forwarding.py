"""Forwarded connections end with whoever leaves first."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from fumehood.client.forwarding import Forwarding, splice
from fumehood.protocol.framing import MAX_PORT_CONNECTIONS


def forwarding(tmp_path: Path) -> Forwarding:
    return Forwarding(tmp_path / "no.sock", None, "s", 80, False, lambda words: None)


@asynccontextmanager
async def serving(tmp_path: Path, local_port: int = 0) -> AsyncIterator[int]:
    """A forwarded port."""
    links: list[str] = []
    async with anyio.create_task_group() as group:
        group.start_soon(forwarding(tmp_path).serve, local_port, 60, links.append)
        while not links:
            await anyio.sleep(0.01)
        yield int(links[0].rstrip("/").rpartition(":")[2])
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_browser_that_leaves_holds_no_connection() -> None:
    browser, ours = socket.socketpair()
    session, server = socket.socketpair()
    async with (
        await anyio.abc.UNIXSocketStream.from_socket(ours) as caller,
        await anyio.abc.UNIXSocketStream.from_socket(session) as to_session,
    ):
        with server, anyio.fail_after(120):  # a server that never answers, nor reads
            browser.sendall(b"GET / HTTP/1.1")
            browser.close()
            await splice(caller, to_session, may_half_close=False)
            assert server.recv(100) == b"GET / HTTP/1.1"


@pytest.mark.anyio
async def test_attack_many_connections_hold_no_more_than_their_number(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        held = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(MAX_PORT_CONNECTIONS)]
        with anyio.fail_after(120):
            one_more = await anyio.connect_tcp("127.0.0.1", port)
            with pytest.raises(anyio.EndOfStream):
                await one_more.receive()
            await held[0].aclose()
            while True:  # the twin: its place is free again
                twin = await anyio.connect_tcp("127.0.0.1", port)
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    await twin.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
                    assert b"403" in await twin.receive()
                    break
        for one in (*held, one_more, twin):
            await one.aclose()


@pytest.mark.anyio
@pytest.mark.needs("ipv6")
async def test_attack_nobody_else_listens_where_a_browser_may_look_first(tmp_path: Path) -> None:
    """A browser takes `localhost` for `::1`, too."""
    async with serving(tmp_path) as port:
        with (
            socket.socket(socket.AF_INET6) as other,
            pytest.raises(OSError, match=r"in use|assign"),
        ):
            other.bind(("::1", port))
    for family, name in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as free:
            free.bind((name, port))
    with socket.socket(socket.AF_INET6) as other:
        other.bind(("::1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            await forwarding(tmp_path).serve(taken, 60, print)
    async with serving(tmp_path, taken) as port:  # the control
        assert port == taken


@pytest.mark.anyio
async def test_port_is_served_on_a_machine_without_ipv6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = anyio.create_tcp_listener

    async def without(*, local_host: str, local_port: int) -> object:
        if local_host == "::1":
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return await listen(local_host=local_host, local_port=local_port)

    monkeypatch.setattr(anyio, "create_tcp_listener", without)
    async with serving(tmp_path) as port, await anyio.connect_tcp("127.0.0.1", port) as browser:
        await browser.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"403" in await browser.receive()


@pytest.mark.anyio
async def test_program_that_sends_no_more_still_gets_the_answer() -> None:
    program, ours = socket.socketpair()
    session, server = socket.socketpair()
    async with (
        await anyio.abc.UNIXSocketStream.from_socket(ours) as caller,
        await anyio.abc.UNIXSocketStream.from_socket(session) as to_session,
    ):
        with program, server, anyio.fail_after(120):
            program.shutdown(socket.SHUT_WR)
            async with anyio.create_task_group() as group:

                async def answer() -> None:
                    assert await anyio.to_thread.run_sync(server.recv, 100) == b""
                    server.sendall(b"answer")
                    server.close()

                group.start_soon(answer)
                await splice(caller, to_session, may_half_close=True)
            assert program.recv(100) == b"answer"
