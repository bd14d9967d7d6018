"""The least grade: what tools, sessions, presets and rules of the policy demand of a container."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.core.envelope import Envelope
from fumehood.core.errors import SandboxUnavailable
from fumehood.core.identity import Principal, Scope
from fumehood.core.limits import Grade, Held, Limit, strongest
from fumehood.identity.model import Agent
from fumehood.policy.model import ExplainWish
from fumehood.registry.definitions import parse_definition
from fumehood.registry.index import Source
from fumehood.sandbox.settings import Preset
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import CONTAINER_LIMITS, FakePlace, FakeWall, SeenRun, always_four
from support.answers import code_of, sandbox_of
from support.definitions import expression_document
from support.wait import settle

pytestmark = [pytest.mark.anyio, pytest.mark.row("B13")]

PROGRAM = {"code": "2 + 2"}
ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


@asynccontextmanager
async def running(
    grade: Grade | None, home: Path, policy: str = "", **config: Any
) -> AsyncIterator[tuple[Engine, FakeWall]]:
    """An engine whose containers have this grade."""
    if policy:
        config["policy_file"] = home / "policy.toml"
        config["policy_file"].write_text(policy)
    wall = FakeWall(limits=CONTAINER_LIMITS, grade=grade)
    settings = Config(home=home, **config)
    async with Engine(config=settings, interpreter=FakeWall(), container=wall) as engine:
        yield engine, wall


def require_refused(answer: Envelope, grade: Grade, least: Grade) -> None:
    """Require that the call was refused for its grade, for good, and that the answer names both."""
    error = answer.error
    assert error is not None
    assert (error.code, error.retryable) == ("SANDBOX_UNAVAILABLE", False)
    assert error.details is not None
    cure = error.details.pop("cure")
    assert error.details == {"grade": grade, "least_grade": least}
    assert str(least) in cure


GRADES = [(grade, least) for grade in Grade for least in Grade]


@pytest.mark.parametrize(("grade", "least"), GRADES)
async def test_tool_runs_only_in_containers_of_its_least_grade(
    grade: Grade, least: Grade, home: Path
) -> None:
    async with running(grade, home) as (engine, wall):
        document = expression_document(
            name="strong", executor="code:python", parameters={"properties": {"code": {}}},
            least_grade=least.value,
        )  # fmt: skip
        engine.registry.register(parse_definition(document), Source.PROGRAM)
        answer = await engine.call("strong", PROGRAM)
        shown = await engine.call("strong", PROGRAM, dry_run=True)
        assert code_of(await engine.call("run_python", PROGRAM)) == "OK"  # the harmless twin
    assert shown.data["would_run"] is grade.is_at_least(least)
    if grade.is_at_least(least):
        assert code_of(answer) == "OK"
        assert [run.limits.least_grade for run in wall.runs] == [least, None]
    else:
        require_refused(answer, grade, least)
        assert len(wall.runs) == 1


@pytest.mark.parametrize("way", ["request", "preset"])
@pytest.mark.parametrize(("grade", "least"), GRADES)
async def test_session_is_made_only_in_a_container_of_its_least_grade(
    way: str, grade: Grade, least: Grade, home: Path
) -> None:
    presets = {"strong": Preset(least_grade=least)}
    wishes = {"least_grade": least} if way == "request" else {"preset": "strong"}
    async with running(grade, home, presets=presets) as (engine, wall):
        if not grade.is_at_least(least):
            with pytest.raises(SandboxUnavailable) as caught:
                await engine.sessions.create(engine.owner, **wishes)
            assert caught.value.may_retry is False
            assert engine.sessions.list(engine.owner) == []
            assert wall.held[0].lost is not None
            return
        session = await engine.sessions.create(engine.owner, **wishes)
        assert session.least_grade is least
        wall.held[0].grade = Grade.WATCHED  # as after a new start on another host
        wall.grade = None
        answer = await engine.call("run_python", PROGRAM, session_id=session.id)
    if Grade.WATCHED.is_at_least(least):
        assert wall.runs[-1].limits.least_grade is least
    else:
        require_refused(answer, Grade.WATCHED, least)


async def test_agent_cannot_lower_the_grade_of_the_preset_to_which_it_is_bound(home: Path) -> None:
    presets = {"strong": Preset(least_grade=Grade.NAMESPACES)}
    async with running(Grade.KERNEL, home, presets=presets) as (engine, _):
        clerk = Agent(id="clerk", principals=(engine.owner.id,), presets=("strong",))
        await engine.agents.create(clerk, by=ADMIN, now=engine.now())
        for wish in (None, *Grade):
            made = await engine.sessions.create(engine.owner, agent_id="clerk", least_grade=wish)
            assert made.least_grade is strongest(wish, Grade.NAMESPACES)


RULE = '[[rules]]\nid = "strong"\ndecision = "{}"\ngrade_below = "{}"\n'


@pytest.mark.parametrize("below", [Grade.KERNEL, Grade.NAMESPACES])
@pytest.mark.parametrize("grade", [*Grade, None])
@pytest.mark.parametrize(
    ("decision", "code"), [("deny", "PERMISSION_DENIED"), ("ask", "REQUIRES_HUMAN_APPROVAL")]
)
async def test_rule_matches_weaker_containers_and_keeps_other_calls_from_them(
    decision: str, code: str, grade: Grade | None, below: Grade, home: Path
) -> None:
    is_weaker = grade is not None and not grade.is_at_least(below)
    async with running(grade, home, RULE.format(decision, below)) as (engine, wall):
        answer = await engine.call("run_python", PROGRAM)
        elsewhere = await engine.call("calculator", {"expression": "2 + 2"})
        explained = engine.policy.explain(ExplainWish(tool="run_python", arguments=PROGRAM))
    if grade is None:  # the container itself refuses what needs a grade that it may not have
        code = "SANDBOX_UNAVAILABLE"
    runs = is_weaker is False and grade is not None
    assert code_of(answer) == ("OK" if runs else code)
    assert [run.limits.least_grade for run in wall.runs] == ([below] if runs else [])
    assert code_of(elsewhere) == "OK"  # it runs in no container
    (shown,) = explained.rules
    assert shown.matches is is_weaker
    assert shown.parts[-1].says == f"grade_below {below}"
    assert shown.parts[-1].holds is is_weaker


@pytest.mark.parametrize("grade", [*Grade, None])
async def test_rule_in_shadow_mode_keeps_no_call_from_any_container(
    grade: Grade | None, home: Path
) -> None:
    rule = RULE.format("deny", "kernel") + 'mode = "shadow"\n'
    async with running(grade, home, rule) as (engine, wall):
        assert code_of(await engine.call("run_python", PROGRAM)) == "OK"
    assert [run.limits.least_grade for run in wall.runs] == [None]


async def test_rule_tests_the_container_of_the_session_and_not_the_last_one(home: Path) -> None:
    async with running(Grade.KERNEL, home, RULE.format("deny", "namespaces")) as (engine, wall):
        session = await engine.sessions.create(engine.owner)
        assert code_of(await engine.call("run_python", PROGRAM, session_id=session.id)) == "OK"
        wall.held[0].grade = Grade.WATCHED
        answer = await engine.call("run_python", PROGRAM, session_id=session.id)
    assert code_of(answer) == "PERMISSION_DENIED"


async def test_call_that_the_policy_has_allowed_reaches_no_weaker_container(home: Path) -> None:
    """The session's container is replaced between the decision and the run."""
    async with running(Grade.KERNEL, home, RULE.format("deny", "namespaces")) as (engine, wall):
        session = await engine.sessions.create(engine.owner)
        first = wall.held[0]
        first.may_run.clear()
        async with anyio.create_task_group() as group:
            answers: list[Envelope] = []

            async def call() -> None:
                answers.append(await engine.call("run_python", PROGRAM, session_id=session.id))

            group.start_soon(call)
            await settle()
            group.start_soon(call)  # decided, and waits for its turn
            await settle()
            first.grade = Grade.WATCHED
            first.may_run.set()
    assert [code_of(answer) for answer in answers] == ["OK", "SANDBOX_UNAVAILABLE"]


