"""Admission: limits, walls and sessions, and how a dry run reports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, call_options, tool
from fumehood.approvals.model import ApprovalQuery
from fumehood.call_options import OF_PARTS
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InvalidParams, SandboxUnavailable
from fumehood.core.identity import TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import WallLimits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import ToolRun
from fumehood.parts import parts
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.plan import Plan, can_run_now, make_plan, plan_now, with_options
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.service import HARMLESS_PASSES
from fumehood.registry.index import RegisteredTool
from fumehood.sandbox.host import MAX_REQUESTS, Host
from fumehood.sandbox.wall import HasImages, ImageMissing, WallDown, Walls
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.answers import code_of, error_of
from support.asking import add_approvers
from support.definitions import (
    OWNER,
    by_default,
    expression_document,
    registered,
    request,
    rest_document,
)
from support.upstreams import upstream_bench, weather

pytestmark = pytest.mark.anyio

OFFERED = WallLimits(
    default_wall_s=5,
    max_wall_s=30,
    default_memory_mb=64,
    max_memory_mb=256,
    min_memory_mb=16,
    output_bytes=1000,
)


def _permitted(definition: ToolDefinition, **options: Any) -> PermittedCall:
    resolved = ResolvedCall(request(**options), registered(definition), ())
    return PermittedCall(ValidatedCall(resolved, {}, ()), OWNER, by_default(definition))


def _expression(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate(expression_document(**fields))


def _plan(fields: Any = None, limits: WallLimits = OFFERED, **options: Any) -> Plan:
    wall = FakeWall(limits=limits)
    return make_plan(_permitted(_expression(**(fields or {})), **options), Walls(interpreter=wall))


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("defined", "option", "effective"),
    [
        (None, None, 5),
        (2, None, 2),
        (None, 3, 3),
        (2, 3, 2),
        (3, 2, 2),
        (600, None, 30),
        (None, 600, 30),
        (20, 600, 20),
    ],
)
def test_wall_time_is_the_smallest_of_definition_option_and_ceiling(
    defined: float | None, option: float | None, effective: float
) -> None:
    plan = _plan({"timeout_seconds": defined}, timeout_seconds=option)
    assert plan.limits.wall_s == effective
    assert plan.limits.cpu_s == effective


@pytest.mark.row("T2")
@pytest.mark.parametrize(
    ("defined", "option", "effective"),
    [(None, None, 64), (32, None, 32), (None, 128, 128), (32, 128, 32), (9999, None, 256)],
)
def test_memory_is_the_smallest_of_definition_option_and_ceiling(
    defined: int | None, option: int | None, effective: int
) -> None:
    plan = _plan({"memory_limit_mb": defined}, memory_limit_mb=option)
    assert plan.limits.memory_mb == effective


@pytest.mark.row("T2")
def test_cpu_time_is_capped_at_the_walls_limit() -> None:
    assert _plan(limits=replace(OFFERED, cpu_s=1.0)).limits.cpu_s == 1.0
    assert _plan(limits=replace(OFFERED, cpu_s=100.0)).limits.cpu_s == 5


def test_memory_option_below_minimum_is_refused_by_name() -> None:
    with pytest.raises(InvalidParams, match="at least 16") as caught:
        _plan(memory_limit_mb=15)
    assert caught.value.fields == ("options.memory_limit_mb",)
    assert _plan(memory_limit_mb=16).limits.memory_mb == 16


def _code_plan(fields: Any = None, **options: Any) -> Plan:
    document = expression_document(
        executor="code:python", parameters={"properties": {"code": {}}}, **(fields or {})
    )
    definition = ToolDefinition.model_validate(document)
    walls = Walls(container=FakeWall(limits=CONTAINER_LIMITS), interpreter=FakeWall())
    return make_plan(_permitted(definition, **options), walls)


@pytest.mark.row("T2", "S4", "S5")
@pytest.mark.parametrize(
    ("defined", "option", "effective", "warning"),
    [
        (None, None, 512, None),
        (None, 128, 128, None),
        (200, None, 128, None),
        (None, 200, 128, "200 was asked for, 128 is the next smaller size"),
        (None, 1023, 512, "next smaller size"),
        (256, 1024, 256, "256 is the most that is allowed"),
        (300, 1024, 256, "256 is the most that is allowed"),
        (None, 9999, 2048, "2048 is the most that is allowed"),
    ],
)
def test_container_memory_is_rounded_down_to_a_size_with_a_warning(
    defined: int | None, option: int | None, effective: int, warning: str | None
) -> None:
    plan = _code_plan({"memory_limit_mb": defined}, memory_limit_mb=option)
    assert plan.limits.memory_mb == effective
    assert [warning in said for said in plan.warnings] == ([True] if warning else [])  # type: ignore[operator]


@pytest.mark.row("S1", "S5")
@pytest.mark.parametrize(
    ("isolation", "fresh"), [(None, False), ("call", False), ("container_per_call", True)]
)
def test_only_container_per_call_isolation_needs_a_fresh_container(
    isolation: str | None, fresh: bool
) -> None:
    plan = _code_plan(isolation=isolation)
    assert (plan.placement.kind, plan.placement.wall) == ("container", "container")
    assert plan.placement.needs_fresh_place(isolation) is fresh


@pytest.mark.row("S1", "P11")
def test_isolation_not_supported_by_the_wall_is_refused() -> None:
    with pytest.raises(InvalidParams, match='it can be "call"') as caught:
        _plan(isolation="container_per_call")
    assert caught.value.fields == ("options.isolation",)


@pytest.mark.row("S1")
def test_code_without_container_wall_is_refused() -> None:
    document = expression_document(executor="code:python", parameters={"properties": {"code": {}}})
    walls = Walls(interpreter=FakeWall(), jail=FakeWall(), host=Host())
    with pytest.raises(SandboxUnavailable, match="no container wall, and uses no weaker one"):
        make_plan(_permitted(ToolDefinition.model_validate(document)), walls)


class ReturningWall(FakeWall, HasImages):
    """A wall with images that is available again after a check if `comes_back`."""

    def __init__(self, *, is_down: bool, is_missing: bool, comes_back: bool) -> None:
        super().__init__(limits=CONTAINER_LIMITS)
        self.comes_back = comes_back
        self.is_missing = is_missing
        self.looks = 0
        if is_down:
            self.enforced = frozenset()

    def image_for(self, language: str) -> str:
        if self.is_missing:
            raise ImageMissing.of("python", "is not built", "Build it.")
        return "python"

    async def look_again(self) -> None:
        self.looks += 1
        if self.comes_back:
            self.enforced, self.is_missing = self.required, False

    async def with_additions(self, image: str, wanted: Sequence[str], principal_id: str) -> str:
        return f"{image}+{len(wanted)}"

    async def facts_of(self, image: str) -> JsonObject:
        return {}


def _program() -> PermittedCall:
    parameters = {"properties": {"code": {}}}
    return _permitted(_expression(executor="code:python", parameters=parameters))


PACKAGES = OF_PARTS["packages"]


@pytest.mark.anyio
@pytest.mark.parametrize("is_checked", [True, False])
async def test_option_adds_to_the_image_of_a_call_or_the_call_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    """Also if the option's part checks nothing."""
    option = PACKAGES if is_checked else replace(PACKAGES, check=None)
    monkeypatch.setattr(call_options, "OF_PARTS", {**OF_PARTS, "packages": option})
    wall = ReturningWall(is_down=False, is_missing=False, comes_back=True)
    code = {"parameters": {"properties": {"code": {}}}}

    async def image(executor: str, **options: Any) -> str | None:
        asked = _permitted(_expression(executor=executor, **code), **options)
        return (await plan_now(asked, Walls(container=wall, interpreter=FakeWall()))).image

    assert await image("code:python", packages=["a", "b"]) == "python+2"
    assert await image("code:python") == await image("code:python", packages=[]) == "python"
    with pytest.raises(InvalidParams, match=r"Packages|Images can be") as refused:
        await image("restricted_python", packages=["a"])
    assert refused.value.fields == ("options.packages",)


