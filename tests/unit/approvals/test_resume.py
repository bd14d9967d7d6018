"""Execution after approval: restarts, and changes between approval and execution."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from fumehood import Engine
from fumehood.approvals.model import ApprovalQuery, ApprovalState, NewDecision, Resolution
from fumehood.approvals.settings import ApprovalSettings
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Principal, Scope
from fumehood.identity.model import Binding
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.testing import ManualClock
from support.asking import ALICE, CALLER, NO, YES, Asking, Deeds, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]

ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


def _says(verdict: Verdict, rule: str = "test") -> Callable[[Engine], None]:
    """A policy with this verdict on every call."""

    def prepare(engine: Engine) -> None:
        def decide(facts: CallFacts) -> Decision:
            return Decision(verdict, rule, policy_version=rule)

        gate: Any = engine.policy.gate
        gate.decide = decide

    return prepare


async def test_approval_not_started_in_time_expires(tmp_path: Path) -> None:
    deeds, clock = Deeds(), ManualClock()
    rules = ApprovalSettings(start_within_seconds=60)
    async with asking(tmp_path, deeds=deeds, clock=clock, approvals=rules) as desk:
        approval_id = await desk.parked("a")
        desk.engine.drain()
        await desk.decide(approval_id)
    clock.advance(61)
    async with asking(tmp_path, deeds=deeds, clock=clock, approvals=rules) as desk:
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "APPROVAL_EXPIRED"
    assert deeds.done == []


async def test_resolved_interrupted_call_replays_the_resolution(tmp_path: Path) -> None:
    deeds = Deeds(gate=anyio.Event())
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a", idempotency_key="k")
        await desk.decide(approval_id)
        with anyio.fail_after(10):
            await deeds.begun.wait()
    async with asking(tmp_path, deeds=deeds) as desk:
        resolution = Resolution(outcome="done", note="The file is gone.")
        approval = await desk.engine.approvals.resolve(approval_id, resolution, ALICE)
        assert approval.state is ApprovalState.DONE
        again = await desk.ask("a", idempotency_key="k")
        assert again.success
        assert again.data["resolution"]["note"] == "The file is gone."
    assert deeds.done == []


@pytest.mark.parametrize("how", ["done", "denied", "expired", "cancelled", "never started", "gone"])
async def test_every_final_answer_has_tool_version_and_total_time(tmp_path: Path, how: str) -> None:
    deeds, clock = Deeds(), ManualClock()
    async with asking(tmp_path, deeds=deeds, clock=clock) as desk:
        approval_id = await desk.parked("a")
        clock.advance(5)
        if how == "denied":
            await desk.decide(approval_id, NO)
        elif how == "cancelled":
            await desk.engine.approvals.cancel(approval_id, CALLER)
        elif how == "expired":
            clock.advance(3600)
            await desk.parked("b")  # the desk looks round
        elif how == "done":
            await desk.decide(approval_id)
        else:
            desk.engine.drain()
            await desk.decide(approval_id)
        if how not in ("never started", "gone"):
            _require_named(await desk.ended(approval_id))
            return
    if how == "never started":
        clock.advance(301)
    async with asking(tmp_path, deeds=deeds, clock=clock, prepare=_without_tools(how)) as desk:
        _require_named(await desk.ended(approval_id))
    assert deeds.done == []


@pytest.mark.parametrize("decision", [YES, NO])
async def test_approval_wait_is_a_stage_excluded_from_tool_latency(
    tmp_path: Path, decision: NewDecision
) -> None:
    clock = ManualClock()
    async with asking(tmp_path, clock=clock) as desk:
        approval_id = await desk.parked("a")
        clock.advance(40)
        await desk.decide(approval_id, decision)
        answer = (await desk.ended(approval_id)).metadata
        with anyio.fail_after(10):
            while not (found := await desk.engine.overview.figures(1)).items:
                await anyio.lowlevel.checkpoint()
        details = await desk.engine.overview.call(answer.call_id, ADMIN)
    assert details.call.execution_time_ms >= 40_000
    assert details.stages_ms["approval wait"] == 40_000
    (figures,) = found.items
    assert figures.mean_ms == figures.p50_ms == figures.p95_ms
    assert figures.p95_ms == pytest.approx(details.call.execution_time_ms - 40_000)


async def test_interrupted_and_resolved_answers_have_tool_version_and_total_time(
    tmp_path: Path,
) -> None:
    deeds, clock = Deeds(gate=anyio.Event()), ManualClock()
    async with asking(tmp_path, deeds=deeds, clock=clock) as desk:
        approval_id = await desk.parked("a")
        clock.advance(5)
        await desk.decide(approval_id)
        with anyio.fail_after(10):
            await deeds.begun.wait()
    async with asking(tmp_path, deeds=deeds, clock=clock) as desk:
        _require_named(await desk.ended(approval_id))
        await desk.engine.approvals.resolve(approval_id, Resolution(outcome="done"), ALICE)
        _require_named(await desk.ended(approval_id))


def _without_tools(how: str) -> Callable[[Engine], None]:
    """Remove the tool if the case is "gone"."""

    def prepare(engine: Engine) -> None:
        if how == "gone":
            engine._made.registry.remove("erase", "1.0.0")

    return prepare


def _require_named(answer: Envelope) -> None:
    metadata = answer.metadata
    assert (metadata.tool_name, metadata.tool_version) == ("erase", "1.0.0")
    assert metadata.execution_time_ms == metadata.performance.total_ms >= 5000
    assert (metadata.performance.approval_ms or 0) <= metadata.performance.total_ms


@pytest.mark.parametrize("what", ["the definition", "the limits", "the answer of another rule"])
async def test_approved_call_is_refused_if_its_action_changed(tmp_path: Path, what: str) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
    if what == "the definition":
        changed: dict[str, Any] = {"description": "Erase something else."}
    elif what == "the limits":
        changed = {"prepare": _slower}
    else:  # the control: who asks, and under which version of the rules, decides nothing
        changed = {"prepare": _says(Verdict.ASK, "another rule")}
    async with asking(tmp_path, deeds=deeds, **changed) as desk:
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
    if what == "the answer of another rule":
        assert answer.success
        assert deeds.done == ["a"]
        return
    assert answer.error is not None
    assert answer.error.code == "APPROVAL_EXPIRED"
    assert answer.error.details is not None
    named = {"the definition": ["definition"], "the limits": ["definition", "limits"]}[what]
    assert answer.error.details["changed"] == named
    assert deeds.done == []


@pytest.mark.row("D4")
async def test_approved_call_of_revoked_token_is_refused(tmp_path: Path) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        engine = desk.engine
        token, text = await engine.tokens.new(
            "ci", principal_id="token:ci", scopes=[Scope.CALL], agents=[], expires_at=None,
            by=ADMIN, now=engine.now(),
        )  # fmt: skip
        caller = engine.tokens.principal_of(text, engine.now())
        first, second = await desk.parked("a", by=caller), await desk.parked("b", by=caller)
        await desk.decide(first)
        assert (await desk.ended(first)).success  # the twin: while it counts
        await engine.tokens.revoke(token.id, by=ADMIN, now=engine.now())
        await desk.decide(second)
        answer = await desk.ended(second)
        assert answer.error is not None
        assert answer.error.code == "PERMISSION_DENIED"
    assert deeds.done == ["a"]


@pytest.mark.row("R3")
async def test_arguments_fixed_before_an_edit_are_hidden_from_the_caller() -> None:
    async with asking() as desk:
        await _bind(desk, Binding(tool="erase"))
        answer = await desk.engine.run(*_call({"what": "a"}, agent_id="writer"), _speaker())
        assert answer.error is not None
        assert answer.error.approval_id is not None
        approval_id = answer.error.approval_id
        await _bind(desk, Binding(tool="erase", fixed={"what": "the draft"}))
        await desk.decide(approval_id, NewDecision(decision="approve", arguments={}))
        assert (await desk.ended(approval_id)).success
        whole = await desk.engine.approvals.show(approval_id)
        assert whole.arguments == {"what": "the draft"}
        own = await desk.engine.approvals.show(approval_id, principal=_speaker())
        assert (own.arguments, own.asked_arguments) == ({}, {})
        (listed,) = (await desk.engine.approvals.list(ApprovalQuery(), principal=_speaker())).items
        assert (listed.arguments, listed.asked_arguments) == ({}, {})


async def test_stored_request_tampered_with_in_database_is_refused(
    tmp_path: Path,
) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
    with sqlite3.connect(tmp_path / "state.db") as connection:
        (text,) = connection.execute("SELECT document FROM approvals").fetchone()
        document = json.loads(text)
        document["request"]["arguments"] = {"what": "everything"}
        connection.execute("UPDATE approvals SET document = ?", (json.dumps(document),))
    connection.close()
    async with asking(tmp_path, deeds=deeds) as desk:
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
        assert answer.error is not None
        assert answer.error.code == "APPROVAL_EXPIRED"
        assert answer.error.details == {"changed": ["arguments"]}
    assert deeds.done == []


def _slower(engine: Engine) -> None:
    """Change the tool's timeout after approval."""
    index: Any = engine._made.registry
    found = index.get("erase")
    definition = found.definition.model_copy(update={"timeout_seconds": 7.0})
    tools = index._now
    tools.by_name["erase"]["1.0.0"] = tools.preferred["erase"] = replace(
        found, definition=definition
    )


async def _bind(desk: Asking, binding: Binding) -> None:
    from fumehood.identity.model import Agent

    agents, now = desk.engine.agents, desk.engine.now()
    if agents.find("writer") is None:
        agent = Agent(id="writer", principals=("uid:1000",))
        await agents.create(agent, by=ADMIN, now=now)
    await agents.bind("writer", binding, by=ADMIN, now=now)


def _speaker() -> Principal:
    return Principal(CALLER.id, CALLER.scopes, frozenset({"writer"}))


def _call(arguments: dict[str, Any], **options: Any) -> Any:
    from fumehood.pipeline.incoming import parse_own_call

    return parse_own_call("erase", arguments, options)
