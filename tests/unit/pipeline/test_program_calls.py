"""Calls that a part makes for a program, and a part's refusals, whatever the part does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, tool
from fumehood.approvals.model import Approval, ApprovalQuery, ApprovalState
from fumehood.core.call_log import CallQuery
from fumehood.core.errors import EndedBy, EngineError, InvalidParams, PermissionDenied
from fumehood.executors.around import Given
from fumehood.executors.base import HeldAction, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.authorize import PermittedCall
from fumehood.pipeline.context import PipelineServices
from fumehood.pipeline.part import CallPart, CallParts
from fumehood.testing import CONTAINER_LIMITS, FakeWall
from support.answers import code_of
from support.asking import add_approvers, approve

pytestmark = [pytest.mark.anyio, pytest.mark.row("B3")]


class Clock:
    def __init__(self) -> None:
        self.pauses: list[bool] = []

    def pause(self, *, is_paused: bool) -> None:
        self.pauses.append(is_paused)


class Calls(CallPart):
    """Calls tools for each program, and refuses calls that name the tool `never`."""

    def __init__(self, *tools: str) -> None:
        self.tools = tools
        self.asked: list[str] = []
        self.codes: list[str] = []

    def require_possible(self, permitted: PermittedCall, services: PipelineServices) -> None:
        self.asked.append(permitted.tool.definition.name)
        if "never" in permitted.arguments.get("tools", ()):
            raise InvalidParams("never", fields=["tools"])

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given]:
        assert run.calls is not None
        for name in self.tools:
            ended = asyncio.get_running_loop().create_future()
            run.calls.start(name, {"code": "2"}, ended.set_result, Clock())
            with anyio.fail_after(120):
                answer = await ended
            self.codes.append(answer.code if isinstance(answer, EngineError) else code_of(answer))
        yield Given(needs=frozenset({"tools"}))


@tool(sandboxed=False)
async def note(code: str) -> dict[str, str]:
    """Write a line down."""
    return {"noted": code}


RULES = """
[[rules]]
id = "no"
decision = "deny"
tools = ["run_python"]
when = [{argument = "/code", equals = "denied"}]

[[rules]]
id = "look"
decision = "ask"
tools = ["run_python"]
when = [{argument = "/code", equals = "asked"}]
"""


@asynccontextmanager
async def engine_with(part: CallPart, home: Path) -> AsyncIterator[tuple[Engine, FakeWall]]:
    (home / "policy.toml").write_text(RULES)
    (home / "policy.toml").chmod(0o600)
    wall, config = (
        FakeWall(limits=CONTAINER_LIMITS),
        Config(home=home, policy_file=home / "policy.toml"),
    )
    async with Engine([note], config=config, interpreter=FakeWall(), container=wall) as engine:
        object.__setattr__(engine._made.services, "parts", CallParts.of([part]))
        yield engine, wall


async def test_attack_part_cannot_make_a_program_run_a_program(home: Path) -> None:
    part = Calls("run_python", "run_shell", "read_file", "note")
    async with engine_with(part, home) as (engine, wall):
        answer = await engine.call("run_python", {"code": "1", "tools": ["note"]})
        page = await engine.call_log.page(engine.owner.id, CallQuery(tool="note"))
    assert answer.success
    assert part.codes == ["PERMISSION_DENIED"] * 3 + ["OK"]
    assert [run.arguments["code"] for run in wall.runs] == ["1"]
    assert [call.parent_id for call in page.items] == [answer.metadata.call_id]


REFUSED: dict[str, tuple[dict[str, Any], str, bool]] = {
    "refused-before-a-human-is-asked": (
        {"code": "asked", "tools": ["never"]},
        "INVALID_PARAMS",
        True,
    ),
    "refused-before-it-runs": ({"code": "1", "tools": ["never"]}, "INVALID_PARAMS", True),
    "denied-by-the-policy": ({"code": "denied", "tools": ["never"]}, "PERMISSION_DENIED", False),
    "twin-that-is-asked-about": ({"code": "asked"}, "REQUIRES_HUMAN_APPROVAL", True),
}
"""A call, its code, and whether the part got the call."""


@pytest.mark.parametrize("name", REFUSED)
async def test_part_refuses_a_permitted_call_before_a_human_is_asked(name: str, home: Path) -> None:
    arguments, code, is_asked = REFUSED[name]
    part = Calls()
    async with engine_with(part, home) as (engine, wall):
        answer = await engine.call("run_python", arguments)
        planned = await engine.call("run_python", arguments, dry_run=True)
    assert (code_of(answer), wall.runs) == (code, [])
    assert bool(part.asked) is is_asked
    assert code_of(planned) == ("OK" if code == "REQUIRES_HUMAN_APPROVAL" else code)


# -- actions that a part holds for a program ----------------------------------------------------


class Action(HeldAction):
    needs = "program"
    gone = "Its program has ended."
    place = Placement("host", "host", "test")

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.seen: list[list[bool]] = []
        """The pauses of the clock so far, each time that this is done."""

    async def carry_out(self, run: ToolRun) -> Outcome:
        self.seen.append(list(self.clock.pauses))
        return Outcome(EndedBy.OK, "none")


class Asks(CallPart):
    """Asks about an action for each program, which may end before there is an answer."""

    def __init__(self, *, is_patient: bool) -> None:
        self.is_patient = is_patient
        self.clock = Clock()
        self.action = Action(self.clock)
        self.answers: list[EngineError | None] = []

    async def _ask(self, run: ToolRun) -> None:
        assert run.calls is not None
        self.answers.append(await run.calls.ask("net", {}, self.action, self.clock))

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given]:
        asking = asyncio.ensure_future(self._ask(run))
        if self.is_patient:
            await asking
        while not self.clock.pauses:
            await anyio.sleep(0.001)
        yield Given(needs=frozenset({"tools"}))
        await asking


async def test_action_is_done_after_a_yes_while_the_clock_runs(home: Path) -> None:
    part = Asks(is_patient=True)
    async with engine_with(part, home) as (engine, _), anyio.create_task_group() as group:
        await add_approvers(engine)
        group.start_soon(engine.call, "run_python", {"code": "1", "tools": ["note"]})
        approval = await pending(engine)
        with anyio.fail_after(120):  # it is shown before the clock is paused
            while not part.clock.pauses:
                await anyio.sleep(0.001)
        assert (approval.tool, part.clock.pauses, part.action.seen) == ("net", [True], [])
        await approve(engine, approval.id)
    assert part.answers == [None]
    assert part.action.seen == [[True, False]]
    assert part.clock.pauses == [True, False]


async def test_attack_action_of_a_program_that_has_ended_is_never_done(home: Path) -> None:
    part = Asks(is_patient=False)
    async with engine_with(part, home) as (engine, _):
        await add_approvers(engine)
        answer = await engine.call("run_python", {"code": "1", "tools": ["note"]})
        (approval,) = (await engine.approvals.list(ApprovalQuery())).items
    assert answer.success
    assert [type(one) for one in part.answers] == [PermissionDenied]
    assert (approval.state, part.action.seen) == (ApprovalState.CANCELLED, [])
    assert part.clock.pauses == [True, False]


async def pending(engine: Engine) -> Approval:
    """Wait for an approval to be pending, and return it."""
    with anyio.fail_after(120):
        while not (found := (await engine.approvals.list(ApprovalQuery())).items):
            await anyio.sleep(0.001)
    return found[0]
