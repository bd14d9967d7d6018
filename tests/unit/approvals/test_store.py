"""Approval rows: retention, and atomic changes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from fumehood.approvals.model import ApprovalQuery, ApprovalSettings, ApprovalState
from fumehood.approvals.store import Step
from fumehood.approvals.transitions import Transition
from fumehood.core.errors import IdempotencyConflict
from fumehood.observe.log import quiet_logger
from fumehood.observe.subscriber import Subscriber, Subscribers
from fumehood.testing import ManualClock
from support.asking import NO, YES, Asking, Deeds, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]


def _step(desk: Asking, leaves: ApprovalState, to: ApprovalState, **more: object) -> Step:
    row = Transition("test", frozenset({leaves}), to, "a test", "whenever", kind="approval.test")
    now = desk.engine.approvals.requests.now()
    return Step(row, "test", now, **more)  # type: ignore[arg-type]


async def test_ended_approvals_are_pruned_after_retention_and_pending_kept() -> None:
    deeds, clock = Deeds(), ManualClock()
    rules = ApprovalSettings(kept_days=1, expire_seconds=10 * 86_400)
    async with asking(deeds=deeds, clock=clock, approvals=rules) as desk:
        done, denied, waits = [await desk.parked(what) for what in "abc"]
        await desk.decide(done, YES)
        await desk.ended(done)
        await desk.decide(denied, NO)
        table = desk.engine._made.approvals.requests.table
        assert await table.prune(clock.now() + timedelta(hours=23)) == 0
        assert await table.prune(clock.now() + timedelta(hours=25)) == 2
        left = (await desk.engine.approvals.list(ApprovalQuery())).items
        assert [one.id for one in left] == [waits]


async def test_unresolved_interrupted_approval_is_never_pruned(tmp_path: Path) -> None:
    async with asking(tmp_path) as desk:
        approval_id = await desk.parked("a")
        table = desk.engine._made.approvals.requests.table
        await table.change(
            [(approval_id, _step(desk, ApprovalState.PENDING, ApprovalState.STARTED))]
        )
    async with asking(tmp_path) as desk:
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.INTERRUPTED
        later = desk.clock.now() + timedelta(days=3650)
        assert await desk.engine._made.approvals.requests.table.prune(later) == 0


@pytest.mark.parametrize(
    "more",
    [{"version": 2}, {"digest": "another"}],
    ids=["wrong-version", "wrong-digest"],
)
async def test_step_with_wrong_version_or_digest_changes_nothing(more: dict[str, object]) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        table = desk.engine._made.approvals.requests.table
        step = _step(desk, ApprovalState.PENDING, ApprovalState.APPROVED, **more)
        with pytest.raises(IdempotencyConflict):
            await table.change([(approval_id, step)])
        assert (await table.get(approval_id)).approval.version == 1
        # The twin.
        fitting = _step(desk, ApprovalState.PENDING, ApprovalState.APPROVED, version=1)
        (after,) = await table.change([(approval_id, fitting)])
        assert (after.approval.state, after.approval.version) == (ApprovalState.APPROVED, 2)


class Full(Subscriber):
    """Fails to store its message."""

    def on_approval(self, *_: object) -> None:
        raise RuntimeError("no room")


@pytest.mark.row("A6")
async def test_failed_notification_rolls_back_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as desk:
        approval_id = await desk.parked("a")
        with monkeypatch.context() as patch:
            patch.setattr(
                desk.engine.approvals.requests.table,
                "_subscribers",
                Subscribers([Full()], quiet_logger()),
            )
            with pytest.raises(RuntimeError):
                await desk.decide(approval_id)
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.PENDING
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        assert desk.deeds.done == ["a"]
