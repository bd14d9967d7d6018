"""Decisions about external tools: every gate applies, and nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import (
    Approval,
    ApprovalQuery,
    ApprovalSettings,
    ApprovalState,
    NewDecision,
    RememberWish,
    StoredApproval,
)
from fumehood.approvals.requests import ApprovalRequests
from fumehood.budgets.settings import BudgetRule
from fumehood.core.decision import DecisionBody
from fumehood.core.envelope import CallFailed
from fumehood.core.errors import InvalidParams
from fumehood.core.identity import Principal, Scope
from fumehood.executors.base import CallHandle
from fumehood.registry.settings import ExternalToolSettings
from fumehood.testing import FakeWall, ManualClock
from support.answers import code_of
from support.asking import ALICE, YES, add_approvers, reaches

pytestmark = [pytest.mark.anyio, pytest.mark.row("A1", "A2")]

RULES = """
[[rules]]
id = "no-force"
decision = "deny"
tools = ["external:Bash"]
reason = "Nobody forces."
when = [{ argument = "/command", glob = "*--force*" }]

[[rules]]
id = "listing"
decision = "allow"
tools = ["external:Bash"]
when = [{ argument = "/command", equals = "ls" }]

[[rules]]
id = "github-reads"
decision = "allow"
tools = ["external:mcp__github__*"]
"""

LS = {"command": "ls"}
RM = {"command": "rm -r build"}


class Deciding:
    """An engine and its approvers' actions."""

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        self.engine = engine
        self.clock = clock

    async def pending(self, arguments: dict[str, Any] = RM, tool: str = "Bash", **more: Any) -> str:
        decision = await self.engine.decide(tool, arguments, **more)
        assert decision.decision == "pending", decision
        assert decision.approval_id is not None
        return decision.approval_id

    async def say(self, approval_id: str, decision: NewDecision = YES) -> Approval:
        await self.engine.approvals.decide(approval_id, decision, ALICE, channel="test")
        return await reaches(self.engine, approval_id)


@asynccontextmanager
async def deciding(tmp_path: Path, rules: str = RULES, **config: Any) -> AsyncIterator[Deciding]:
    clock = ManualClock()
    policy = tmp_path / "policy.toml"
    policy.write_text(rules)
    policy.chmod(0o600)
    walls = {"interpreter": FakeWall(), "jail": FakeWall(), "container": FakeWall()}
    settings = Config(policy_file=policy, **config)
    async with Engine(config=settings, clock=clock, **walls) as engine:
        await add_approvers(engine)
        yield Deciding(engine, clock)


