"""Takeover of a session: only the next engine commands its guest, whatever programs try.

A program reaches the socket on which the guest listens, because both share a network namespace. The
guest accepts a process of root with a higher epoch, which only `docker exec` makes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from fumehood.core.limits import MB, Limit, Limits
from fumehood.sandbox.container.container import Container, ContainerFailed
from fumehood.sandbox.container.docker_api import Docker
from fumehood.sandbox.images.catalog import Image
from fumehood.sandbox.wall import NO_SINKS
from support.one_container import OneContainer, one_container, taken_over, value_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6", "S11")]

PRETEND = """
import os, socket
def pretend(epoch, count=1):
    heard = []
    for _ in range(count):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect("\\0fumehood-takeover")
            ours, theirs = socket.socketpair()
            try:
                socket.send_fds(end, [str(epoch).encode()], [theirs.fileno(), theirs.fileno()])
                theirs.close()
                ours.settimeout(1)
                heard.append(ours.recv(100))
            except OSError as error:
                heard.append(type(error).__name__.encode())
            ours.close()
    return heard
"""
HEARS_NOTHING = {b"", b"BrokenPipeError", b"ConnectionResetError", b"TimeoutError"}


@pytest.fixture
async def box(python_image: Image) -> AsyncIterator[OneContainer]:
    """A session's container, whose engine has epoch 5."""
    async with one_container(python_image) as box:
        box.container.keep(5, 60)
        await box.python("x = 'mine'")
        yield box


async def test_attack_program_cannot_become_the_host(box: OneContainer) -> None:
    seen = value_of(
        await box.python(f"{PRETEND}\nsorted(set(map(bytes.decode, pretend(99, 50))))", wall_s=90)
    )
    assert {heard.encode() for heard in seen} <= HEARS_NOTHING
    assert box.ended is None
    assert value_of(await box.python("x")) == "mine"


async def test_attack_waiting_connections_of_a_program_do_not_prevent_a_takeover(
    box: OneContainer,
) -> None:
    flood = (
        "import socket, time\n"
        "held = []\n"
        "for _ in range(200):\n"
        "    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "    end.setblocking(False)\n"
        "    try: end.connect('\\0fumehood-takeover')\n"
        "    except OSError: pass\n"
        "    held.append(end)\n"
        "x = 'flooded'\n"
    )
    assert (await box.python(flood)).state == "kept"
    async with taken_over(box, 6) as next_host:
        assert value_of(await next_host.python("x")) == "flooded"


async def test_attack_second_engine_with_an_equal_or_lower_epoch_is_refused(
    box: OneContainer,
) -> None:
    for epoch in (5, 4, 0):
        with pytest.raises(ContainerFailed):
            await Container.take_over(
                Docker(os.environ), box.container.spec, required=frozenset(Limit), epoch=epoch
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
    late = asyncio.ensure_future(
        box.container.run(
            "python",
            {"code": "x = 'late'\nimport time\ntime.sleep(60)", "stdin": None, "files": []},
            Limits(60, 60, box.memory_mb, MB), NO_SINKS, "session", keep=True,
        )
    )  # fmt: skip
    await anyio.sleep(0.3)
    async with taken_over(box, 6) as next_host:
        assert (await late).ended_by.value == "sandbox_lost"
        assert box.container.is_dead
        assert value_of(await next_host.python("x")) == "mine"


async def test_run_of_an_engine_that_is_gone_is_cancelled_and_rolled_back(
    box: OneContainer,
) -> None:
    lost = asyncio.ensure_future(
        box.container.run(
            "python",
            {"code": "x = 'late'\nwhile True: pass", "stdin": None, "files": []},
            Limits(60, 60, box.memory_mb, MB), NO_SINKS, "session", keep=True,
        )
    )  # fmt: skip
    await anyio.sleep(0.3)
    box.container.end("its engine is gone")
    assert (await lost).ended_by.value == "sandbox_lost"
    async with taken_over(box, 6) as next_host:
        assert value_of(await next_host.python("x")) == "mine"


async def test_guest_without_an_engine_ends_after_its_time(python_image: Image) -> None:
    async with one_container(python_image) as box:
        box.container.keep(1, 1.0)
        await box.python("x = 1")
        box.container.end("its engine is gone")
        with anyio.fail_after(20):
            while (await Docker(os.environ).state(box.name)).get("Running"):
                await anyio.sleep(0.1)


async def test_control_guest_outside_a_session_ends_with_its_engine(python_image: Image) -> None:
    async with one_container(python_image) as box:
        await box.python("x = 1")
        box.container.end("its engine is gone")
        with anyio.fail_after(20):
            while (await Docker(os.environ).state(box.name)).get("Running"):
                await anyio.sleep(0.1)