@pytest.mark.anyio
@pytest.mark.row("S1")
@pytest.mark.parametrize(("is_down", "is_missing"), [(True, False), (False, True), (True, True)])
async def test_recovered_wall_admits_the_call_after_one_check(
    is_down: bool, is_missing: bool
) -> None:
    wall = ReturningWall(is_down=is_down, is_missing=is_missing, comes_back=True)
    plan = await plan_now(_program(), Walls(container=wall))
    assert (plan.wall, wall.looks) == (wall, 1)


@pytest.mark.anyio
@pytest.mark.row("S1")
@pytest.mark.parametrize(
    ("is_down", "error", "says"),
    [
        (True, WallDown, "Containers are unavailable; nothing ran"),
        (False, ImageMissing, "The image python is not built"),
    ],
)
async def test_unavailable_wall_or_image_refuses_the_call_after_one_check(
    is_down: bool, error: type[SandboxUnavailable], says: str
) -> None:
    wall = ReturningWall(is_down=is_down, is_missing=not is_down, comes_back=False)
    with pytest.raises(error, match=says):
        await plan_now(_program(), Walls(container=wall))
    assert wall.looks == 1


@pytest.mark.anyio
@pytest.mark.row("S1", "A2")
@pytest.mark.parametrize(
    ("comes_back", "code"), [(True, "REQUIRES_HUMAN_APPROVAL"), (False, "SANDBOX_UNAVAILABLE")]
)
async def test_wall_is_checked_again_before_approval_is_requested(
    home: Path, comes_back: bool, code: str
) -> None:
    policy = home / "policy.toml"
    policy.write_text('[[rules]]\nid = "look"\ndecision = "ask"\ntools = ["run_python"]\n')
    wall = ReturningWall(is_down=True, is_missing=True, comes_back=comes_back)
    config = Config(home=home, policy_file=policy)
    async with Engine(config=config, container=wall, interpreter=FakeWall()) as engine:
        await add_approvers(engine)
        answer = await engine.call("run_python", {"code": "4"})
        assert (code_of(answer), wall.looks, wall.runs) == (code, 1, [])