@pytest.mark.parametrize("tool", ["start_process", "run_python"])
async def test_process_of_a_session_starts_only_in_a_container_of_the_least_grade(
    tool: str, home: Path
) -> None:
    asked: list[Any] = []
    arguments = PROGRAM if tool == "run_python" else {"name": "server", "command": "sleep 9"}
    rules = RULE.format("deny", "namespaces").replace("[[rules]]", f'[[rules]]\ntools = ["{tool}"]')
    async with running(Grade.KERNEL, home, rules) as (engine, wall):
        session = await engine.sessions.create(engine.owner, disk_mb=64)
        place = wall.held[0]
        place.on_processes = lambda request: asked.append(request["do"]) or {"processes": []}
        await place.stop()
        place.grade = None  # it is not known which container will start
        wall.grade = Grade.KERNEL
        place.until_free = partial(restart_weaker, place)  # type: ignore[method-assign]
        answer = await engine.call(tool, arguments, session_id=session.id)
    assert code_of(answer) == "SANDBOX_UNAVAILABLE"
    assert (asked, wall.runs) == ([], [])


async def restart_weaker(place: FakePlace) -> None:
    place.is_stopped, place.grade = False, Grade.WATCHED


async def test_answer_and_readiness_say_how_each_limit_is_held(home: Path) -> None:
    held = {Limit.MEMORY: Held.WATCHED, Limit.FILES: Held.ENFORCED}

    def answer(run: SeenRun) -> RunEnding:
        ending = always_four(run)
        return RunEnding(
            ending.ended_by, "call", exit_code=0, result=ending.result, runtime="direct",
            grade=Grade.WATCHED, held=held,
        )  # fmt: skip

    async with running(Grade.WATCHED, home) as (engine, wall):
        wall.answer = answer
        program = sandbox_of(await engine.call("run_python", PROGRAM)).model_dump(mode="json")
        other = sandbox_of(await engine.call("calculator", {"expression": "1"})).model_dump()
        ready = engine.ready().walls["container"]
    assert program["held"] == {"memory": "watched", "files": "enforced"}
    assert (program["runtime"], program["grade"]) == ("direct", "watched")
    assert {"held", "runtime", "grade"}.isdisjoint(other)
    assert ready.grade is Grade.WATCHED
    assert "the guest watches memory" in (ready.why or "")
