"""A REST tool's call against the bare client: the same request, on a kept connection, in turn."""

from __future__ import annotations

import asyncio
import multiprocessing
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpcore2
import httpx2

from benchmarks.line import Line
from fumehood import Config, Engine
from fumehood.registry.secrets import RestSettings

PAIRS = 3000
WARM_UP = 200
BODY = b'{"city": "Oslo", "degrees": 12.5}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)

Ask = Callable[[], Awaitable[bool]]


def rest_lines() -> Iterator[Line]:
    """Every line of this file."""
    home = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    listener = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listener,))
    server.start()
    try:
        yield from asyncio.run(ratios(home, listener.getsockname()[1]))
    finally:
        server.terminate()
        server.join()
        listener.close()
        shutil.rmtree(home, ignore_errors=True)


def serve(listener: socket.socket) -> None:
    """Answer the GETs of one connection after the other; the least that a service can cost."""

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            self.transport.write(ANSWER)  # type: ignore[attr-defined]

    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(Answering, sock=listener)
        await server.serve_forever()

    asyncio.run(forever())


async def ratios(home: Path, port: int) -> list[Line]:
    authority, url = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}/now?city=Oslo"
    tool = {
        "name": "get_weather",
        "type": "REST",
        "description": "Read the weather of a city.",
        "method": "GET",
        "endpoint": f"http://{authority}/now",
        "parameters": {"properties": {"city": {"type": "string"}}},
    }
    config = Config(home=home, rest=RestSettings(allowed_hosts=(authority,)))
    async with (
        Engine(tools=[tool], config=config) as engine,
        httpx2.AsyncClient(trust_env=False) as client,
        httpcore2.AsyncConnectionPool() as pool,
    ):

        async def call() -> bool:
            return (await engine.call("get_weather", {"city": "Oslo"})).success

        async def with_client() -> bool:
            return bool((await client.get(url)).json())

        async def with_transport() -> bool:
            return (await pool.request("GET", url, headers={"host": authority})).content == BODY

        return [
            await line("httpx2", with_client, call, 2.0),
            await line("its transport, httpcore2", with_transport, call, None),
        ]


async def line(name: str, bare: Ask, call: Ask, target: float | None) -> Line:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + PAIRS):
        for ask, taken in zip((bare, call), times, strict=True):
            before = time.perf_counter()
            if not await ask():
                raise RuntimeError("wrong answer")
            if number >= WARM_UP:
                taken.append(time.perf_counter() - before)
    bare_ms, call_ms = (statistics.median(taken) * 1e3 for taken in times)
    ratio = call_ms / bare_ms
    return Line(
        f"REST call / the same request, both on a kept connection, {name}",
        f"≤ {target:g}" if target else "–",
        f"{ratio:.2f} ({call_ms:.3f} ms / {bare_ms:.3f} ms)",
        ratio <= target if target else None,
    )
