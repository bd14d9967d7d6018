"""Sessions on a real Docker: full memory, killed containers, and guests of other engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.core.envelope import Envelope
from fumehood.core.session import SessionRecord
from fumehood.sandbox.container import channel
from fumehood.sandbox.container import wall as wall_module
from fumehood.sandbox.container.wall import ContainerWall
from fumehood.sandbox.images.catalog import Image
from fumehood.storage.database import open_database
from fumehood.storage.directory import owner_id
from support.answers import code_of, error_of
from support.containers import containers_of, kill_container, kill_init_of

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("S6")]

SLOW_S = 60.0
"""Deadline on a busy host with several concurrent containers, in seconds."""


def config(home: Path, **sessions: Any) -> Config:
    return Config.model_validate(
        {
            "home": home,
            "container": {"images": {"python": "python"}, "pool_min": 0, "memory_mb": 128},
            "sessions": {"image": "python", **sessions},
        }
    )


@pytest.fixture
async def engine(home: Path, python_image: Image) -> AsyncIterator[Engine]:
    async with Engine(config=config(home)) as running:
        yield running


async def run(engine: Engine, session: SessionRecord, code: str, **options: Any) -> Envelope:
    with anyio.fail_after(SLOW_S):
        return await engine.call("run_python", {"code": code}, session_id=session.id, **options)


async def create(engine: Engine, **wishes: Any) -> SessionRecord:
    with anyio.fail_after(SLOW_S):
        return await engine.sessions.create(engine.owner, **wishes)


async def value(engine: Engine, session: SessionRecord, code: str) -> Any:
    envelope = await run(engine, session, code)
    assert envelope.success, envelope.error
    return envelope.data["value"]


def place_of(engine: Engine, session: SessionRecord) -> str:
    return engine.sessions._live[session.id].container.name  # type: ignore[attr-defined]


def running(engine: Engine) -> list[str]:
    wall = engine._made.walls.container
    assert isinstance(wall, ContainerWall)
    found = containers_of(f"fumehood.engine={wall._supply._identity.engine_id}")
    return [one["Name"].removeprefix("/") for one in found]


async def until(condition: Any) -> None:
    with anyio.fail_after(SLOW_S):
        while not condition():
            await anyio.sleep(0.02)


async def test_oom_keeps_the_session_and_a_killed_container_loses_the_run(
    engine: Engine,
) -> None:
    session = await create(engine)
    await run(engine, session, "x = 1")
    full = await run(engine, session, "hoard = [bytearray(1 << 20) for _ in range(1000)]")
    assert code_of(full) == "MEMORY_LIMIT_EXCEEDED"
    assert await value(engine, session, "x") == 1
    answers: list[Envelope] = []

    async def call() -> None:
        answers.append(await run(engine, session, "while True: pass"))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await until(lambda: engine.sessions.find(engine.owner, session.id).is_busy)
        kill_container(place_of(engine, session))
    (lost,) = answers
    assert code_of(lost) == "SANDBOX_UNAVAILABLE"


async def test_session_with_killed_container_is_lost_and_refuses_calls(engine: Engine) -> None:
    session, other = await create(engine), await create(engine)
    await run(engine, session, "x = 1")
    name = place_of(engine, session)
    kill_container(name)
    await until(lambda: engine.sessions.find(engine.owner, session.id).state == "lost")
    after = await run(engine, session, "x")
    assert code_of(after) == "RESOURCE_NOT_FOUND"
    assert error_of(after).details == {"state": "lost"}
    assert "files and variables are gone" in error_of(after).message
    assert await value(engine, other, "1") == 1
    await until(lambda: name not in running(engine))


@pytest.mark.parametrize("runtime", [None, pytest.param("runsc", marks=pytest.mark.needs("runsc"))])
async def test_container_killed_while_it_is_frozen_is_noticed(
    home: Path, python_image: Image, monkeypatch: pytest.MonkeyPatch, runtime: str | None
) -> None:
    """Its init is killed: on version 1 of cgroups it stays until it goes on. Twin: one that is
    only frozen.
    """
    monkeypatch.setattr(wall_module, "LOOK_AGAIN_S", 0.1)
    chosen = config(home)
    container = chosen.container.model_copy(update={"runtime": runtime})
    async with Engine(config=chosen.model_copy(update={"container": container})) as engine:
        killed, frozen = await create(engine), await create(engine)
        assert await value(engine, frozen, "x = 1\nx") == 1
        for session in (killed, frozen):
            await engine.sessions.pause(engine.owner, session.id)
        kill_init_of(place_of(engine, killed))
        await until(lambda: engine.sessions.find(engine.owner, killed.id).state == "lost")
        assert engine.sessions.find(engine.owner, frozen.id).state == "paused"
        assert await value(engine, frozen, "x") == 1


async def test_frozen_container_that_the_next_engine_has_not_taken_over_and_dies_is_noticed(
    home: Path, python_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wall_module, "LOOK_AGAIN_S", 0.1)
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        session = await create(engine, name="build")
        await engine.sessions.pause(engine.owner, session.id)
        name = place_of(engine, session)
    async with Engine(config=config(home), database=database) as engine:
        assert engine.sessions.find(engine.owner, "build").state == "paused"
        kill_container(name)
        await until(lambda: engine.sessions.find(engine.owner, "build").state == "lost")
    database.close()


async def test_upload_of_an_engine_that_is_gone_leaves_nothing_and_one_in_progress_goes_on(
    home: Path, python_image: Image
) -> None:
    """As after a kill: nobody has ended the upload. Programs would see it, its owner could not."""
    look = "import os\nsorted(os.listdir())"
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        session = await create(engine)
        upload = engine.session_files(session.id).upload("d/a", "replace")
        await upload.__aenter__()
        await upload.feed(b"half")
        (left,) = await value(engine, session, look)
        assert left.startswith(".fumehood-upload-")
    async with Engine(config=config(home), database=database) as engine:
        assert await value(engine, session, look) == []
        async with engine.session_files(session.id).upload("b", "replace") as other:
            await other.feed(b"first, ")
            assert len(await value(engine, session, look)) == 1
            await other.feed(b"second")
            assert await other.finish() == 13
        assert await value(engine, session, "open('b').read()") == "first, second"
        assert await value(engine, session, look) == ["b"]
    database.close()


@pytest.mark.needs("disks")
@pytest.mark.parametrize(
    "change", ["frames", pytest.param("runtime", marks=pytest.mark.needs("runsc"))]
)
async def test_guest_with_other_frames_or_runtime_is_not_taken_over_and_a_disk_is_kept(
    home: Path, python_image: Image, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Guests of other versions have other frames. The operator can configure another runtime."""
    database = open_database(home / "state.db")
    async with Engine(config=config(home), database=database) as engine:
        in_memory, on_disk = await create(engine), await create(engine, disk_mb=16)
        for session in (in_memory, on_disk):
            await run(engine, session, "x = 1\nopen('a', 'w').write('kept')")
    with monkeypatch.context() as patched:
        if change == "frames":
            patched.setattr(channel, "GuestReady", bytes)
        else:
            patched.setenv("FUMEHOOD_CONTAINER__RUNTIME", "runsc")
        async with Engine(config=config(home), database=database) as engine:
            await until(lambda: engine.sessions.find(engine.owner, on_disk.id).state == "stopped")
            await until(lambda: engine.sessions.find(engine.owner, in_memory.id).state == "lost")
    async with Engine(config=config(home), database=database) as engine:
        look = "open('a').read(), 'x' in globals()"
        assert await value(engine, on_disk, look) == ["kept", False]
        await engine.sessions.end(engine.owner, on_disk.id)
        await until(lambda: not containers_of(f"fumehood.owner={owner_id(home)}"))
    database.close()
