"""Connections of a program, whose guest is hostile."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from fumehood.core.errors import InvalidParams, NetworkError, SandboxUnavailable
from fumehood.protocol.framing import (
    CLOSED,
    DATA,
    FINISHED,
    GATEWAY_PORT,
    MAX_CONNECTIONS,
    MAX_PORT_CONNECTIONS,
    OPENED,
    PIECE_BYTES,
    PORTS_RUN,
    TAKEN,
    WINDOW_BYTES,
    ConnectionFrame,
    Decoder,
    FrameError,
)
from fumehood.sandbox.connections import (
    Connection,
    Connections,
    PortConnection,
    PortConnections,
)

pytestmark = pytest.mark.anyio
RUN = 7


class Guest:
    """The other end."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.received: list[ConnectionFrame] = []
        self.connections = Connections(RUN, self.take, self.opened.append)

    def take(self, frame: bytes) -> None:
        self.received += map(ConnectionFrame.parse, Decoder(1 << 20).bodies(frame))

    def send(self, kind: int, number: int = 1, data: bytes = b"", run_id: int = RUN) -> None:
        (body,) = Decoder(1 << 20).bodies(ConnectionFrame(kind, run_id, number, data).encode())
        self.connections.on_frame(ConnectionFrame.parse(body))

    def count(self, kind: int) -> int:
        return sum(
            frame.taken_bytes if kind == TAKEN else len(frame.data)
            for frame in self.received
            if frame.kind == kind
        )


async def test_bytes_pass_both_ways_as_far_as_they_are_taken() -> None:
    guest = Guest()
    guest.send(OPENED)
    (stream,) = guest.opened
    guest.send(DATA, data=b"hello")
    assert await stream.receive() == b"hello"
    assert guest.count(TAKEN) == 5
    async with anyio.create_task_group() as group:
        group.start_soon(stream.send, b"x" * (WINDOW_BYTES + 10))
        await anyio.wait_all_tasks_blocked()
        assert guest.count(DATA) == WINDOW_BYTES  # the rest waits
        guest.send(TAKEN, data=(100).to_bytes(4, "big"))
        await anyio.wait_all_tasks_blocked()
    assert guest.count(DATA) == WINDOW_BYTES + 10
    guest.send(FINISHED)
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()
    await stream.aclose()
    assert guest.received[-1].kind == CLOSED


async def test_streams_are_broken_when_the_program_or_its_run_ends() -> None:
    guest = Guest()
    guest.send(OPENED, 1)
    guest.send(OPENED, 2)
    guest.send(CLOSED, 1)
    first, second = guest.opened
    with pytest.raises(anyio.BrokenResourceError):
        await first.receive()
    guest.send(DATA, 1, b"late")  # on its way when it closed
    async with anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await second.receive()

        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        guest.connections.close()
    with pytest.raises(anyio.BrokenResourceError):
        await second.send(b"x")
    guest.send(OPENED, 3)
    assert len(guest.opened) == 2


def send_too_much(guest: Guest) -> None:
    guest.send(OPENED)
    for _ in range(WINDOW_BYTES // PIECE_BYTES):
        guest.send(DATA, data=b"x" * PIECE_BYTES)
    guest.send(DATA, data=b"x")


def take_too_much(guest: Guest) -> None:
    guest.send(OPENED)
    guest.send(TAKEN, data=(1).to_bytes(4, "big"))


def open_too_many(guest: Guest) -> None:
    for number in range(2 * MAX_CONNECTIONS + 1):
        guest.send(OPENED, number + 1)


def open_again(guest: Guest) -> None:
    guest.send(OPENED, 2)
    guest.send(OPENED, 1)


def send_after_the_end(guest: Guest) -> None:
    guest.send(OPENED)
    guest.send(FINISHED)
    guest.send(DATA, data=b"x")


@pytest.mark.parametrize(
    "attack",
    [
        send_too_much, take_too_much, open_too_many, open_again, send_after_the_end,
        lambda guest: guest.send(DATA, 1),
        lambda guest: guest.send(OPENED, run_id=RUN + 1),
        lambda guest: guest.send(9),
    ],
)  # fmt: skip
async def test_attack_frame_that_breaks_the_protocol_is_noticed(attack) -> None:
    with pytest.raises(FrameError):
        attack(Guest())


@pytest.mark.parametrize(
    "body", [b"\0", b"\0" * 8, b"\0\1" + b"\0" * 8 + b"x" * (PIECE_BYTES + 1), b"\0\0" + b"\0" * 8]
)
def test_attack_body_that_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        ConnectionFrame.parse(body)


class PortGuest:
    """The other end of connections to ports."""

    def __init__(self) -> None:
        self.received: list[ConnectionFrame] = []
        self.ports = PortConnections(self.take)

    def take(self, frame: bytes) -> None:
        self.received += map(ConnectionFrame.parse, Decoder(1 << 20).bodies(frame))

    def send(self, kind: int, number: int = 1, data: bytes = b"") -> None:
        self.ports.on_frame(ConnectionFrame(kind, PORTS_RUN, number, data))

    async def connecting(self, port: int = 8000) -> asyncio.Task[PortConnection]:
        task = asyncio.ensure_future(self.ports.connect(port))
        await anyio.wait_all_tasks_blocked()
        return task


async def test_refused_port_is_a_network_error_and_a_wrong_port_is_never_sent() -> None:
    guest = PortGuest()
    task = await guest.connecting()
    guest.send(CLOSED)
    with pytest.raises(NetworkError):
        await task
    sent = len(guest.received)
    for port in (0, -1, GATEWAY_PORT, 65536):
        with pytest.raises(InvalidParams):
            await guest.ports.connect(port)
    assert len(guest.received) == sent


async def test_answer_to_a_given_up_connection_is_dropped_and_another_one_is_not() -> None:
    guest = PortGuest()
    task = await guest.connecting()
    task.cancel()
    await anyio.wait_all_tasks_blocked()
    assert guest.received[-1].kind == CLOSED
    guest.send(OPENED)
    guest.send(DATA, data=b"late")
    with pytest.raises(FrameError):
        guest.send(OPENED)
    with pytest.raises(FrameError):
        guest.send(DATA, number=2)


async def test_number_of_port_connections_is_bounded_and_the_end_breaks_all() -> None:
    guest = PortGuest()
    tasks = [await guest.connecting() for _ in range(MAX_PORT_CONNECTIONS)]
    with pytest.raises(SandboxUnavailable):
        await guest.ports.connect(8000)
    guest.send(OPENED)
    stream = await tasks[0]
    guest.ports.close()
    with pytest.raises(anyio.BrokenResourceError):
        await stream.receive()
    results = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert {type(one) for one in results} == {SandboxUnavailable}
