"""Registered processes and ports of a session, in real containers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.core.errors import InvalidParams, NetworkError, ResourceNotFound, SandboxUnavailable
from fumehood.core.session import SessionRecord
from fumehood.processes.arguments import checked
from fumehood.protocol.framing import MAX_INPUT_BYTES, MAX_PROCESSES
from fumehood.sandbox.container.wall import HeldContainer
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.ports import PORTS, PortConnection
from fumehood.storage.database import open_database
from support.one_container import OneContainer, one_container, taken_over, value_of
from support.processes_beside import (
    WAIT_S,
    ask,
    count_of,
    in_container,
    start,
    state_of,
    until_ended,
    until_printed,
)

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

MAX_WAITING_BYTES = 1 << 20

RUNTIMES = ["runc", pytest.param("runsc", marks=pytest.mark.needs("runsc"))]
SERVER = "exec python3 -m http.server 8000 --bind 127.0.0.1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(
    scope="module", params=["runc", pytest.param("direct", marks=pytest.mark.needs("direct"))]
)
async def shared(
    request: pytest.FixtureRequest, python_image: Image
) -> AsyncIterator[OneContainer]:
    """A session's container, whose engine has epoch 5."""
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(5, 60)
        yield box


@pytest.fixture
async def box(shared: OneContainer) -> AsyncIterator[OneContainer]:
    """The container without running processes, which must survive the test."""
    yield shared
    for process in await ask(shared, "list"):
        if process["state"] == "running":
            await ask(shared, "stop", process["name"], grace_s=0)
    assert shared.ended is None, shared.container.complaint


on_both = pytest.mark.parametrize("shared", RUNTIMES, indirect=True)


async def connected(box: OneContainer, port: int) -> PortConnection:
    """A connection to a port, once something listens there."""
    with anyio.fail_after(WAIT_S):
        while True:
            with suppress(NetworkError):
                return await box.container.opened(PORTS).connect(port)
            await anyio.sleep(0.05)


async def fetched(box: OneContainer, request: bytes, port: int = 8000) -> bytes:
    """All that a server answers to a request that ends, once it listens."""
    async with await connected(box, port) as stream:
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
            await box.container.opened(PORTS).connect(8001)
        group.cancel_scope.cancel()


async def test_bytes_pass_both_ways_and_a_connection_lives_across_calls(box: OneContainer) -> None:
    """More than the window, to a server that ends only when its client does."""
    count = (
        "import socket\ns = socket.create_server(('127.0.0.1', 9000))\nc, _ = s.accept()\n"
        "n = 0\nwhile data := c.recv(65536):\n    n += len(data)\n"
        "c.sendall(b'%d' % n + b'y' * 1000000)"
    )
    await ask(box, "start", "count", argv=["python3", "-c", count])
    stream = await connected(box, 9000)
    await stream.send(b"x" * 700_000)
    await box.python("1")
    await stream.send(b"x" * 700_000)
    await stream.send_eof()
    answer = b"".join([piece async for piece in stream])
    await stream.aclose()
    assert answer == b"1400000" + b"y" * 1_000_000


async def test_process_that_cannot_start_is_reported_and_not_listed(box: OneContainer) -> None:
    with pytest.raises(InvalidParams, match="no such program"):
        await ask(box, "start", "never", argv=["nothing-there"])
    with pytest.raises(InvalidParams, match="There is no nowhere"):
        await ask(box, "start", "never", command="true", working_directory="nowhere")
    with pytest.raises(InvalidParams, match="Permission denied"):
        await ask(box, "start", "never", argv=["/etc/passwd"])
    assert "never" not in {one["name"] for one in await ask(box, "list")}
    with pytest.raises(ResourceNotFound):
        await ask(box, "read", "never")


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


@pytest.mark.needs("runsc")
@pytest.mark.parametrize("shared", ["runsc"], indirect=True)
async def test_daemon_ends_where_no_keeper_gets_orphans(box: OneContainer) -> None:
    """Only the first process of a container can be a subreaper in gVisor."""
    await start(box, "d", "sleep 1000 & (setsid sleep 1001 &); echo on; wait")
    await until_printed(box, "d", "on")
    await box.python("1")
    assert (count_of(box, "sleep 1000"), count_of(box, "sleep 1001")) == (1, 0)
    assert (await ask(box, "stop", "d"))["state"] == "ended"
    await start(box, "e", "setsid sleep 1002 & exit 3")
    assert (await until_ended(box, "e"))["exit_code"] == 3
    assert count_of(box, "sleep 1002") == 0


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
    with pytest.raises(InvalidParams, match="runs already"):
        await ask(box, "start", "p0", argv=["sleep", "1000"])
    await ask(box, "stop", "p0")
    await ask(box, "start", "short", argv=["true"])
    await until_ended(box, "short")
    for number in range(1, MAX_PROCESSES):
        await ask(box, "stop", f"p{number}")
    names = {one["name"] for one in await ask(box, "list")}
    assert names == {*(f"p{number}" for number in range(1, MAX_PROCESSES)), "short"}


