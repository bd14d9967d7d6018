"""Approved effects end to end: an approval covers exactly the preview the approver saw."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.core.errors import ApprovalExpired, IdempotencyConflict
from fumehood.policy.model import Decision, Verdict
from support.answers import code_of, error_of
from support.asking import ALICE, BOB, add_approvers, approve, reaches
from support.container import scripted_wall

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2", "A5")]


@dataclass
class Bench:
    engine: Engine
    session_id: str
    root: Path

    async def ask(self, **arguments: Any) -> str:
        """Request a deletion and return its approval id."""
        answer = await self.engine.call("delete_files", arguments, session_id=self.session_id)
        assert code_of(answer) == "REQUIRES_HUMAN_APPROVAL", answer.error
        return error_of(answer).approval_id or ""

    async def agree(self, approval_id: str) -> Approval:
        """Approve and wait for the outcome."""
        return await approve(self.engine, approval_id)


@pytest.fixture
async def bench(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.chdir(home.parent)  # the scripted wall's sessions lie here
    config = Config(home=home, sessions={"image": "python"})  # type: ignore[arg-type]
    async with Engine(config=config, container=scripted_wall()) as engine:
        await add_approvers(engine, "alice", "bob")
        session = await engine.sessions.create(engine.owner)
        root = home.parent / "workspaces" / session.id
        root.mkdir(parents=True)
        yield Bench(engine, session.id, root)


async def test_pending_approval_expires_with_its_session(bench: Bench) -> None:
    engine = bench.engine
    (bench.root / "f").write_text("text")
    approval_id = await bench.ask(paths=["f"])
    twin = await engine.sessions.create(engine.owner)
    (bench.root.parent / twin.id).mkdir()
    (bench.root.parent / twin.id / "f").write_text("text")
    of_twin = await Bench(engine, twin.id, bench.root).ask(paths=["f"])
    await engine.sessions.end(engine.owner, bench.session_id)
    engine.approvals.requests.new_call.set()
    one = await reaches(bench.engine, approval_id)
    assert (one.state, one.changed, one.code) == (
        ApprovalState.EXPIRED, ("session",), "APPROVAL_EXPIRED",
    )  # fmt: skip
    answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    assert answer is not None
    assert "It was not denied. Make a new session" in error_of(answer).message
    with pytest.raises(ApprovalExpired, match="Too late: the session of this call ended at "):
        await bench.agree(approval_id)
    assert (await engine.approvals.show(of_twin)).state is ApprovalState.PENDING


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"paths": ["no"]}, "RESOURCE_NOT_FOUND"),
        ({"paths": ["f", "d"]}, "EXECUTION_ERROR"),
        ({"paths": ["l/f"]}, "EXECUTION_ERROR"),
    ],
)
async def test_deletion_predicted_to_fail_is_refused_without_approval(
    bench: Bench, arguments: dict[str, Any], code: str
) -> None:
    (bench.root / "f").write_text("text")
    (bench.root / "d").mkdir()
    (bench.root / "d/f").write_text("text")
    (bench.root / "l").symlink_to("d")
    answer = await bench.engine.call("delete_files", arguments, session_id=bench.session_id)
    assert (code_of(answer), error_of(answer).approval_id) == (code, None)
    assert (error_of(answer).details or {})["deleted"] == []
    assert await bench.engine.approvals.count_pending() == 0
    assert (bench.root / "f").exists()
    await bench.ask(paths=["f", "no"])  # the twin


def removed(approval: Approval) -> list[str]:
    return [one["path"] for one in approval.preview["removed"]]


async def test_opening_an_approval_refreshes_its_preview_and_version(
    bench: Bench,
) -> None:
    approvals = bench.engine.approvals
    (bench.root / "d").mkdir()
    (bench.root / "d/f").write_text("asked about")
    approval_id = await bench.ask(paths=["d"], recursive=True)
    asked = await approvals.show(approval_id)
    unchanged = await approvals.opened(approval_id)
    assert (unchanged.version, unchanged.action_digest) == (1, asked.action_digest)
    assert asked.previewed_at is not None
    assert unchanged.previewed_at is not None
    assert asked.previewed_at < unchanged.previewed_at
    (bench.root / "d/new").write_text("since then")
    opened = await approvals.opened(approval_id)
    assert removed(opened) == ["d", "d/f", "d/new"]
    assert opened.version == 2
    assert opened.action_digest != asked.action_digest
    assert await approvals.show(approval_id) == opened  # it is stored
    stale = NewDecision(decision="approve")
    with pytest.raises(IdempotencyConflict):
        await approvals.decide(approval_id, stale, ALICE, channel="test", version=1)
    seen = NewDecision(decision="approve", action_digest=opened.action_digest)
    await approvals.decide(approval_id, seen, ALICE, channel="test", version=2)
    assert (await reaches(bench.engine, approval_id)).state is ApprovalState.DONE
    assert list(bench.root.iterdir()) == []


async def test_approval_of_refreshed_preview_does_not_cover_the_original_files(
    bench: Bench,
) -> None:
    """The files revert to their first state after the approver opened the approval."""
    (bench.root / "f").write_text("one")
    approval_id = await bench.ask(paths=["f"])
    (bench.root / "f").write_text("two")
    await bench.engine.approvals.opened(approval_id)
    (bench.root / "f").write_text("one")
    ended = await bench.agree(approval_id)
    assert (ended.state, ended.changed) == (ApprovalState.EXPIRED, ("workspace",))
    assert (bench.root / "f").read_text() == "one"


async def test_vote_on_an_outdated_preview_is_discarded_when_refreshed(
    bench: Bench,
) -> None:
    gate: Any = bench.engine.policy.gate
    gate.decide = lambda facts: Decision(Verdict.ASK, "two", policy_version="v", quorum=2)
    yes, approvals = NewDecision(decision="approve"), bench.engine.approvals
    (bench.root / "f").write_text("one")
    approval_id = await bench.ask(paths=["f"])
    voted = await approvals.decide(approval_id, yes, ALICE, channel="test")
    assert voted.counted == ("approver:alice",)
    (bench.root / "f").write_text("two")
    opened = await approvals.opened(approval_id)
    assert opened.counted == ()
    voted = await approvals.decide(approval_id, yes, BOB, channel="test")
    assert (voted.state, voted.counted) == (ApprovalState.PENDING, ("approver:bob",))
    assert (await bench.agree(approval_id)).state is ApprovalState.DONE


async def test_opening_an_approval_of_a_busy_session_keeps_the_old_preview(bench: Bench) -> None:
    (bench.root / "f").write_text("one")
    approval_id = await bench.ask(paths=["f"])
    asked = await bench.engine.approvals.show(approval_id)
    (bench.root / "f").write_text("two")
    async with await bench.engine.sessions.files(bench.engine.owner, bench.session_id):
        with anyio.fail_after(120):
            assert await bench.engine.approvals.opened(approval_id) == asked
    assert (await bench.engine.approvals.opened(approval_id)).version == 2  # the twin
