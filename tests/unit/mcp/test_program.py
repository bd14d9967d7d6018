"""The host's side of a program behind a front that is hostile."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import anyio
import pytest

from fumehood.mcp.client.program import ContainerProgram, NetworkedProgram
from fumehood.protocol.framing import (
    DATA,
    FRONT_RUN,
    FRONT_STREAMS,
    OPENED,
    WINDOW_BYTES,
    ConnectionFrame,
    taken,
)
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.container.channel import MAX_UNSENT_BYTES
from fumehood.sandbox.wall import AttachedProgram, CallPort, Dial, Network

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Front:
    """What the container sends; it reads nothing."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)

    async def send(self, frame: bytes) -> None:
        record = struct.pack("!BxxxI", 1, len(frame)) + frame
        await asyncio.get_running_loop().sock_sendall(self._end, record)


async def begun(on_open: Callable[[Connection], None]) -> tuple[NetworkedProgram, Front]:
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def remove() -> None:
        its.close()

    def connections(
        run_id: int, send: Callable[[bytes], None], port: CallPort, dial: Dial | None = None
    ) -> Connections:
        return Connections(run_id, send, on_open)

    program = ContainerProgram(AttachedProgram(reader, writer, remove))
    front = Front(its)
    behind = NetworkedProgram(program, Network(connections, "trust"))
    await front.send(ConnectionFrame(OPENED, FRONT_RUN, FRONT_STREAMS).encode())
    return behind, front


async def test_streams_of_the_program_are_its_first_connection() -> None:
    program, front = await begun(lambda connection: None)
    await front.send(ConnectionFrame(DATA, FRONT_RUN, FRONT_STREAMS, b"hello").encode())
    with anyio.fail_after(5):
        assert await program.read() == b"hello"
    await program.stop()


async def test_attack_front_that_reads_nothing_is_cut_off_before_it_fills_the_engine() -> None:
    """It says that it took what it did not read, so that more is sent."""
    sent = 0

    async def serve(connection: Connection) -> None:
        nonlocal sent
        while True:
            await connection.send(b"x" * WINDOW_BYTES)
            sent += WINDOW_BYTES

    tasks: list[asyncio.Task[None]] = []
    program, front = await begun(
        lambda connection: tasks.append(asyncio.ensure_future(serve(connection)))
    )
    await front.send(ConnectionFrame(OPENED, FRONT_RUN, 2).encode())
    with anyio.fail_after(20):
        reading = asyncio.ensure_future(program.read())
        while not reading.done() and sent < 2 * MAX_UNSENT_BYTES:
            await asyncio.sleep(0.001)
            try:
                await front.send(taken(FRONT_RUN, 2, WINDOW_BYTES))
            except OSError:
                break
        assert await reading == b""
    assert sent < MAX_UNSENT_BYTES + 4 * WINDOW_BYTES
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await program.stop()