async def test_policy_rules_decide_with_their_reason_and_are_logged(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        allowed = await here.engine.decide("Bash", LS)
        assert (allowed.decision, allowed.tool, allowed.code) == ("allow", "external:Bash", None)
        denied = await here.engine.decide("Bash", {"command": "git push --force"})
        assert (denied.decision, denied.code, denied.rule) == (
            "deny", "PERMISSION_DENIED", "no-force",
        )  # fmt: skip
        assert "Nobody forces." in denied.reason
        page = await here.engine.calls(tool="external:Bash")
        assert [one.code for one in page.items] == ["PERMISSION_DENIED", "OK"]


async def test_approval_record_shows_no_sandbox_for_external_tool(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        approval = await here.engine.approvals.opened(await here.pending())
        known = {
            name: approval.binding[name] for name in ("placement", "limits", "network", "place")
        }
        assert known == {"placement": "external", "limits": None, "network": None, "place": None}
        ended = await here.say(approval.id)
        envelope = await here.engine.approvals.answer_of(ended.call_id, here.engine.owner)
        assert (envelope.success, envelope.metadata.sandbox) == (True, None)


async def test_allow_pattern_covers_only_harmless_external_tools(
    tmp_path: Path,
) -> None:
    declared = {"mcp__github__get_issue": ExternalToolSettings(dangerous=False)}
    rules = (
        RULES + '[[rules]]\nid = "all-ask"\ndecision = "ask"\ntools = ["external:mcp__slack__*"]\n'
    )
    async with deciding(tmp_path, rules, external_tools=declared) as here:
        assert (await here.engine.decide("mcp__github__get_issue")).decision == "allow"
        assert (await here.engine.decide("mcp__github__delete_repo")).decision == "pending"
        assert (await here.engine.decide("mcp__slack__post")).decision == "pending"


async def test_registered_tool_and_external_tool_of_same_name_are_separate(tmp_path: Path) -> None:
    rules = '[[rules]]\nid = "sums"\ndecision = "allow"\ntools = ["calculator"]\n'
    async with deciding(tmp_path, rules) as here:
        decision = await here.engine.decide("calculator", {"expression": "1"})
        assert (decision.decision, decision.tool) == ("pending", "external:calculator")
        assert (await here.engine.call("calculator", {"expression": "1"})).metadata.tool_name
        unknown = await here.engine.call("Bash", LS)
        assert code_of(unknown) == "TOOL_NOT_FOUND"


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": {"command": "rm -r /"}},
        {"context": {"cwd": "/elsewhere"}},
        {"session_id": "s2"},
        {"tool": "PowerShell"},
        {"new_call": True},
    ],
)
async def test_approval_does_not_allow_a_different_call(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    same: dict[str, Any] = {"context": {"cwd": "/w"}, "session_id": "s1"}
    async with deciding(tmp_path) as here:
        approval_id = await here.pending(**same)
        await here.say(approval_id)
        assert await here.pending(**{**same, **other}) != approval_id
        assert (await here.engine.decide("Bash", RM, **same)).decision == "allow"  # the twin


async def test_remembered_approval_applies_only_to_the_same_context(tmp_path: Path) -> None:
    same: dict[str, Any] = {"context": {"cwd": "/w"}, "session_id": "s1"}
    remember = NewDecision(decision="approve", remember=RememberWish())
    async with deciding(tmp_path) as here:
        await here.say(await here.pending(**same), remember)
        for _ in range(3):
            assert (await here.engine.decide("Bash", RM, **same)).decision == "allow"  # the twin
        more = {**RM, "dangerouslyDisableSandbox": True}
        await here.pending(arguments=more, **same)
        await here.pending(**{**same, "context": {"cwd": "/etc"}})
        await here.pending(session_id="s1")


@pytest.mark.parametrize("where", ["arguments", "context"])
async def test_call_too_large_for_review_is_refused(tmp_path: Path, where: str) -> None:
    """Regression: hashing a call of a few megabytes blocked all other calls for half a minute."""
    async with deciding(tmp_path) as here:
        many = {"deep": [{"a": [0] * 100} for _ in range(200)]}
        with pytest.raises(CallFailed, match="A human must read this call"):
            await here.engine.decide("Write", **{where: many})
        del many["deep"][196:]  # the twin: 19,996 values
        assert (await here.engine.decide("Write", **{where: many})).decision == "pending"


async def test_unused_approval_expires(tmp_path: Path) -> None:
    approvals = ApprovalSettings(start_within_seconds=60, repeat_seconds=3600)
    async with deciding(tmp_path, approvals=approvals) as here:
        approval_id = await here.pending()
        await here.say(approval_id)
        here.clock.advance(61)
        assert await here.pending() != approval_id


async def test_only_one_of_several_waiting_equal_calls_is_allowed(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        decide = here.engine.decide
        calls = [asyncio.create_task(decide("Bash", RM, wait_for_approval=True)) for _ in range(3)]
        with anyio.fail_after(120):
            while not (page := await here.engine.approvals.list(ApprovalQuery())).items:
                await anyio.sleep(0.01)
            await here.say(page.items[0].id)
            heard = await asyncio.gather(*calls)
        assert sorted(one.decision for one in heard) == ["allow", "deny", "deny"]
        assert {one.code for one in heard} == {None, "APPROVAL_EXPIRED"}


async def test_viewing_an_approved_answer_does_not_consume_it(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        approval = await here.say(await here.pending())
        shown = await here.engine.approvals.answer_of(approval.call_id, here.engine.owner)
        assert shown is not None
        assert (await here.engine.decide("Bash", RM)).decision == "allow"
        assert (await here.engine.decide("Bash", RM)).decision == "pending"


async def test_repeat_right_after_the_yes_is_allowed(tmp_path: Path) -> None:
    """Regression: until the yes was recorded, the model was told that the call waits for it."""
    async with deciding(tmp_path) as here:
        for number in range(10):
            approval_id = await here.pending({"command": f"make {number}"})
            await here.engine.approvals.decide(approval_id, YES, ALICE, channel="test")
            answer = await here.engine.decide("Bash", {"command": f"make {number}"})
            assert answer.decision == "allow", answer


async def test_repeat_that_is_cancelled_after_the_yes_loses_no_approval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeat asked for no wait. That it had to wait for the record takes nothing back."""
    recording, begin = anyio.Event(), ApprovalRequests.begin

    async def slow(requests: ApprovalRequests, stored: StoredApproval) -> None:
        await recording.wait()
        await begin(requests, stored)

    async with deciding(tmp_path) as here:
        engine, approval_id = here.engine, await here.pending()
        monkeypatch.setattr(ApprovalRequests, "begin", slow)
        await engine.approvals.decide(approval_id, YES, ALICE, channel="test")
        body, handle = DecisionBody(tool="Bash", arguments=RM), CallHandle()
        repeat = asyncio.create_task(engine.run(body.reference, body.call, engine.owner, handle))
        with anyio.fail_after(120):
            while not engine.approvals.requests.runs.followers(approval_id):
                await anyio.sleep(0.01)
        handle.cancel()
        assert code_of(await repeat) == "CANCELLED"
        recording.set()
        assert (await engine.decide("Bash", RM)).decision == "allow"


async def test_edit_of_external_call_is_refused(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        approval_id = await here.pending()
        with pytest.raises(InvalidParams, match="runs this tool itself"):
            await here.say(approval_id, NewDecision(decision="approve", arguments=LS))
        assert (await here.engine.approvals.show(approval_id)).state is ApprovalState.PENDING


async def test_only_allowed_external_calls_count_against_budgets(
    tmp_path: Path,
) -> None:
    budgets = (BudgetRule(name="calls", period="total", calls=2, per=("session",)),)
    async with deciding(tmp_path, budgets=budgets) as here:
        await here.engine.decide("Bash", {"command": "x --force"}, session_id="s")
        await here.pending(session_id="s")
        for _ in range(2):
            assert (await here.engine.decide("Bash", LS, session_id="s")).decision == "allow"
        over = await here.engine.decide("Bash", LS, session_id="s")
        assert (over.decision, over.code) == ("deny", "QUOTA_EXCEEDED")
        assert (await here.engine.decide("Bash", LS, session_id="t")).decision == "allow"


@pytest.mark.parametrize(
    ("tool", "more"),
    [
        ("", {}),
        ("a b", {}),
        ("external:Bash", {}),
        ("Bash@1.0.0", {}),
        ("x" * 129, {}),
        ("Bash", {"context": {"a": {1}}}),
        ("Bash", {"session_id": "a b"}),
    ],
)
async def test_invalid_decision_request_is_refused(
    tmp_path: Path, tool: str, more: dict[str, Any]
) -> None:
    async with deciding(tmp_path) as here:
        with pytest.raises(CallFailed) as refused:
            await here.engine.decide(tool, LS, **more)
        assert code_of(refused.value.envelope) == "INVALID_PARAMS"


async def test_external_tool_cannot_be_called_directly(
    tmp_path: Path,
) -> None:
    """An idempotency key or an MCP lookup would return the approval repeatedly."""
    async with deciding(tmp_path) as here:
        ways: list[dict[str, Any]] = [{}, {"idempotency_key": "k"}, {"dry_run": True}]
        for options in ways:
            refused = await here.engine.call("external:Bash", LS, **options)
            assert code_of(refused) == "TOOL_NOT_FOUND"
        assert (await here.engine.decide("Bash", LS)).decision == "allow"  # the twin
        details = here.engine.tool("external:Bash")
        assert (details.source, details.tool.dangerous) == ("external", True)


async def test_definition_cannot_use_an_external_name_or_executor(tmp_path: Path) -> None:
    async with deciding(tmp_path) as here:
        admin = Principal("approver:root", frozenset({Scope.ADMIN}))
        for document in ({"name": "external:Bash"}, {"name": "bash", "executor": "decision"}):
            with pytest.raises(InvalidParams):
                await here.engine.registrations.register(
                    {"type": "REST", "description": "x", "endpoint": "https://e.example/", **document},
                    by=admin, now=here.engine.now(),
                )  # fmt: skip
