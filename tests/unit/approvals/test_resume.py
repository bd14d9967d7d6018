"""Execution after approval: restarts, and changes between approval and execution."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fumehood import Engine, engine_parts
from fumehood.approvals.model import (
    ApprovalSettings,
    ApprovalState,
    NewDecision,
)
from fumehood.approvals.store import ApprovalTable, Step
from fumehood.compose import Composition
from fumehood.core.errors import EngineError, StateUnavailable
from fumehood.core.identity import Principal, Scope
from fumehood.core.part import Part
from fumehood.engine_part import EnginePart
from fumehood.overview.in_engine import EngineOverview
from fumehood.parts import parts
from fumehood.storage.errors import WriteUnavailable
from fumehood.testing import ManualClock
from support.asking import CALLER, NO, YES, Deeds, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]

ADMIN = Principal("approver:root", frozenset({Scope.ADMIN}))


@pytest.mark.parametrize(
    ("waits_s", "removes", "code"),
    [(61, False, "APPROVAL_EXPIRED"), (1, True, "TOOL_NOT_FOUND")],
    ids=["late", "tool-removed"],
)
async def test_approved_call_that_cannot_start_after_a_restart_gets_its_final_answer(
    tmp_path: Path, waits_s: int, removes: bool, code: str
) -> None:
    deeds, clock = Deeds(), ManualClock()
    rules = ApprovalSettings(start_within_seconds=60)
    async with asking(tmp_path, deeds=deeds, clock=clock, approvals=rules) as desk:
        approval_id = await desk.parked("a")
        desk.engine.drain()
        await desk.decide(approval_id)
    clock.advance(waits_s)

    def prepare(engine: Engine) -> None:
        if removes:
            engine._made.services.registry.remove("erase", "1.0.0")

    async with asking(tmp_path, deeds=deeds, clock=clock, approvals=rules, prepare=prepare) as desk:
        answer = await desk.ended(approval_id)
    assert answer.error.code == code
    assert deeds.done == []


async def test_call_whose_start_was_stored_without_an_answer_ends_as_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change, lost = ApprovalTable.change, []

    async def lose_answer(table: ApprovalTable, steps: Sequence[tuple[str, Step]]) -> Any:
        after = await change(table, steps)
        if steps[0][1].transition.to is ApprovalState.STARTED:
            lost.append(True)
            raise WriteUnavailable("no answer")
        return after

    monkeypatch.setattr(ApprovalTable, "change", lose_answer)
    deeds = Deeds()
    async with asking(deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        await desk.decide(approval_id)
        answer = await desk.ended(approval_id)
    assert lost
    assert (answer.error.code, deeds.done) == ("OUTCOME_UNKNOWN", [])


class Knowing(EnginePart):
    """Knows how interrupted calls ended."""

    known: ClassVar[Mapping[str, EngineError | None]] = {}
    took_calls: ClassVar[list[bool]] = []
    """Whether the engine took calls when the part was asked, and when all was recovered."""

    @asynccontextmanager
    async def running(self, made: Composition) -> AsyncIterator[None]:
        self._intake = made.calls.intake
        yield

    async def outcomes(self) -> Mapping[str, EngineError | None]:
        self.took_calls.append(self._intake.is_open)
        return self.known

    async def recovered(self) -> None:
        self.took_calls.append(self._intake.is_open)


@pytest.mark.parametrize(
    ("outcome", "state", "code"),
    [
        (None, ApprovalState.DONE, "OK"),
        (StateUnavailable("Nothing was done."), ApprovalState.FAILED, "STATE_UNAVAILABLE"),
        ("unknown", ApprovalState.INTERRUPTED, "OUTCOME_UNKNOWN"),
    ],
    ids=["done", "not-done", "unknown"],
)
async def test_interrupted_call_ends_as_the_part_says_that_knows_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any, state: ApprovalState, code: str
) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
        desk.engine.drain()
        await desk.decide(approval_id)
        requests = desk.engine._made.approvals.requests
        stored = await requests.table.get(approval_id)
        await requests.begin(stored)  # and then it was killed
    call_id = stored.approval.call_id
    monkeypatch.setattr(Knowing, "known", {} if outcome == "unknown" else {call_id: outcome})
    monkeypatch.setattr(Knowing, "took_calls", [])
    monkeypatch.setitem(sys.modules, "knowing", sys.modules[__name__])
    knowing = Part(name="knowing", in_engine="knowing:Knowing")
    monkeypatch.setattr(engine_parts, "parts", lambda: (*parts(), knowing))
    async with asking(tmp_path, deeds=deeds) as desk:
        approval = await desk.engine.approvals.show(approval_id)
        assert (approval.state, approval.code) == (state, code)
    assert deeds.done == []
    assert Knowing.took_calls == [False, True]


@pytest.mark.parametrize("how", ["denied", "expired", "cancelled"])
async def test_every_final_answer_has_tool_version_and_total_time(how: str) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        desk.clock.advance(5)
        if how == "denied":
            await desk.decide(approval_id, NO)
        elif how == "cancelled":
            await desk.engine.approvals.cancel(approval_id, CALLER)
        else:
            desk.clock.advance(3600)
            await desk.parked("b")  # the desk looks round
        metadata = (await desk.ended(approval_id)).metadata
    assert (metadata.tool_name, metadata.tool_version) == ("erase", "1.0.0")
    assert metadata.execution_time_ms == metadata.performance.total_ms >= 5000
    assert (metadata.performance.approval_ms or 0) <= metadata.performance.total_ms


@pytest.mark.parametrize("decision", [YES, NO])
async def test_approval_wait_is_a_stage_of_its_own(decision: NewDecision) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        desk.clock.advance(40)
        await desk.decide(approval_id, decision)
        answer = (await desk.ended(approval_id)).metadata
        await desk.engine.database.flush()
        details = await desk.engine.part(EngineOverview).view.call(answer.call_id, ADMIN)
    assert details.call.execution_time_ms >= 40_000
    assert details.stages_ms["approval wait"] == 40_000


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
        assert answer.error.code == "PERMISSION_DENIED"
    assert deeds.done == ["a"]


@pytest.mark.sqlite
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
        assert answer.error.code == "APPROVAL_EXPIRED"
        assert answer.error.details == {"changed": ["arguments"]}
    assert deeds.done == []
