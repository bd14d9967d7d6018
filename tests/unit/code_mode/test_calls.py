"""Code mode: each call by a program passes every gate, and none outlives the program.

The test plays the program and makes its calls as a hostile guest would, with hand-made frames.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine, tool
from fumehood.approvals.model import ApprovalQuery, ApprovalState, NewDecision
from fumehood.call_options import CallBody, CallOptions
from fumehood.code_mode import calls
from fumehood.core.call_log import CallQuery
from fumehood.core.envelope import Envelope
from fumehood.core.errors import PermissionDenied
from fumehood.core.identity import Principal, Scope
from fumehood.executors.around import Given
from fumehood.executors.base import HeldAction, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.part import CallPart, CallParts
from fumehood.pipeline.result import MAX_RESULT_BYTES
from fumehood.protocol.streams import Joiner
from fumehood.sandbox.wall import RunSinks
from fumehood.testing import CONTAINER_LIMITS, FakeWall, ManualClock, SeenRun
from support.answers import code_of, error_of
from support.asking import add_approvers
from support.definitions import expression_document
from support.identities import ADMIN, NOW, bind, make_agent, new_token
from support.recording import RecordingLog
from support.upstreams import gone, upstream_bench, weather

pytestmark = [pytest.mark.anyio, pytest.mark.row("B3")]

ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
YES = NewDecision(decision="approve")


@dataclass
class Guest:
    """The program's side of its run, and the port to it."""

    sinks: RunSinks
    dial: None = None
    answers: dict[int, Any] = field(default_factory=dict)
    pauses: list[bool] = field(default_factory=list)
    number: int = 0
    joiner: Joiner = field(default_factory=Joiner)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        streams = {stream.kind.name: stream for stream in self.sinks.streams}
        self.has_tools = "calls" in streams
        if self.has_tools:
            self.end = streams["calls"].open(self)

    def send(self, body: bytes) -> None:
        answer = self.joiner.add(body)
        if answer is not None:
            message = json.loads(answer)
            self.answers[message["call"]] = message
            self.changed.set()

    def refuse(self, why: str) -> None:
        raise AssertionError(why)

    def pause(self, *, is_paused: bool) -> None:
        self.pauses.append(is_paused)
        self.changed.set()

    def begin(self, tool: str, arguments: Any = None) -> int:
        """Send a call, and return its number."""
        self.number += 1
        call = {"number": self.number, "tool": tool, "arguments": arguments or {}}
        self.end.on_frame(json.dumps(call).encode())
        return self.number

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def call(self, tool: str, arguments: Any = None) -> Any:
        """Call a tool, and return the answer."""
        number = self.begin(tool, arguments)
        await self.until(lambda: number in self.answers)
        return self.answers[number]

    async def code(self, tool: str, arguments: Any = None) -> str:
        """Call a tool, and return the error code or OK."""
        answer = await self.call(tool, arguments)
        return answer["error"]["code"] if "error" in answer else "OK"


Play = Callable[[Guest], Awaitable[Any]]


