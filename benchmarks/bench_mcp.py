"""MCP over stdio: lists, calls and starts, beside a bare server of the official library."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcp import Client, StdioServerParameters

from benchmarks.bench_daemon import FUMEHOOD, Running, run_daemon
from benchmarks.line import Line

TOOLS = 1000
LISTS = 30
PAIRS = 400
WARM_UP = 40
STARTS = 7
HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {},
               "clientInfo": {"name": "bench", "version": "1"}},
}  # fmt: skip
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}


def mcp_lines() -> Iterator[Line]:
    """All lines, with daemons of their own."""
    directory = Path(tempfile.mkdtemp(prefix="fh-", dir="/tmp"))
    try:
        definitions = [_definition(number) for number in range(TOOLS)]
        (directory / "tools.json").write_text(json.dumps({"tools": definitions}))
        with run_daemon({"FUMEHOOD_TOOLS_DIRECTORY": str(directory)}) as daemon:
            yield _list_line(daemon)
    finally:
        shutil.rmtree(directory)
    with run_daemon() as daemon:
        yield _start_line(daemon)
        yield asyncio.run(_call_line(daemon))


def _definition(number: int) -> dict[str, object]:
    properties = {f"parameter_{n}": {"type": "string", "description": "A word."} for n in range(4)}
    return {
        "name": f"tool_{number:04}", "type": "REST", "method": "GET",
        "description": f"Read the thing with the number {number}, and nothing else.",
        "endpoint": f"https://example.org/things/{number}",
        "parameters": {"type": "object", "properties": properties},
    }  # fmt: skip


def _list_line(daemon: Running) -> Line:
    with _server(daemon) as process:
        _ask(process, HELLO)
        listed = json.loads(_ask(process, LIST))["result"]["tools"]
        if len(listed) < TOOLS:
            raise RuntimeError(f"only {len(listed)} tools")
        times = []
        for _ in range(LISTS):
            started = time.perf_counter()
            _ask(process, LIST)
            times.append((time.perf_counter() - started) * 1000)
    ms = statistics.median(times)
    return Line("MCP tools/list of 1,000 tools over stdio", "≤ 20 ms", f"{ms:.1f} ms", ms <= 20)


def _start_line(daemon: Running) -> Line:
    times = []
    for _ in range(STARTS):
        started = time.perf_counter()
        with _server(daemon) as process:
            _ask(process, HELLO)
            times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    return Line(
        "fumehood mcp, start to first answer", "≤ 1 s, aim 0.5 s", f"{seconds:.2f} s", seconds <= 1
    )


async def _call_line(daemon: Running) -> Line:
    environment = _environment(daemon)
    ours = StdioServerParameters(command=str(FUMEHOOD), args=["mcp"], env=environment)
    bare = StdioServerParameters(
        command=sys.executable, args=["-m", "benchmarks.bare_mcp"], env=environment
    )
    async with Client(bare) as first, Client(ours) as second:
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(WARM_UP + PAIRS):
            for client, taken in zip((first, second), times, strict=True):
                started = time.perf_counter()
                result = await client.call_tool("calculator", {"expression": "5! + 2**10"})
                if result.is_error:
                    raise RuntimeError("a call failed")
                if number >= WARM_UP:
                    taken.append((time.perf_counter() - started) * 1000)
    bare_ms, ours_ms = map(statistics.median, times)
    ratio = ours_ms / bare_ms
    return Line(
        "MCP tools/call of calculator / of the bare library's server, over stdio", "≤ 1.5",
        f"{ratio:.2f} ({ours_ms:.2f} ms / {bare_ms:.2f} ms)", ratio <= 1.5,
    )  # fmt: skip


@contextmanager
def _server(daemon: Running) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [str(FUMEHOOD), "mcp"], env=_environment(daemon),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _environment(daemon: Running) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "FUMEHOOD_SOCKET": str(daemon.socket)}


def _ask(process: subprocess.Popen[bytes], message: dict[str, object]) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    return process.stdout.readline()
