"""Registered processes and ports of a session, in real containers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from fumehood.core.errors import InvalidParams, NetworkError, ResourceNotFound, SandboxUnavailable
from fumehood.protocol.framing import MAX_PROCESSES
from fumehood.sandbox.images.catalog import Image
from support.one_container import OneContainer, one_container, taken_over, value_of
from support.processes_beside import (
    WAIT_S,
    ask,
    count_of,
    start,
    state_of,
    until_ended,
    until_printed,
)

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
SERVER = "exec python3 -m http.server 8000 --bind 127.0.0.1"


@pytest.fixture(params=["runc"])
async def box(request: pytest.FixtureRequest, python_image: Image) -> AsyncIterator[OneContainer]:
    """A session's container, whose engine has epoch 5."""
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(5, 60)
        yield box
        assert box.ended is None, box.container.complaint


on_both = pytest.mark.parametrize("box", RUNTIMES, indirect=True)


async def fetched(box: OneContainer, request: bytes, port: int = 8000) -> bytes:
    """All that a server answers to a request that ends, once it listens."""
    with anyio.fail_after(WAIT_S):
        while True:
            try:
                stream = await box.container.ports.connect(port)
                break
            except NetworkError:
                await anyio.sleep(0.05)
    async with stream:
        await stream.send(request)
        await stream.send_eof()
        return b"".join([piece async for piece in stream])


@on_both
async def test_process_lives_beside_calls_and_its_streams_are_reached(box: OneContainer) -> None:
    await box.python("x = 1")
    await box.shell("mkdir sub")
    started = await ask(
        box, "start", "a", command='read line; echo "$V $line"; pwd; id -u; exec sleep 1000',
        env=[{"name": "V", "value": "given"}], working_directory="sub",
    )  # fmt: skip
    assert (started["state"], started["exit_code"]) == ("running", None)
    await ask(box, "write", "a", text="tïp\n")
    assert await until_printed(box, "a", "10001\n") == "given tïp\n/workspace/sub\n10001\n"
    for _ in range(3):
        assert (await box.python("x += 1")).state == "kept"
    assert value_of(await box.python("x")) == 4
    assert (await box.shell("true")).exit_code == 0
    assert count_of(box, "sleep 1000") == 1
    stopped = await ask(box, "stop", "a")
    assert (stopped["state"], stopped["signal"]) == ("ended", 15)
    assert count_of(box, "sleep 1000") == 0
    assert box.container.processes.running == 0
    with pytest.raises(InvalidParams, match="has ended"):
        await ask(box, "write", "a", text="x")
    assert (await ask(box, "read", "a"))["ended"] is True


@on_both
async def test_server_is_reached_during_a_call_and_other_ports_are_not(box: OneContainer) -> None:
    await box.shell("echo hello > page")
    await start(box, "web", SERVER)
    wanted = b"GET /page HTTP/1.0\r\n\r\n"
    assert (await fetched(box, wanted)).endswith(b"\r\n\r\nhello\n")
    async with anyio.create_task_group() as group:
        group.start_soon(box.python, "while True: pass")
        assert (await fetched(box, wanted)).endswith(b"hello\n")
        with pytest.raises(NetworkError):
            await box.container.ports.connect(8001)
        group.cancel_scope.cancel()


async def test_bytes_pass_both_ways_and_a_connection_lives_across_calls(box: OneContainer) -> None:
    """More than the window, to a server that ends only when its client does."""
    count = (
        "import socket\ns = socket.create_server(('127.0.0.1', 9000))\nc, _ = s.accept()\n"
        "n = 0\nwhile data := c.recv(65536):\n    n += len(data)\n"
        "c.sendall(b'%d' % n + b'y' * 1000000)"
    )
    assert await ask(box, "start", "count", argv=["python3", "-c", count])
    await anyio.lowlevel.checkpoint()
    with anyio.fail_after(WAIT_S):
        while True:
            try:
                stream = await box.container.ports.connect(9000)
                break
            except NetworkError:
                await anyio.sleep(0.05)
    await stream.send(b"x" * 700_000)
    await box.python("1")
    await stream.send(b"x" * 700_000)
    await stream.send_eof()
    answer = b"".join([piece async for piece in stream])
    await stream.aclose()
    assert answer == b"1400000" + b"y" * 1_000_000


async def test_process_that_cannot_start_is_reported_and_not_listed(box: OneContainer) -> None:
    with pytest.raises(InvalidParams, match="no such program"):
        await ask(box, "start", "a", argv=["nothing-there"])
    with pytest.raises(InvalidParams, match="There is no nowhere"):
        await ask(box, "start", "a", command="true", working_directory="nowhere")
    with pytest.raises(InvalidParams, match="Permission denied"):
        await ask(box, "start", "a", argv=["/etc/passwd"])
    assert await ask(box, "list") == []
    with pytest.raises(ResourceNotFound):
        await ask(box, "read", "a")


