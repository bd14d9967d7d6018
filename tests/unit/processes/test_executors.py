"""The tools for a session's processes, their restart, and what is kept with the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, create_autospec

import pytest

from fumehood import Config, Engine
from fumehood.core.errors import InvalidParams, ResourceNotFound
from fumehood.core.json_types import JsonObject
from fumehood.processes.executors import ReadExecutor
from fumehood.processes.service import NAME, SessionProcesses
from fumehood.sandbox.session_use import SessionLease
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall
from support.recording import RecordingLog

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6")]

SHOWN = {
    "name": "web", "state": "running", "exit_code": None, "signal": None, "lost": False,
    "started_at": 1.5,
}  # fmt: skip


async def test_attack_argument_cannot_choose_another_action_on_processes() -> None:
    """A tool that an operator registers may accept arguments that its schema does not name."""
    lease = create_autospec(SessionLease, instance=True)
    processes = create_autospec(SessionProcesses, instance=True)
    processes.ask = AsyncMock(side_effect=ResourceNotFound("asked"))
    lease.part.return_value = processes
    run: Any = SimpleNamespace(lease=lease, arguments={"name": "a", "do": "stop"})
    with pytest.raises(ResourceNotFound, match="asked"):
        await ReadExecutor().run(run)
    processes.ask.assert_awaited_once_with({"name": "a", "do": "read"})


def guest(asked: list[JsonObject]) -> Callable[[JsonObject], JsonObject]:
    def answer(request: JsonObject) -> JsonObject:
        asked.append(request)
        if request.get("command") == "gone":
            raise InvalidParams("It cannot be started: there is no such program.")
        shown = {**SHOWN, "name": request["name"]}
        return {"process": shown}

    return answer


def has_new_containers(place: FakePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stopped session start in a container with a new name."""
    before = place.until_free

    async def until_free() -> None:
        was_stopped = place.is_stopped
        await before()
        place.name += "+" * was_stopped

    monkeypatch.setattr(place, "until_free", until_free)


async def test_processes_start_again_in_each_new_container_until_they_are_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, asked = open_database(home / FILE_NAME), list[JsonObject]()
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(
        config=config, database=database, container=wall, interpreter=FakeWall()
    ) as engine:
        made = await engine.sessions.create(engine.owner, disk_mb=100, env={"A": "1"})
        wall.held[0].on_processes = guest(asked)
        has_new_containers(wall.held[0], monkeypatch)

        async def call(tool: str, **arguments: Any) -> Any:
            answer = await engine.call(tool, arguments, session_id=made.id)
            return answer.raise_for_error().data

        started = await call("start_process", name="web", command="serve", restart=True)
        assert started["process"]["started_at"] == "1970-01-01T00:00:01.500Z"
        await call("start_process", name="once", command="run")
        env = [{"name": "A", "value": "1"}]
        web = {"do": "start", "name": "web", "command": "serve"}
        assert asked[0] == {**web, "env": env}
        kept = engine.sessions.access(engine.owner, made.id).values
        assert kept == {NAME: {"web": {**web, "started_at": 1.5}}}
        asked.clear()
        await engine.sessions.stop(engine.owner, made.id)
        await engine.sessions.resume(engine.owner, made.id)
        assert asked == [{**web, "env": env}]
        await call("stop_process", name="web")
        asked.clear()
        await engine.sessions.stop(engine.owner, made.id)
        await engine.sessions.resume(engine.owner, made.id)
        assert asked == []
    database.close()


async def test_process_that_cannot_start_again_does_not_keep_a_session_from_running(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, log = list[JsonObject](), RecordingLog()
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(config=config, container=wall, interpreter=FakeWall(), log=log) as engine:
        made = await engine.sessions.create(engine.owner, disk_mb=100)
        kept = {name: {"do": "start", "name": name, "command": name} for name in ("gone", "web")}
        await engine.sessions.keep(made.id, NAME, kept)
        wall.held[0].on_processes = guest(asked)
        has_new_containers(wall.held[0], monkeypatch)
        await engine.sessions.stop(engine.owner, made.id)
        assert (await engine.sessions.resume(engine.owner, made.id)).state == "active"
        assert [one["name"] for one in asked] == ["gone", "web"]
    (event,) = log.named("session.process_not_started")
    assert (event["process"], event["session"]) == ("gone", made.id)