# -- Which place a call gets that names a session, and what is refused before it gets one --


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


@pytest.mark.row("A1", "S6")
async def test_policy_sees_the_variables_of_a_session_as_those_of_its_calls(home: Path) -> None:
    policy = home / "policy.toml"
    policy.write_text(
        '[[rules]]\nid = "git"\ndecision = "allow"\ntools = ["run_shell"]\nruns = ["git status"]\n'
        '[[rules]]\nid = "plain"\ndecision = "allow"\ntools = ["run_python"]\n'
        'when = [{argument = "/env", missing = true}]\n'
    )
    policy.chmod(0o600)
    config = Config(home=home, policy_file=policy)
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(config=config, container=wall, interpreter=FakeWall()) as engine:
        rules = []
        for env in (None, {"PATH": "/workspace"}):
            session = await engine.sessions.create(engine.owner, env=env)
            options = {"session_id": session.id, "dry_run": True}
            for tool, argument in (("run_shell", "command"), ("run_python", "code")):
                answer = await engine.call(tool, {argument: "git status"}, **options)
                rules.append(answer.data["policy"]["rule"])
    assert rules == ["git", "plain", HARMLESS_PASSES, HARMLESS_PASSES]


@pytest.mark.row("S6")
async def test_call_in_a_session_with_variables_has_no_receipt(bench: Bench) -> None:
    codes = []
    for env in ({}, {"A": "1"}):
        session = await bench.engine.sessions.create(bench.engine.owner, env=env)
        codes.append(code_of(await bench.run(session_id=session.id, receipt=True)))
    assert codes == ["OK", "INVALID_PARAMS"]