@pytest.fixture
async def own_box(python_image: Image) -> AsyncIterator[OneContainer]:
    """A container for a test that ends its engine."""
    async with one_container(python_image) as box:
        box.container.keep(5, 60)
        yield box
        assert box.ended is None, box.container.complaint


async def test_next_engine_finds_the_processes_and_their_output(own_box: OneContainer) -> None:
    box = own_box
    await start(box, "a", "echo before; read line; echo $line; exec sleep 1000")
    await start(box, "web", SERVER)
    await until_printed(box, "a", "before")
    await fetched(box, b"GET / HTTP/1.0\r\n\r\n")
    stream = await box.container.opened(PORTS).connect(8000)
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


async def test_unread_input_is_bounded_and_its_end_is_passed_on(box: OneContainer) -> None:
    await start(box, "a", "while [ ! -e /tmp/go ]; do sleep 0.1; done; wc -c")
    piece = "x" * MAX_INPUT_BYTES
    for _ in range(MAX_WAITING_BYTES // MAX_INPUT_BYTES):
        await ask(box, "write", "a", text=piece)
    await ask(box, "write", "a", text=piece)  # the pipe holds that much
    with pytest.raises(InvalidParams, match="has not read"):
        await ask(box, "write", "a", text=piece)
    await ask(box, "write", "a", close=True)
    with pytest.raises(InvalidParams, match="is closed"):
        await ask(box, "write", "a", text="x")
    in_container(box, "touch /tmp/go")
    await until_ended(box, "a")
    count = int((await ask(box, "read", "a"))["text"])
    assert count == MAX_WAITING_BYTES + MAX_INPUT_BYTES


def keeper_of(box: OneContainer, command: str) -> str:
    """The process id of the keeper above a registered process."""
    look = (
        "for one in /proc/[0-9]*; do "
        f"""[ "$(tr '\\0' ' ' < $one/cmdline)" = "{command} " ] && grep PPid: $one/status; done"""
    )
    (_, parent) = in_container(box, look).split()
    return parent


async def test_process_whose_keeper_is_killed_is_lost_with_all_below_it(box: OneContainer) -> None:
    await start(box, "a", "sleep 1001 & exec sleep 1000")
    await start(box, "b", "exec sleep 1002")
    keeper = keeper_of(box, "sleep 1000")
    async with anyio.create_task_group() as group:
        group.start_soon(box.python, "while True: pass")
        await anyio.sleep(0.3)
        in_container(box, f"kill -9 {keeper}")  # as the kernel does for lack of memory
    assert (await until_ended(box, "a"))["lost"] is True
    assert count_of(box, "sleep 1001") == count_of(box, "sleep 1000") == 0
    in_container(box, f"kill -9 {keeper_of(box, 'sleep 1002')}")
    assert (await until_ended(box, "b"))["lost"] is True
    assert count_of(box, "sleep 1002") == 0
    assert value_of(await box.python("1")) == 1


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


def config(home: Path) -> Config:
    return Config.model_validate(
        {
            "home": home,
            "container": {"images": {"python": "python"}, "pool_min": 0, "memory_mb": 128},
            "sessions": {"image": "python"},
        }
    )


def place_of(engine: Engine, session: SessionRecord) -> HeldContainer:
    place = engine.sessions._live[session.id].container  # type: ignore[attr-defined]
    assert isinstance(place, HeldContainer)
    return place


async def test_paused_session_freezes_its_processes_and_the_next_engine_finds_them(
    home: Path, python_image: Image
) -> None:
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        session = await engine.sessions.create(engine.owner)
        place = place_of(engine, session)
        command = "while true; do date +%s%N; sleep 0.01; done"
        await place.processes(checked({"do": "start", "name": "clock", "command": command}))
        assert place.running == 1
        with pytest.raises(NetworkError):
            await place.connect(8000)
        await engine.sessions.pause(engine.owner, session.id)
        for refused in (place.processes({"do": "list"}), place.connect(8000)):
            with pytest.raises(SandboxUnavailable, match="is paused"):
                await refused
    async with Engine(config=config(home), database=database) as engine:
        place = place_of(engine, session)
        await engine.sessions.resume(engine.owner, session.id)
        with anyio.fail_after(WAIT_S):
            while place.running != 1:
                await anyio.sleep(0.02)
        before = (await place.processes(checked({"do": "read", "name": "clock"})))["output"][
            "offset"
        ]
        await anyio.sleep(0.1)
        output = (await place.processes(checked({"do": "read", "name": "clock", "after": before})))[
            "output"
        ]
        assert output["text"]
        stopped = await place.processes(checked({"do": "stop", "name": "clock"}))
        assert stopped["process"]["state"] == "ended"
        assert place.running == 0
        await engine.sessions.end(engine.owner, session.id)
    database.close()


async def test_container_that_is_no_sessions_refuses_processes_and_ports(
    python_image: Image,
) -> None:
    async with one_container(python_image) as box:
        with pytest.raises(SandboxUnavailable, match="Only"):
            await ask(box, "start", "a", command="true")
        with pytest.raises(NetworkError):
            await box.container.opened(PORTS).connect(8000)
        assert value_of(await box.python("1", keep=False)) == 1
