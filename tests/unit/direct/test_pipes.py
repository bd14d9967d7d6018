"""The streams of a sandbox, on real pipes."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from fumehood.direct.pipes import PipeStreams
from fumehood.sandbox.container.runtime import Receiver

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


class Heard(Receiver):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.out = self.errors = b""
        self.ends = 0
        self.is_paused = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.out += data

    def errors_received(self, chunk: bytes) -> None:
        self.errors += chunk

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.ends += 1
        self.lost.set()


async def until(condition: object) -> None:
    with anyio.fail_after(60):
        while not condition():  # type: ignore[operator]
            await anyio.sleep(0.01)


async def connected() -> tuple[Heard, tuple[int, int, int]]:
    streams, theirs = PipeStreams.pair()
    heard = Heard()
    await streams.connect(heard)
    assert heard.transport is not None
    return heard, theirs


async def test_bytes_arrive_on_their_own_stream() -> None:
    heard, (stdin, stdout, stderr) = await connected()
    os.write(stdout, b"out")
    os.write(stderr, b"errors")
    assert heard.transport is not None
    heard.transport.write(b"in")
    await until(lambda: (heard.out, heard.errors) == (b"out", b"errors"))
    assert os.read(stdin, 10) == b"in"
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    await heard.lost.wait()


async def test_end_of_the_output_is_reported_once_and_closes_the_input() -> None:
    heard, (stdin, stdout, stderr) = await connected()
    os.close(stdout)
    with anyio.fail_after(60):
        await heard.lost.wait()
    assert os.read(stdin, 10) == b""
    os.close(stderr)
    os.close(stdin)
    await anyio.sleep(0.05)
    assert heard.ends == 1


async def test_process_that_reads_nothing_holds_the_writer_back() -> None:
    heard, (stdin, stdout, stderr) = await connected()
    assert heard.transport is not None
    heard.transport.write(b"x" * (1 << 20))
    await until(lambda: heard.is_paused)
    assert heard.transport.get_write_buffer_size() > 0
    os.set_blocking(stdin, False)
    with anyio.fail_after(60):
        while heard.is_paused:
            with suppress(BlockingIOError):
                os.read(stdin, 1 << 20)
            await anyio.lowlevel.checkpoint()
    heard.transport.abort()
    with anyio.fail_after(60):
        await heard.lost.wait()
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)


@pytest.mark.parametrize("steps", [("close", "abort"), ("abort", "abort"), ("abort", "close")])
async def test_streams_can_be_closed_twice(steps: tuple[str, str]) -> None:
    heard, theirs = await connected()
    for step in steps:
        getattr(heard.transport, step)()
    with anyio.fail_after(60):
        await heard.lost.wait()
    for descriptor in theirs:
        os.close(descriptor)
    await anyio.sleep(0.05)
    assert heard.ends == 1
