"""The preview of a call: its turn in the session, and calls without a preview."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.approvals.preview import preview
from fumehood.core.errors import ResourceNotFound, SandboxUnavailable
from fumehood.core.session import SessionRecord
from fumehood.executors.effects import Effect
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import make_plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from support.container import scripted_wall
from support.definitions import by_default, request

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]


@dataclass
class Bench:
    engine: Engine
    session: SessionRecord

    async def look(self, tool: str, arguments: dict[str, Any], **options: Any) -> Effect | None:
        found = self.engine._made.services.registry.get(tool)
        resolved = ResolvedCall(request(**options), found, ())
        permitted = PermittedCall(
            ValidatedCall(resolved, arguments, ()), self.engine.owner, by_default(found.definition)
        )
        plan = make_plan(permitted, self.engine._made.walls.by_name, self.engine.sessions)
        return await preview(permitted, plan, self.engine.sessions)

    @property
    def record(self) -> SessionRecord:
        return self.engine.sessions.find(self.engine.owner, self.session.id)


@pytest.fixture
async def bench(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.chdir(home.parent)  # the scripted wall's sessions lie here
    config = Config(
        home=home, sessions={"image": "python", "queue_seconds": 0.1},  # type: ignore[arg-type]
    )  # fmt: skip
    async with Engine(config=config, container=scripted_wall()) as engine:
        yield Bench(engine, await engine.sessions.create(engine.owner))


async def test_preview_takes_a_session_turn_without_counting_as_a_call(
    bench: Bench,
) -> None:
    arguments = {"path": "f", "content": "x"}
    found = await bench.look("write_file", arguments, session_id=bench.session.id)
    assert [one["path"] for one in found.shown["added"]] == ["f"]
    assert (bench.record.calls, bench.record.is_busy) == (0, False)
    assert await bench.engine.session_files(bench.session.id).page() is not None


async def test_call_without_preview_takes_no_session_turn(bench: Bench) -> None:
    turn = await bench.engine.sessions.files(bench.engine.owner, bench.session.id)
    async with turn:
        for tool, arguments in (("run_python", {"code": "1"}), ("list_files", {})):
            assert await bench.look(tool, arguments, session_id=bench.session.id) is None
        assert await bench.look("calculator", {"expression": "1"}) is None


async def test_preview_in_busy_or_ended_session_is_refused(
    bench: Bench,
) -> None:
    call = "delete_files", {"paths": ["f"]}
    async with await bench.engine.sessions.files(bench.engine.owner, bench.session.id):
        with pytest.raises(SandboxUnavailable), anyio.fail_after(30):
            await asyncio.create_task(bench.look(*call, session_id=bench.session.id))
    assert await bench.look(*call, session_id=bench.session.id) is not None  # the twin
    await bench.engine.sessions.end(bench.engine.owner, bench.session.id)
    with pytest.raises(ResourceNotFound):
        await bench.look(*call, session_id=bench.session.id)