@pytest.mark.parametrize(
    ("part", "arguments", "options"),
    [
        ("gateway", {}, {"network": ["api.example.test"]}),
        ("code_mode", {"tools": ["calculator"]}, {}),
    ],
)
async def test_call_that_needs_an_absent_part_is_refused_before_anybody_is_asked(
    home: Path, monkeypatch: pytest.MonkeyPatch,
    part: str, arguments: dict[str, Any], options: dict[str, Any],
) -> None:  # fmt: skip
    policy = home / "policy.toml"
    policy.write_text('[[rules]]\nid = "r"\ndecision = "ask"\ntools = ["run_python"]\n')
    policy.chmod(0o600)
    wall = FakeWall(limits=CONTAINER_LIMITS)
    config = Config(home=home, policy_file=policy)
    others = tuple(one for one in parts() if one.name != part)
    async with Engine(config=config, container=wall, interpreter=FakeWall()) as engine:
        await add_approvers(engine)

        async def call(**more: Any) -> Envelope:
            return await engine.call("run_python", {"code": "4", **arguments}, **options, **more)

        with monkeypatch.context() as patched:
            patched.setattr("fumehood.pipeline.plan.parts", lambda: others)
            planned = (await call(dry_run=True)).data
            assert (planned["would_run"], planned["placement"]["kind"]) == (False, None)
            assert "no part" in planned["placement"]["why"]
            assert code_of(await call()) == "SANDBOX_UNAVAILABLE"
            assert (await engine.approvals.list(ApprovalQuery())).items == ()
        assert (await call(dry_run=True)).data["placement"]["kind"] == "container"
        assert code_of(await call()) == "REQUIRES_HUMAN_APPROVAL"


