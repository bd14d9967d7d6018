"""The host's side of a program behind a front that is hostile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import anyio
import pytest

from fumehood.mcp.client.program import STANDARD, ContainerProgram, NetworkedProgram
from fumehood.protocol.connections import DATA, OPENED, WINDOW_BYTES, Segment, taken
from fumehood.protocol.streams import FRONT_RUN, StreamFrame
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.streams import MAX_UNREAD_BYTES, Stream, StreamKind
from fumehood.sandbox.wall import AttachedProgram

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Front:
    """What the container sends; it reads nothing."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        end.setblocking(False)

    async def send(self, kind: str, segment: Segment, run_id: int = FRONT_RUN) -> None:
        frame = StreamFrame(kind, run_id, segment.encode()).encode()
        await asyncio.get_running_loop().sock_sendall(self._end, frame)


async def begun(on_open: Callable[[Connection], None]) -> tuple[NetworkedProgram, Front]:
    ours, its = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    async def remove() -> None:
        its.close()

    program = ContainerProgram(AttachedProgram(reader, writer, bytes, remove))
    front = Front(its)
    network = Stream(StreamKind("network", "trust"), lambda port: Connections(port, on_open))
    behind = NetworkedProgram(program, network)
    await front.send(STANDARD, Segment(OPENED, 1))
    return behind, front


async def test_streams_of_the_program_are_its_first_connection() -> None:
    program, front = await begun(lambda connection: None)
    await front.send(STANDARD, Segment(DATA, 1, b"hello"))
    with anyio.fail_after(120):
        assert await program.read() == b"hello"
    await program.stop()


@pytest.mark.parametrize(
    ("kind", "run_id", "step"),
    [("exec", FRONT_RUN, OPENED), ("network", 2, OPENED), (STANDARD, 0, OPENED), (STANDARD, 1, 9)],
)
async def test_attack_frame_of_no_open_stream_ends_the_program(
    kind: str, run_id: int, step: int
) -> None:
    program, front = await begun(lambda connection: None)
    await front.send(kind, Segment(step, 7), run_id)
    with anyio.fail_after(120):
        assert await program.read() == b""
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
    await front.send("network", Segment(OPENED, 1))
    with anyio.fail_after(120):
        reading = asyncio.ensure_future(program.read())
        while not reading.done() and sent < 2 * MAX_UNREAD_BYTES:
            await asyncio.sleep(0.001)
            try:
                await front.send("network", taken(1, WINDOW_BYTES))
            except OSError:
                break
        assert await reading == b""
    assert sent < MAX_UNREAD_BYTES + 4 * WINDOW_BYTES
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await program.stop()
