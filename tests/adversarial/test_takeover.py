"""Takeover of a session: only the next engine commands its guest, whatever programs try.

A program reaches the socket on which the guest listens, because both share a network namespace. The
guest accepts a process of root with a higher epoch, which only the container runtime makes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MB, Limit, Limits
from fumehood.docker.api import Docker
from fumehood.sandbox.container.container import Container, ContainerFailed
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import RunEnding, RunSinks
from support.one_container import OneContainer, one_container, taken_over, value_of
from support.wait import DEADLINE_S

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6", "S11")]

PRETEND = """
import array, os, socket, struct
def pretend(epoch, *more):
    ours, theirs = socket.socketpair()
    fds = array.array("i", [theirs.fileno()] * 3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.connect("\\0fumehood-takeover")
        try:
            end.sendmsg([str(epoch).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds), *more])
        except OSError as error:
            return type(error).__name__
    theirs.close()
    ours.settimeout(1)
    try:
        return ours.recv(100).decode()
    except OSError as error:
        return type(error).__name__
root = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", os.getpid(), 0, 0))
init = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("3i", 1, 0, 0))
sorted({pretend(99, *more) for more in [()] * 50 + [(root,), (init,)]})
"""
HEARS_NOTHING = {"", "ConnectionResetError", "PermissionError", "TimeoutError"}


@pytest.fixture(
    params=[
        "runc",
        pytest.param("runsc", marks=pytest.mark.needs("runsc")),
        pytest.param("direct", marks=pytest.mark.needs("direct")),
    ]
)
async def box(request: pytest.FixtureRequest, python_image: Image) -> AsyncIterator[OneContainer]:
    """A session's container, whose engine has epoch 5."""
    async with one_container(python_image, runtime=request.param) as box:
        box.container.keep(5, 600)
        await box.python("x = 'mine'")
        yield box


async def started(
    box: OneContainer, code: str, program: str = "python", *, until_said: bool = False
) -> asyncio.Future[RunEnding]:
    """A run of a program that does not end by itself, followed as a stream."""
    said = asyncio.Event()
    sinks = RunSinks(output=lambda stream, text: said.set(), is_live=True)
    text = {"shell": "command"}.get(program, "code")
    arguments: JsonObject = {text: code, "stdin": None, "files": []}
    limits = Limits(60, 60, box.memory_mb, 100 * MB)
    run = box.container.run(program, arguments, limits, sinks, "session", keep=True)
    running = asyncio.ensure_future(run)
    with anyio.move_on_after(20 if until_said else 0.3):
        await (said if until_said else asyncio.Event()).wait()
    return running


async def test_attack_program_cannot_become_the_host(box: OneContainer) -> None:
    seen = value_of(await box.python(PRETEND, wall_s=90))
    assert set(seen) <= HEARS_NOTHING
    assert box.ended is None
    assert value_of(await box.python("x")) == "mine"


async def test_attack_flood_of_a_program_does_not_prevent_a_takeover(box: OneContainer) -> None:
    flood = (
        "import os, socket\n"
        "x = 'flooded'\n"
        "end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "end.connect('\\0fumehood-takeover')\n"
        "for _ in range(20000): end.send(b'99')\n"
        "print('flooded', flush=True)\n"
        "while True: end.send(b'99')\n"
    )
    await box.python("x = 'kept'")
    flooding = await started(box, flood)
    async with taken_over(box, 6) as next_host:
        assert value_of(await next_host.python("x")) == "kept"
    assert (await flooding).ended_by.value == "sandbox_lost"


@pytest.mark.parametrize("box", ["runc"], indirect=True)  # the guest compares two numbers
async def test_attack_second_engine_with_an_equal_or_lower_epoch_is_refused(
    box: OneContainer,
) -> None:
    for epoch in (5, 4, 0):
        with pytest.raises(ContainerFailed):
            await Container.take_over(
                Docker(os.environ),
                box.name,
                box.container.image_id,
                required=frozenset(Limit),
                epoch=epoch,
            )
    assert value_of(await box.python("x")) == "mine"


async def test_twin_next_engine_continues_with_variables_and_files(box: OneContainer) -> None:
    await box.python("open('kept.txt', 'w').write('kept')")
    box.container.end("its engine is gone")
    async with taken_over(box, 6) as next_host:
        assert value_of(await next_host.python("x, open('kept.txt').read()")) == ["mine", "kept"]
        next_host.container.end("gone, too")
        async with taken_over(box, 7) as third:
            assert value_of(await third.python("x")) == "mine"


async def test_engine_that_is_still_attached_loses_the_container_to_the_next(
    box: OneContainer,
) -> None:
    late = await started(box, "x = 'late'\nwhile True: print('late', flush=True)")
    async with taken_over(box, 6) as next_host:
        assert (await late).ended_by.value == "sandbox_lost"
        assert box.container.is_dead
        assert value_of(await next_host.python("x")) == "mine"


async def test_run_of_an_engine_that_is_gone_is_cancelled_and_rolled_back(
    box: OneContainer,
) -> None:
    many = "for _ in range(40):\n    if os.fork() == 0: break\n"  # the next engine comes meanwhile
    lost = await started(box, f"import os\nx = 'late'\n{many}while True: pass")
    box.container.end("its engine is gone")
    assert (await lost).ended_by.value == "sandbox_lost"
    async with taken_over(box, 6) as next_host:
        assert value_of(await next_host.python("x")) == "mine"


@pytest.mark.parametrize("program", ["python", "shell"])
async def test_variables_lost_in_a_run_of_an_engine_that_is_gone_are_reported_as_lost(
    box: OneContainer, program: str
) -> None:
    """The program kills the processes that hold them, as no harmless one can."""
    kill = {
        "python": "import os, signal\nfor pid in map(int, filter(str.isdigit, os.listdir('/proc'))):"
        "\n    try: pid in (1, os.getpid()) or os.kill(pid, signal.SIGKILL)\n"
        "    except OSError: pass\nprint('killed', flush=True)\nwhile True: pass",
        "shell": "kill -9 -1; echo killed; while :; do :; done",
    }[program]
    lost = await started(box, kill, program, until_said=True)
    box.container.end("its engine is gone")
    assert (await lost).ended_by.value == "sandbox_lost"
    async with taken_over(box, 6) as next_host:
        ending = await next_host.python("'x' in globals()")
        assert (value_of(ending), ending.state) == (False, "reset")
        assert (await next_host.python("y = 1")).state == "kept"


async def test_guest_without_an_engine_ends_after_its_time(python_image: Image) -> None:
    async with one_container(python_image) as box:
        box.container.keep(1, 1.0)
        await box.python("x = 1")
        box.container.end("its engine is gone")
        with anyio.fail_after(DEADLINE_S):
            while (await Docker(os.environ).state(box.name)).is_running:
                await anyio.sleep(0.1)


async def test_control_guest_outside_a_session_ends_with_its_engine(python_image: Image) -> None:
    async with one_container(python_image) as box:
        await box.python("x = 1")
        box.container.end("its engine is gone")
        with anyio.fail_after(DEADLINE_S):
            while (await Docker(os.environ).state(box.name)).is_running:
                await anyio.sleep(0.1)