async def test_daemon_stays_listed_without_streams_until_it_is_stopped(box: OneContainer) -> None:
    await start(box, "d", "setsid sleep 1001 <&- >&- 2>&- & exit 3")
    with anyio.fail_after(WAIT_S):
        while (shown := await state_of(box, "d"))["exit_code"] is None:
            await anyio.sleep(0.02)
    assert (shown["state"], shown["exit_code"]) == ("running", 3)
    await box.python("1")
    assert count_of(box, "sleep 1001") == 1
    assert (await ask(box, "stop", "d"))["state"] == "ended"
    assert count_of(box, "sleep 1001") == 0


async def test_process_that_ignores_sigterm_is_killed_after_the_grace(box: OneContainer) -> None:
    await start(box, "t", "trap '' TERM; echo set; while true; do sleep 0.1; done")
    await until_printed(box, "t", "set")
    stopped = await ask(box, "stop", "t", grace_s=0.3)
    assert (stopped["state"], stopped["signal"]) == ("ended", 9)


async def test_endless_output_keeps_its_last_megabyte_and_calls_go_on(box: OneContainer) -> None:
    await start(box, "yes", "exec yes")
    with anyio.fail_after(WAIT_S):
        while (await ask(box, "read", "yes"))["skipped"] < 10 << 20:
            assert value_of(await box.python("1")) == 1
    await ask(box, "stop", "yes")
    piece = await ask(box, "read", "yes")
    kept = len(piece["text"])
    while not piece["ended"]:
        piece = await ask(box, "read", "yes", after=piece["offset"])
        assert piece["skipped"] == 0
        kept += len(piece["text"])
    assert kept == 1 << 20


async def test_seventeenth_process_is_refused_and_old_ended_ones_are_forgotten(
    box: OneContainer,
) -> None:
    for number in range(MAX_PROCESSES):
        await ask(box, "start", f"p{number}", argv=["sleep", "1000"])
    with pytest.raises(InvalidParams, match="16"):
        await ask(box, "start", "more", argv=["sleep", "1000"])
    with pytest.raises(InvalidParams, match="of this name"):
        await ask(box, "start", "p0", argv=["sleep", "1000"])
    await ask(box, "stop", "p0")
    await ask(box, "start", "short", argv=["true"])
    await until_ended(box, "short")
    for number in range(1, MAX_PROCESSES):
        await ask(box, "stop", f"p{number}")
    names = {one["name"] for one in await ask(box, "list")}
    assert names == {*(f"p{number}" for number in range(1, MAX_PROCESSES)), "short"}


async def test_next_engine_finds_the_processes_and_their_output(box: OneContainer) -> None:
    await start(box, "a", "echo before; read line; echo $line; exec sleep 1000")
    await start(box, "web", SERVER)
    await until_printed(box, "a", "before")
    await fetched(box, b"GET / HTTP/1.0\r\n\r\n")
    stream = await box.container.ports.connect(8000)
    async with taken_over(box, 6) as later:
        with pytest.raises(anyio.BrokenResourceError):
            await stream.receive()
        with anyio.fail_after(WAIT_S):
            while later.container.processes.running != 2:
                await anyio.sleep(0.01)
        await ask(later, "write", "a", text="after\n")
        assert await until_printed(later, "a", "after") == "before\nafter\n"
        assert value_of(await later.python("1")) == 1
        assert (await fetched(later, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 200")
        assert (await ask(later, "stop", "a"))["signal"] == 15
        assert later.ended is None
        box._listener.ended = None  # the earlier host's end is the test's own doing


async def test_cpu_time_of_a_process_is_not_that_of_a_call(box: OneContainer) -> None:
    await start(box, "busy", "while true; do :; done")
    idle = await box.python("import time; time.sleep(1)")
    assert idle.cpu_ms is not None
    assert idle.cpu_ms < 300
    spent = await box.python(
        "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    )
    assert spent.cpu_ms is not None
    assert 450 < spent.cpu_ms < 900
    await ask(box, "stop", "busy")


async def test_container_that_is_no_sessions_refuses_processes_and_ports(
    python_image: Image,
) -> None:
    async with one_container(python_image) as box:
        with pytest.raises(SandboxUnavailable, match="Only"):
            await ask(box, "start", "a", command="true")
        with pytest.raises(NetworkError):
            await box.container.ports.connect(8000)
        assert value_of(await box.python("1", keep=False)) == 1