class Stage:
    """An engine whose programs are played by the test, and the tools that they call."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.ended: list[str] = []
        self.started = asyncio.Event()
        self.wall = FakeWall(limits=CONTAINER_LIMITS, meanwhile=self._meanwhile)
        self.log = RecordingLog()
        self.clock = ManualClock()
        self.engine: Engine = None  # type: ignore[assignment]
        self.play: Play = _nothing
        self.seen: Any = None

    async def _meanwhile(self, run: SeenRun, sinks: RunSinks) -> None:
        self.seen = await self.play(Guest(sinks))

    @property
    def tools(self) -> list[Any]:
        @tool(sandboxed=False)
        async def note(text: str, author: str = "") -> dict[str, str]:
            """Write a line down."""
            self.noted.append(f"{author}{text}")
            return {"noted": text}

        @tool(sandboxed=False, dangerous=True)
        async def send(text: str) -> dict[str, str]:
            """Send a line."""
            self.noted.append(text)
            return {"sent": text}

        @tool(sandboxed=False, rate_limit=2)
        async def rare() -> None:
            """Do something rare."""

        @tool(sandboxed=False)
        async def wait(name: str = "") -> None:
            """Never end."""
            self.started.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(name)

        @tool(sandboxed=False, read_only=True, cacheable=True)
        async def much(size: int, parts: int = 0) -> Any:
            """Give a long text, or a list of short ones."""
            return {"text": "x" * size, "parts": ["y" * 1000] * parts}

        return [note, send, rare, wait, much]

    async def run(
        self, play: Play, *tools: str, principal: Principal | None = None, **options: Any
    ) -> Envelope:
        """Run a program with these tools."""
        self.play = play
        arguments = {"code": "1", "tools": list(tools) or ["note"]}
        body = CallBody(arguments=arguments, options=CallOptions(**options))
        return await self.engine.run("run_python", body, principal or self.engine.owner)

    async def approver(self) -> None:
        await add_approvers(self.engine)

    async def pending(self) -> list[Any]:
        page = await self.engine.approvals.list(ApprovalQuery())
        return [one for one in page.items if one.state is ApprovalState.PENDING]


async def _nothing(guest: Guest) -> None:
    pass


@asynccontextmanager
async def stage(home: Path, *more: Any, **config: Any) -> AsyncIterator[Stage]:
    made = Stage()
    engine = Engine(
        [*made.tools, *more], config=Config(home=home, **config), interpreter=FakeWall(),
        container=made.wall, log=made.log, clock=made.clock,
    )  # fmt: skip
    async with engine:
        made.engine = engine
        yield made


def failure(envelope: Envelope) -> tuple[str, str, tuple[str, ...] | None]:
    return code_of(envelope), error_of(envelope).message, error_of(envelope).fields


# -- a call is a call -------------------------------------------------------------------------


async def test_invalid_python_names_are_mangled_and_duplicates_refused(home: Path) -> None:
    names = ("a-b", "class", "ToolError", "__doc__")
    async with stage(home, *(expression_document(name=name) for name in names)) as on:
        await on.run(_nothing, *names)
        made = [tool["function"] for tool in on.wall.runs[0].arguments["tools"]]
        twice = await on.run(_nothing, "note", "note@1.0.0")
    assert made == ["a_b", "class_", "ToolError_", "__doc___"]
    assert failure(twice)[0::2] == ("INVALID_PARAMS", ("tools.1",))


async def test_request_that_waits_for_approval_is_not_a_call_of_a_tool(home: Path) -> None:
    asked: list[Any] = []

    class NeverDone(HeldAction):
        needs = "program"
        gone = "gone"
        place = Placement("host", "host", "test")

        async def carry_out(self, run: ToolRun) -> Outcome:
            raise AssertionError

    class Asks(CallPart):
        @asynccontextmanager
        async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[None]:
            assert run.calls is not None
            clock: Any = None
            asked.append(await run.calls.ask("net", {}, NeverDone(), clock))
            yield None

    async with stage(home) as on:
        both = CallParts.of([*on.engine._made.parts, Asks()])
        object.__setattr__(on.engine._made.services, "parts", both)
        play = lambda guest: guest.call("note", {"text": "a"})  # noqa: E731
        envelope = await on.run(play, "note", wait_for_approval=True)
    assert [type(one) for one in asked] == [PermissionDenied]
    assert envelope.data["tool_calls"] == {"made": 1, "failed": 0}


# -- tools that a program cannot have ----------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["run_python", "run_shell", "read_file", "delete_files", "unknown", "note@9.9.9"]
)
async def test_program_with_unavailable_tool_is_refused_before_it_runs(
    name: str, home: Path
) -> None:
    async with stage(home) as on:
        refused = await on.run(_nothing, "note", name)
        planned = await on.run(_nothing, "note", name, dry_run=True)
        assert on.wall.runs == []
    assert failure(refused)[0::2] == ("INVALID_PARAMS", ("tools.1",))
    assert failure(planned)[0] == "INVALID_PARAMS"


async def test_fallback_to_code_tool_is_refused_within_a_program(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    code = {"name": "code", "description": "Run.", "executor": "code:python"}
    rest = weather(name="first", retry_count=0, fallback="code", parameters=parameters)
    async with upstream_bench(home, monkeypatch, rest, {**code, "parameters": parameters}) as made:
        made.upstream.scripts.update({"first": [gone(), gone()]})
        engine, seen = made.bench.engine, []

        async def meanwhile(run: SeenRun, sinks: RunSinks) -> None:
            if sinks.streams:
                seen.append(await Guest(sinks).code("first", {"code": "2"}))

        wall = FakeWall(limits=CONTAINER_LIMITS, meanwhile=meanwhile)
        monkeypatch.setitem(engine._made.walls.by_name._walls, "container", wall)
        control = await engine.call("first", {"code": "1"})
        await engine.call("run_python", {"code": "program", "tools": ["first"]})
    assert control.success
    assert seen == ["NETWORK_ERROR"]
    assert [run.arguments["code"] for run in wall.runs] == ["1", "program"]


# -- every gate, as this caller and agent --------------------------------------------------------


async def test_agents_program_has_only_its_tools_and_no_fixed_arguments(home: Path) -> None:
    async with stage(home) as on:
        agents, me = on.engine.agents, on.engine.owner.id
        await make_agent(agents, "writer", me)
        await bind(agents, "writer", ["run_python"])
        await bind(agents, "writer", ["note"], fixed={"author": "ann: "})
        caller = on.engine.principal_of_uid(int(me.removeprefix("uid:")))

        async def attack(guest: Guest) -> Any:
            twin = await guest.code("note", {"text": "hi"})
            return twin, await guest.code("note", {"text": "hi", "author": "bob: "})

        await on.run(attack, "note", agent_id="writer", principal=caller)
        (spec,) = on.wall.runs[0].arguments["tools"]
        refused = await on.run(attack, "much", agent_id="writer", principal=caller)
    assert on.seen == ("OK", "INVALID_PARAMS")
    assert on.noted == ["ann: hi"]
    assert spec.keys() == {"name", "function", "description", "parameters"}
    assert list(spec["parameters"]["properties"]) == ["text"]
    assert failure(refused)[0] == "INVALID_PARAMS"
    assert "much" in failure(refused)[1]


@pytest.mark.parametrize(
    ("tools", "code", "has_tools"),
    [([], "OK", False), (["note"], "OK", True), (["much"], "TOOL_DISABLED", None)],
)
async def test_fixed_tools_argument_determines_program_tools_of_agent(
    home: Path, tools: list[str], code: str, has_tools: bool | None
) -> None:
    async def look(guest: Guest) -> Any:
        return guest.has_tools

    async with stage(home) as on:
        agents, me = on.engine.agents, on.engine.owner.id
        await make_agent(agents, "a", me)
        await bind(agents, "a", ["note"])
        await bind(agents, "a", ["run_python"], fixed={"tools": tools})
        caller, on.play = on.engine.principal_of_uid(int(me.removeprefix("uid:"))), look
        body = CallBody(arguments={"code": "1"}, options=CallOptions(agent_id="a"))
        envelope = await on.engine.run("run_python", body, caller)
        overriding = await on.run(look, "note", agent_id="a", principal=caller)
    assert code_of(envelope) == code
    assert on.seen is has_tools
    assert failure(overriding)[2] == ("tools",)


class WallWithQueue(FakeWall):
    """Something happens while a call waits for its place."""

    meanwhile_waiting: Callable[[], Awaitable[None]]

    @asynccontextmanager
    async def lease(self, *given: Any, **more: Any) -> AsyncIterator[Any]:
        async with super().lease(*given, **more) as lease:
            await self.meanwhile_waiting()
            yield lease


@pytest.mark.parametrize("is_disabled", [True, False], ids=["attack", "twin"])
async def test_attack_fixed_tool_that_changes_while_the_call_waits_is_not_named(
    home: Path, is_disabled: bool
) -> None:
    @tool(sandboxed=False, description="Hidden.")
    async def hidden_ledger() -> dict[str, str]:
        return {}

    wall = WallWithQueue(limits=CONTAINER_LIMITS)
    config = Config(home=home)
    async with Engine(
        [hidden_ledger], config=config, interpreter=FakeWall(), container=wall
    ) as engine:

        async def change() -> None:
            if is_disabled:
                await engine.registrations.switch(
                    "hidden_ledger", "1.0.0", is_active=False, by=engine.owner, now=NOW
                )

        wall.meanwhile_waiting = change
        me = engine.owner.id
        await make_agent(engine.agents, "a", me)
        await bind(engine.agents, "a", ["hidden_ledger"])
        await bind(engine.agents, "a", ["run_python"], fixed={"tools": ["hidden_ledger"]})
        caller = engine.principal_of_uid(int(me.removeprefix("uid:")))
        body = CallBody(arguments={"code": "1"}, options=CallOptions(agent_id="a"))
        answer = await engine.run("run_python", body, caller)
    assert code_of(answer) == ("TOOL_DISABLED" if is_disabled else "OK")
    assert "hidden" not in answer.model_dump_json()
    assert len(wall.runs) == (not is_disabled)


async def test_policy_is_applied_to_each_program_call(home: Path) -> None:
    file = home / "policy.toml"
    file.write_text(
        '[[rules]]\nid = "no-b"\ndecision = "deny"\ntools = ["note"]\n'
        'when = [{argument = "/text", equals = "b"}]\n'
    )
    file.chmod(0o600)
    async with stage(home, policy_file=file) as on:

        async def attack(guest: Guest) -> Any:
            return [await guest.code("note", {"text": text}) for text in "abc"]

        await on.run(attack)
        assert on.seen == ["OK", "PERMISSION_DENIED", "OK"]
    assert on.noted == ["a", "c"]


async def test_rate_limits_and_budgets_count_each_program_call(home: Path) -> None:
    budget = {"name": "few", "period": "total", "tools": ["note"], "calls": 3}
    async with stage(home, budgets=[budget]) as on:

        async def attack(guest: Guest) -> Any:
            rare = [await guest.code("rare") for _ in range(3)]
            return rare, [await guest.code("note", {"text": "a"}) for _ in range(4)]

        envelope = await on.run(attack, "rare", "note")
        assert on.seen == (["OK", "OK", "RATE_LIMITED"], ["OK", "OK", "OK", "QUOTA_EXCEEDED"])
    assert len(on.noted) == 3
    assert envelope.data["tool_calls"] == {"made": 7, "failed": 2}


async def test_token_revoked_during_program_is_refused_for_further_calls(home: Path) -> None:
    async with stage(home) as on:
        token, secret = await new_token(on.engine.tokens, Scope.CALL)
        caller = on.engine.tokens.principal_of(secret, NOW)

        async def attack(guest: Guest) -> Any:
            twin = await guest.code("note", {"text": "before"})
            await on.engine.tokens.revoke(token.id, by=ADMIN, now=NOW)
            return twin, await guest.code("note", {"text": "after"})

        await on.run(attack, principal=caller)
        assert on.seen == ("OK", "UNAUTHORIZED")
    assert on.noted == ["before"]


# -- approval ----------------------------------------------------------------------------------


async def test_dangerous_program_call_without_wait_gets_pending_error(
    home: Path,
) -> None:
    async with stage(home) as on:
        await on.approver()
        await on.run(lambda guest: guest.call("send", {"text": "a"}), "send")
        error = on.seen["error"]
        (approval,) = await on.pending()
    assert (error["code"], error["approval_id"]) == ("REQUIRES_HUMAN_APPROVAL", approval.id)
    assert on.noted == []


async def test_total_approval_wait_of_program_is_bounded(home: Path) -> None:
    async with stage(home) as on:
        await on.approver()

        async def wait(guest: Guest) -> Any:
            first = guest.begin("send", {"text": "a"})
            await guest.until(lambda: guest.pauses == [True])
            on.clock.advance(59)
            (approval,) = await on.pending()
            await on.engine.approvals.decide(approval.id, YES, ALICE, channel="test")
            await guest.until(lambda: first in guest.answers)
            on.clock.advance(2)  # the program's own time, which is none of a human's
            second = guest.begin("send", {"text": "b"})
            await guest.until(lambda: second in guest.answers)
            return guest.answers[second]["error"]["code"], guest.pauses

        await on.run(wait, "send", wait_for_approval=59.05)
    assert on.seen == ("REQUIRES_HUMAN_APPROVAL", [True, False, True, False])


async def send_directly(on: Stage, **options: Any) -> Envelope:
    body = CallBody(arguments={"text": "a"}, options=CallOptions(**options))
    return await on.engine.run("send", body, on.engine.owner)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_waiting", [True, False])
async def test_program_end_keeps_approval_shared_with_direct_call(
    home: Path, is_first: bool, is_waiting: bool
) -> None:
    answers: list[Envelope] = []
    async with stage(home) as on, anyio.create_task_group() as group:
        await on.approver()

        async def direct() -> None:
            answers.append(await send_directly(on, wait_for_approval=60))

        async def ask_directly() -> None:
            if not is_waiting:
                answers.append(await send_directly(on))
                return
            group.start_soon(direct)
            await until_waiting(on, 1 if is_first else 2)

        async def leave(guest: Guest) -> Any:
            if is_first:
                await ask_directly()
            guest.begin("send", {"text": "a"})
            await guest.until(lambda: guest.pauses == [True])
            if not is_first:
                await ask_directly()

        await on.run(leave, "send", wait_for_approval=60)
        (approval,) = (await on.engine.approvals.list(ApprovalQuery())).items
        assert approval.state is ApprovalState.PENDING
        await on.engine.approvals.decide(approval.id, YES, ALICE, channel="test")
        if not is_waiting:
            answers.append(await send_directly(on, wait_for_approval=60))
    assert answers[-1].data == {"sent": "a"}
    assert on.noted == ["a"]


async def until_waiting(on: Stage, count: int) -> None:
    """Wait until this number of calls wait for one approval."""
    requests = on.engine.approvals.requests
    with anyio.fail_after(120):
        while [len(requests.runs.followers(one.id)) for one in await on.pending()] != [count]:
            await anyio.sleep(0.01)


# -- no call outlives its program ------------------------------------------------------------------


async def test_program_end_cancels_its_calls_before_the_answer(home: Path) -> None:
    async with stage(home) as on:

        async def leave(guest: Guest) -> None:
            guest.begin("wait", {"name": "a"})
            guest.begin("wait", {"name": "b"})
            await on.started.wait()
            guest.begin("wait", {"name": "never begun"})

        envelope = await on.run(leave, "wait")
        assert sorted(on.ended) in (["a"], ["a", "b"], ["a", "b", "never begun"])
        page = await on.engine.call_log.page(on.engine.owner.id, CallQuery(tool="wait"))
    assert envelope.success
    assert {call.code for call in page.items} == {"CANCELLED"}


# -- bounds ------------------------------------------------------------------------------------


async def test_result_over_program_size_limit_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walls have a separate limit, which an operator may have raised above this one."""
    async with stage(home) as on:
        over_the_walls = {"size": 0, "parts": MAX_RESULT_BYTES // 1000 + 200}
        await on.run(lambda guest: guest.code("much", over_the_walls), "much")
        assert on.seen == "OUTPUT_LIMIT_EXCEEDED"
        monkeypatch.setattr(calls, "MAX_RESULT_BYTES", 10_000)
        for parts, begins in ((13, "The tool has run, but"), (9, None)):
            arguments = {"size": 0, "parts": parts}
            await on.run(lambda guest: guest.call("much", arguments), "much")  # noqa: B023
            found = on.seen.get("error", {}).get("message")
            assert (found or "").startswith(begins or "")
            assert (found is None) is (begins is None)
