"""Which place a call gets that names a session, and what is refused before it gets one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.tool import ToolDefinition
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan, make_plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.wall import Walls
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.definitions import by_default, expression_document, registered, request

pytestmark = [pytest.mark.anyio, pytest.mark.row("S6", "S1")]


@dataclass
class Bench:
    engine: Engine
    container: FakeWall
    interpreter: FakeWall

    async def run(self, tool: str = "run_python", **options: Any) -> Envelope:
        arguments = {"expression": "1"} if tool == "calculator" else {"code": "4"}
        return await self.engine.call(tool, arguments, **options)

    def plan(self, document: dict[str, Any], **options: Any) -> Plan:
        return self.plan_of(registered(ToolDefinition.model_validate(document)), **options)

    def plan_of(self, tool: RegisteredTool, **options: Any) -> Plan:
        resolved = ResolvedCall(request(**options), tool, ())
        permitted = PermittedCall(
            ValidatedCall(resolved, {}, ()), self.engine.owner, by_default(resolved.tool.definition)
        )
        walls = Walls(container=self.container, interpreter=self.interpreter)
        return make_plan(permitted, walls, self.engine.sessions)


@pytest.fixture
async def bench(home: Path) -> AsyncIterator[Bench]:
    container, interpreter = FakeWall(limits=CONTAINER_LIMITS), FakeWall()
    config = Config(home=home, sessions={"image": "python"})  # type: ignore[arg-type]
    async with Engine(config=config, container=container, interpreter=interpreter) as engine:
        yield Bench(engine, container, interpreter)


def code(envelope: Envelope) -> str:
    return envelope.error.code if envelope.error is not None else "OK"


async def test_call_with_a_session_runs_in_its_place_and_says_so(bench: Bench) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    for isolation in (None, "session"):
        envelope = await bench.run(session_id=session.id, isolation=isolation)
        assert code(envelope) == "OK", envelope.error
        assert envelope.metadata.sandbox is not None
        assert envelope.metadata.sandbox.isolation == "session"
        assert envelope.metadata.sandbox.limits.memory_mb == 512
    assert [run.held_in for run in bench.container.runs] == ["python", "python"]
    assert bench.engine.sessions.find(bench.engine.owner, session.id).calls == 2
    record = await bench.engine.call_record(envelope.metadata.call_id or "")
    assert record.session_id == session.id


async def test_call_without_a_session_runs_in_the_pool_in_its_language(bench: Bench) -> None:
    envelope = await bench.run()
    assert code(envelope) == "OK"
    (run,) = bench.container.runs
    assert (run.held_in, run.language) == (None, "python")


@pytest.mark.parametrize(
    ("tool", "options", "expected", "field"),
    [
        ("run_python", {"isolation": "session"}, "INVALID_PARAMS", "options.isolation"),
        ("run_python", {"session_id": "sess_no"}, "RESOURCE_NOT_FOUND", None),
        ("calculator", {"session_id": "sess_no"}, "RESOURCE_NOT_FOUND", None),
        ("calculator", {"isolation": "session"}, "INVALID_PARAMS", "options.isolation"),
    ],
)
async def test_session_that_is_not_there_is_refused_before_anything_runs(
    bench: Bench, tool: str, options: dict[str, Any], expected: str, field: str | None
) -> None:
    envelope = await bench.run(tool, **options)
    assert code(envelope) == expected
    assert envelope.error is not None
    if field is not None:
        assert field in (envelope.error.fields or ())
    assert bench.container.runs == bench.interpreter.runs == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"isolation": "call"}, "options.isolation"),
        ({"isolation": "container_per_call"}, "options.isolation"),
        ({"memory_limit_mb": 1024}, "options.memory_limit_mb"),
        ({"memory_limit_mb": 128}, "options.memory_limit_mb"),
    ],
)
async def test_what_a_session_cannot_give_is_refused(
    bench: Bench, options: dict[str, Any], field: str
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    envelope = await bench.run(session_id=session.id, **options)
    assert code(envelope) == "INVALID_PARAMS"
    assert envelope.error is not None
    assert list(envelope.error.fields or ()) == [field]
    assert bench.container.runs == []


async def test_the_session_s_own_size_may_be_asked_for(bench: Bench) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner, memory_mb=256)
    envelope = await bench.run(session_id=session.id, memory_limit_mb=300)
    assert code(envelope) == "OK"
    assert envelope.metadata.sandbox is not None
    assert envelope.metadata.sandbox.limits.memory_mb == 256


async def test_tool_that_may_have_less_memory_than_the_session_has_is_refused(
    bench: Bench,
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    document = {
        "executor": "code:python", "parameters": {"properties": {"code": {}}}, "memory_limit_mb": 256,
    }  # fmt: skip
    with pytest.raises(InvalidParams, match="256 MB of memory at most"):
        bench.plan(expression_document(**document), session_id=session.id)
    twin = bench.plan(
        expression_document(**{**document, "memory_limit_mb": 600}), session_id=session.id
    )
    assert twin.limits.memory_mb == 512


async def test_tool_outside_of_containers_runs_in_its_own_wall_for_the_session_s_domain(
    bench: Bench,
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    envelope = await bench.run("calculator", session_id=session.id)
    assert code(envelope) == "OK"
    (run,) = bench.interpreter.runs
    assert run.domain == TrustDomain(bench.engine.owner.id, None, session.id)
    assert bench.container.runs == []
    await bench.engine.sessions.end(bench.engine.owner, session.id)
    envelope = await bench.run("calculator", session_id=session.id)
    assert code(envelope) == "RESOURCE_NOT_FOUND"


@pytest.mark.parametrize("executor", ["workspace:read", "workspace:list"])
async def test_workspace_tool_needs_a_session_and_gets_its_place(
    bench: Bench, executor: str
) -> None:
    plain = ToolDefinition.model_validate(expression_document())
    tool = replace(registered(plain), definition=plain.model_copy(update={"executor": executor}))
    with pytest.raises(InvalidParams, match="needs a session_id") as caught:
        bench.plan_of(tool)
    assert caught.value.fields == ("options.session_id",)
    session = await bench.engine.sessions.create(bench.engine.owner, image="shell")
    plan = bench.plan_of(tool, session_id=session.id)
    assert plan.placement.is_of_session
    assert plan.session == session
    assert plan.language is None


async def test_language_that_the_session_lacks_is_refused(bench: Bench) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner, image="shell")
    envelope = await bench.run(session_id=session.id)
    assert code(envelope) == "INVALID_PARAMS"
    assert envelope.error is not None
    assert list(envelope.error.fields or ()) == ["options.session_id"]


async def test_dry_run_explains_the_session_and_takes_no_turn(bench: Bench) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    bench.container.held[0].may_run.clear()
    data = (await bench.run(session_id=session.id, dry_run=True)).data
    assert data["would_run"] is True
    assert data["session"] == {
        "id": session.id,
        "image": "python",
        "expires_at": session.model_dump(mode="json")["expires_at"],
        "is_busy": False,
        "runs_in_it": True,
    }
    assert data["placement"]["image"] == "python"
    assert "session" in data["placement"]["why"]
    assert bench.engine.sessions.find(bench.engine.owner, session.id).calls == 0
    outside = (await bench.run("calculator", session_id=session.id, dry_run=True)).data
    assert outside["session"]["runs_in_it"] is False
    assert "image" not in outside["placement"]


async def test_dry_run_of_a_session_that_is_not_there_says_why(bench: Bench) -> None:
    data = (await bench.run(session_id="sess_no", dry_run=True)).data
    assert (data["would_run"], data["refused_with"]) == (False, "RESOURCE_NOT_FOUND")
    assert data["session"] is None


async def test_engine_without_sessions_takes_no_call_that_names_one(bench: Bench) -> None:
    definition = ToolDefinition.model_validate(expression_document())
    resolved = ResolvedCall(request(session_id="s"), registered(definition), ())
    permitted = PermittedCall(
        ValidatedCall(resolved, {}, ()), bench.engine.owner, by_default(resolved.tool.definition)
    )
    with pytest.raises(SandboxUnavailable, match="no sessions"):
        make_plan(permitted, Walls(interpreter=bench.interpreter))


async def test_session_survives_in_the_list_of_the_next_engine_as_ended(home: Path) -> None:
    from fumehood.storage.database import open_database

    database = open_database(home / "state.db")
    config = Config(home=home, sessions={"image": "python"})  # type: ignore[arg-type]
    walls = {"container": FakeWall(limits=CONTAINER_LIMITS), "interpreter": FakeWall()}
    async with Engine(config=config, database=database, **walls) as engine:  # type: ignore[arg-type]
        session = await engine.sessions.create(engine.owner)
    database.close()
    database = open_database(home / "state.db")
    async with Engine(config=config, database=database, **walls) as engine:  # type: ignore[arg-type]
        over = engine.sessions.find(engine.owner, session.id)
        assert (over.state, over.why) == ("ended", "The engine was stopped.")
    database.close()
