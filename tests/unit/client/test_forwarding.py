"""Forwarded connections end with whoever leaves first."""

from __future__ import annotations

import socket

import anyio
import pytest

from fumehood.client.forwarding import splice


@pytest.mark.anyio
async def test_browser_that_leaves_holds_no_connection() -> None:
    browser, ours = socket.socketpair()
    session, server = socket.socketpair()
    async with (
        await anyio.abc.UNIXSocketStream.from_socket(ours) as caller,
        await anyio.abc.UNIXSocketStream.from_socket(session) as to_session,
    ):
        with server, anyio.fail_after(10):  # a server that never answers, nor reads
            browser.sendall(b"GET / HTTP/1.1")
            browser.close()
            await splice(caller, to_session, may_half_close=False)
            assert server.recv(100) == b"GET / HTTP/1.1"


@pytest.mark.anyio
async def test_program_that_sends_no_more_still_gets_the_answer() -> None:
    program, ours = socket.socketpair()
    session, server = socket.socketpair()
    async with (
        await anyio.abc.UNIXSocketStream.from_socket(ours) as caller,
        await anyio.abc.UNIXSocketStream.from_socket(session) as to_session,
    ):
        with program, server, anyio.fail_after(10):
            program.shutdown(socket.SHUT_WR)
            async with anyio.create_task_group() as group:

                async def answer() -> None:
                    assert await anyio.to_thread.run_sync(server.recv, 100) == b""
                    server.sendall(b"answer")
                    server.close()

                group.start_soon(answer)
                await splice(caller, to_session, may_half_close=True)
            assert program.recv(100) == b"answer"
