"""From the question to the deed: what an approver was shown is what a yes does, with a real desk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.core.errors import ApprovalExpired
from fumehood.core.identity import Principal, Scope
from fumehood.policy.model import CallFacts, Decision, Verdict
from support.container import scripted_wall

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]

OVER = {ApprovalState.DONE, ApprovalState.FAILED, ApprovalState.EXPIRED, ApprovalState.DENIED}


@dataclass
class Bench:
    engine: Engine
    session_id: str
    root: Path
    approver: Principal

    async def ask(self, **arguments: Any) -> str:
        """The id of the approval that a deletion waits for."""
        answer = await self.engine.call("delete_files", arguments, session_id=self.session_id)
        assert answer.error is not None
        assert answer.error.code == "REQUIRES_HUMAN_APPROVAL", answer.error
        extra = answer.error.model_dump()
        approval_id: str = extra["approval_id"]
        return approval_id

    async def agree(self, approval_id: str) -> Approval:
        """Say yes, and wait for what comes of it."""
        decision = NewDecision(decision="approve")
        await self.engine.approvals.decide(approval_id, decision, self.approver, channel="test")
        return await self.ended(approval_id)

    async def ended(self, approval_id: str) -> Approval:
        """The approval, once it is over."""
        seen = 0
        with anyio.fail_after(60):
            while True:
                one = await self.engine.approvals.show(approval_id)
                if one.state in OVER:
                    return one
                seen = await self.engine.approvals.next_change(seen)


@pytest.fixture
async def bench(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.chdir(home.parent)  # the scripted wall's sessions lie here
    config = Config(home=home, sessions={"image": "python"})  # type: ignore[arg-type]
    async with Engine(config=config, container=scripted_wall()) as engine:
        admin = Principal("approver:first", frozenset({Scope.ADMIN}))
        made, _ = await engine.approvers.add(
            "alice", [Scope.APPROVE], by=admin, now=datetime.now(UTC)
        )
        session = await engine.sessions.create(engine.owner)
        root = home.parent / "workspaces" / session.id
        root.mkdir(parents=True)
        yield Bench(engine, session.id, root, made.principal)


async def test_what_was_shown_goes_and_nothing_else(bench: Bench) -> None:
    (bench.root / "d").mkdir()
    (bench.root / "d/f").write_text("text")
    (bench.root / "kept").write_text("text")
    approval_id = await bench.ask(paths=["d"], recursive=True)
    preview = (await bench.engine.approvals.show(approval_id)).preview
    assert preview is not None
    assert [one["path"] for one in preview["removed"]] == ["d", "d/f"]
    assert (bench.root / "d/f").exists()
    (bench.root / "kept").write_text("changed meanwhile")
    assert (await bench.agree(approval_id)).state is ApprovalState.DONE
    assert [path.name for path in bench.root.iterdir()] == ["kept"]


async def test_files_that_changed_meanwhile_are_asked_about_again(bench: Bench) -> None:
    (bench.root / "d").mkdir()
    (bench.root / "d/f").write_text("shown")
    approval_id = await bench.ask(paths=["d"], recursive=True)
    (bench.root / "d/new").write_text("never shown")
    first = await bench.agree(approval_id)
    assert (first.state, first.changed) == (ApprovalState.EXPIRED, ("workspace",))
    assert sorted(path.name for path in (bench.root / "d").iterdir()) == ["f", "new"]
    assert first.superseded_by is not None
    second = await bench.engine.approvals.show(first.superseded_by)
    assert second.state is ApprovalState.PENDING
    assert second.preview is not None
    assert [one["path"] for one in second.preview["removed"]] == ["d", "d/f", "d/new"]
    assert (await bench.agree(second.id)).state is ApprovalState.DONE
    assert list(bench.root.iterdir()) == []


async def test_call_that_waits_ends_with_its_session(bench: Bench) -> None:
    engine = bench.engine
    (bench.root / "f").write_text("text")
    approval_id = await bench.ask(paths=["f"])
    twin = await engine.sessions.create(engine.owner)
    (bench.root.parent / twin.id).mkdir()
    of_twin = await Bench(engine, twin.id, bench.root, bench.approver).ask(paths=["f"])
    await engine.sessions.end(engine.owner, bench.session_id)
    engine._made.approvals.scheduler.look()
    one = await bench.ended(approval_id)
    assert (one.state, one.changed, one.code) == (
        ApprovalState.EXPIRED, ("session",), "APPROVAL_EXPIRED",
    )  # fmt: skip
    answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    assert answer is not None
    assert answer.error is not None
    assert "It was not denied. Make a new session" in answer.error.message
    with pytest.raises(ApprovalExpired, match="Too late: the session of this call ended at "):
        await bench.agree(approval_id)
    assert (await engine.approvals.show(of_twin)).state is ApprovalState.PENDING


async def test_an_edit_that_is_asked_about_again_needs_those_whom_the_first_call_needed(
    bench: Bench,
) -> None:
    gate: Any = bench.engine.policy.gate

    def decide(facts: CallFacts) -> Decision:
        if facts.arguments["paths"] == ["d"]:
            return Decision(
                Verdict.ASK, "two", policy_version="v", quorum=2, approvers=("alice", "bob")
            )
        return Decision(Verdict.ASK, "anybody", policy_version="v")

    gate.decide = decide
    admin = Principal("approver:first", frozenset({Scope.ADMIN}))
    made, _ = await bench.engine.approvers.add(
        "bob", [Scope.APPROVE], by=admin, now=datetime.now(UTC)
    )
    for name in ("d", "e"):
        (bench.root / name).mkdir()
    approval_id = await bench.ask(paths=["d"], recursive=True)
    edited = NewDecision(decision="approve", arguments={"paths": ["e"], "recursive": True})
    await bench.engine.approvals.decide(approval_id, edited, made.principal, channel="test")
    (bench.root / "e/new").write_text("never shown")
    first = await bench.agree(approval_id)
    assert first.superseded_by is not None
    second = await bench.engine.approvals.show(first.superseded_by)
    assert (second.approvers, second.quorum) == (("alice", "bob"), 2)
    assert second.asked_arguments is not None
    assert second.asked_arguments["paths"] == ["d"]