@pytest.mark.parametrize(
    ("arguments", "options", "is_possible"),
    [
        ({}, {}, True),
        ({}, {"packages": []}, True),
        ({"tools": ["calculator"]}, {}, False),
        ({}, {"preview": True}, False),
        ({}, {"receipt": True}, False),
        ({}, {"replay": {"exchanges": []}}, False),
    ],
)
async def test_call_becomes_a_trial_only_if_its_options_go_with_one(
    bench: Bench, arguments: dict[str, Any], options: dict[str, Any], is_possible: bool
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    durable = session.model_copy(update={"durable": True})
    python = bench.engine._made.services.registry.get("run_python")
    plan = replace(bench.plan_of(python), session=durable)
    permitted = PermittedCall(
        ValidatedCall(ResolvedCall(request(**options), python, ()), arguments, ()),
        bench.engine.owner, by_default(python.definition),
    )  # fmt: skip
    tried = with_options(permitted, plan, {"preview": True})
    assert (tried is not None) is is_possible
    if tried is not None:
        assert tried.request.options.preview


@pytest.mark.row("S6", "S1")
@pytest.mark.parametrize(
    ("tool", "options", "expected", "field"),
    [
        ("run_python", {"isolation": "session"}, "INVALID_PARAMS", "options.isolation"),
        ("run_python", {"session_id": "sess_no"}, "RESOURCE_NOT_FOUND", None),
        ("calculator", {"session_id": "sess_no"}, "RESOURCE_NOT_FOUND", None),
        ("calculator", {"isolation": "session"}, "INVALID_PARAMS", "options.isolation"),
    ],
)
async def test_missing_or_unknown_session_is_refused_before_anything_runs(
    bench: Bench, tool: str, options: dict[str, Any], expected: str, field: str | None
) -> None:
    envelope = await bench.run(tool, **options)
    assert code_of(envelope) == expected
    if field is not None:
        assert field in (error_of(envelope).fields or ())
    assert bench.container.runs == bench.interpreter.runs == []


@pytest.mark.row("S6", "S1")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"isolation": "call"}, "options.isolation"),
        ({"isolation": "container_per_call"}, "options.isolation"),
        ({"memory_limit_mb": 1024}, "options.memory_limit_mb"),
        ({"memory_limit_mb": 128}, "options.memory_limit_mb"),
    ],
)
async def test_isolation_and_memory_options_are_refused_in_session(
    bench: Bench, options: dict[str, Any], field: str
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    envelope = await bench.run(session_id=session.id, **options)
    assert code_of(envelope) == "INVALID_PARAMS"
    assert list(error_of(envelope).fields or ()) == [field]
    assert bench.container.runs == []


@pytest.mark.row("S6", "S1")
async def test_tool_with_memory_limit_below_the_sessions_is_refused(
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


@pytest.mark.row("S6", "S1")
async def test_calculator_with_session_runs_in_its_own_wall_in_the_sessions_domain(
    bench: Bench,
) -> None:
    session = await bench.engine.sessions.create(bench.engine.owner)
    envelope = await bench.run("calculator", session_id=session.id)
    assert code_of(envelope) == "OK"
    (run,) = bench.interpreter.runs
    assert run.domain == TrustDomain(bench.engine.owner.id, None, session.id)
    assert bench.container.runs == []
    await bench.engine.sessions.end(bench.engine.owner, session.id)
    envelope = await bench.run("calculator", session_id=session.id)
    assert code_of(envelope) == "RESOURCE_NOT_FOUND"


@pytest.mark.row("S6", "S1")
@pytest.mark.parametrize("executor", ["workspace:read", "workspace:list"])
async def test_workspace_tool_without_session_is_refused(bench: Bench, executor: str) -> None:
    plain = ToolDefinition.model_validate(expression_document())
    tool = replace(registered(plain), definition=plain.model_copy(update={"executor": executor}))
    with pytest.raises(InvalidParams, match="needs a session_id") as caught:
        bench.plan_of(tool)
    assert caught.value.fields == ("options.session_id",)
    session = await bench.engine.sessions.create(bench.engine.owner, image="shell")
    plan = bench.plan_of(tool, session_id=session.id)
    assert plan.placement.is_of_session
    assert plan.session == session
    assert plan.executor.language is None


@pytest.mark.row("S6", "S1")
async def test_dry_run_reports_the_session_without_taking_a_turn(bench: Bench) -> None:
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


@pytest.mark.row("P6", "P9")
async def test_slow_service_does_not_block_other_services_or_host_functions(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @tool(sandboxed=False)
    async def greet() -> str:
        """Greet."""
        return "hello"

    news = rest_document(name="news", endpoint="https://news.example/")
    async with upstream_bench(home, monkeypatch, weather(), news, greet) as made:
        full, release = anyio.Event(), anyio.Event()

        async def hang(run: ToolRun) -> str:
            if made.upstream.asked() == MOST_OF_ONE:
                full.set()
            await release.wait()
            return "late"

        made.upstream.scripts["weather"] = [hang] * MANY
        with anyio.fail_after(120):
            calls = [asyncio.create_task(made.call()) for _ in range(MANY)]
            await full.wait()
            assert (await made.call("news")).data == {"answer": "fine"}
            assert (await made.bench.engine.call("greet")).data == {"value": "hello"}
            assert made.upstream.asked() == MOST_OF_ONE
            release.set()
            answers = await asyncio.gather(*calls)
    assert [answer.data for answer in answers] == [{"answer": "late"}] * MANY


MOST_OF_ONE = MAX_REQUESTS * 3 // 4
MANY = 80
"""A number of calls above the host wall's slots."""


def test_tool_is_runnable_only_if_its_wall_and_image_are_available() -> None:
    program = _expression(executor="code:python", parameters={"properties": {"code": {}}})

    def runnable(*, is_down: bool, is_missing: bool) -> list[bool]:
        wall = ReturningWall(is_down=is_down, is_missing=is_missing, comes_back=False)
        walls = Walls(interpreter=FakeWall(), container=wall)
        return [can_run_now(tool, walls) for tool in (_expression(), program)]

    assert runnable(is_down=False, is_missing=False) == [True, True]
    assert runnable(is_down=True, is_missing=False) == [True, False]
    assert runnable(is_down=False, is_missing=True) == [True, False]
