"""Connections of a program, whose guest is hostile."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from fumehood.core.errors import InvalidParams, NetworkError, SandboxUnavailable
from fumehood.protocol.connections import (
    CLOSED,
    DATA,
    FINISHED,
    MAX_CONNECTIONS,
    OPEN,
    OPENED,
    PIECE_BYTES,
    TAKEN,
    WINDOW_BYTES,
    Segment,
)
from fumehood.protocol.framing import GATEWAY_PORT, MAX_PORT_CONNECTIONS, FrameError
from fumehood.sandbox.connections import Connection, Connections
from fumehood.sandbox.ports import PortConnection, PortConnections

pytestmark = pytest.mark.anyio


class Guest:
    """The other end, and the port to it."""

    dial = None

    def __init__(self) -> None:
        self.opened: list[Connection] = []
        self.received: list[Segment] = []
        self.connections = self.begin()

    def begin(self) -> Connections:
        return Connections(self, self.opened.append)

    def send(self, body: bytes) -> None:
        self.received.append(Segment.parse(body))

    def pause(self, *, is_paused: bool) -> None:
        raise AssertionError

    def refuse(self, why: str) -> None:
        raise AssertionError

    def says(self, step: int, number: int = 1, data: bytes = b"") -> None:
        self.connections.on_frame(Segment(step, number, data).encode())

    def count(self, step: int) -> int:
        return sum(
            segment.taken_bytes if step == TAKEN else len(segment.data)
            for segment in self.received
            if segment.step == step
        )


async def test_bytes_pass_both_ways_as_far_as_they_are_taken() -> None:
    guest = Guest()
    guest.says(OPENED)
    (stream,) = guest.opened
    guest.says(DATA, data=b"hello")
    assert await stream.receive() == b"hello"
    assert guest.count(TAKEN) == 5
    async with anyio.create_task_group() as group:
        group.start_soon(stream.send, b"x" * (WINDOW_BYTES + 10))
        await anyio.wait_all_tasks_blocked()
        assert guest.count(DATA) == WINDOW_BYTES  # the rest waits
        guest.says(TAKEN, data=(100).to_bytes(4, "big"))
        await anyio.wait_all_tasks_blocked()
    assert guest.count(DATA) == WINDOW_BYTES + 10
    guest.says(FINISHED)
    with pytest.raises(anyio.EndOfStream):
        await stream.receive()
    await stream.aclose()
    assert guest.received[-1].step == CLOSED


async def test_streams_are_broken_when_the_program_or_its_run_ends() -> None:
    guest = Guest()
    guest.says(OPENED, 1)
    guest.says(OPENED, 2)
    guest.says(CLOSED, 1)
    first, second = guest.opened
    with pytest.raises(anyio.BrokenResourceError):
        await first.receive()
    guest.says(DATA, 1, b"late")  # on its way when it closed
    async with anyio.create_task_group() as group:

        async def read() -> None:
            with pytest.raises(anyio.BrokenResourceError):
                await second.receive()

        group.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        guest.connections.close()
    with pytest.raises(anyio.BrokenResourceError):
        await second.send(b"x")
    guest.says(OPENED, 3)
    assert len(guest.opened) == 2


def send_too_much(guest: Guest) -> None:
    guest.says(OPENED)
    for _ in range(WINDOW_BYTES // PIECE_BYTES):
        guest.says(DATA, data=b"x" * PIECE_BYTES)
    guest.says(DATA, data=b"x")


def take_too_much(guest: Guest) -> None:
    guest.says(OPENED)
    guest.says(TAKEN, data=(1).to_bytes(4, "big"))


def open_too_many(guest: Guest) -> None:
    for number in range(2 * MAX_CONNECTIONS + 1):
        guest.says(OPENED, number + 1)


def open_again(guest: Guest) -> None:
    guest.says(OPENED, 2)
    guest.says(OPENED, 1)


def send_after_the_end(guest: Guest) -> None:
    guest.says(OPENED)
    guest.says(FINISHED)
    guest.says(DATA, data=b"x")


@pytest.mark.parametrize(
    "attack",
    [
        send_too_much, take_too_much, open_too_many, open_again, send_after_the_end,
        lambda guest: guest.says(DATA, 1),
        lambda guest: guest.says(OPEN),
        lambda guest: guest.says(9),
    ],
)  # fmt: skip
async def test_attack_frame_that_breaks_the_protocol_is_noticed(attack) -> None:
    with pytest.raises(FrameError):
        attack(Guest())


class PortGuest(Guest):
    """The other end of connections to ports."""

    ports: PortConnections

    def begin(self) -> Connections:
        self.ports = PortConnections(self)
        return self.ports

    async def connecting(self, port: int = 8000) -> asyncio.Task[PortConnection]:
        task = asyncio.ensure_future(self.ports.connect(port))
        await anyio.wait_all_tasks_blocked()
        return task


async def test_refused_port_is_a_network_error_and_a_wrong_port_is_never_sent() -> None:
    guest = PortGuest()
    task = await guest.connecting()
    guest.says(CLOSED)
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
    assert guest.received[-1].step == CLOSED
    guest.says(OPENED)
    guest.says(DATA, data=b"late")
    with pytest.raises(FrameError):
        guest.says(OPENED)
    with pytest.raises(FrameError):
        guest.says(DATA, number=2)


async def test_number_of_port_connections_is_bounded_and_the_end_breaks_all() -> None:
    guest = PortGuest()
    tasks = [await guest.connecting() for _ in range(MAX_PORT_CONNECTIONS)]
    with pytest.raises(SandboxUnavailable):
        await guest.ports.connect(8000)
    guest.says(OPENED)
    stream = await tasks[0]
    guest.ports.close()
    with pytest.raises(anyio.BrokenResourceError):
        await stream.receive()
    results = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert {type(one) for one in results} == {SandboxUnavailable}


async def test_interrupted_connections_break_and_new_ones_can_be_opened() -> None:
    guest = PortGuest()
    task = await guest.connecting()
    guest.says(OPENED)
    stream = await task
    waiting = await guest.connecting()
    guest.ports.interrupt()
    with pytest.raises(anyio.BrokenResourceError):
        await stream.receive()
    with pytest.raises(SandboxUnavailable):
        await waiting
    guest.says(CLOSED, 1)
    guest.says(OPENED, 2)
    again = await guest.connecting()
    guest.says(OPENED, 3)
    assert isinstance(await again, PortConnection)
