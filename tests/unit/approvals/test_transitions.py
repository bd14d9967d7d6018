"""The table of an approval's transitions, walked at random: the store follows it and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.approvals import store as steps
from fumehood.approvals.model import (
    OPEN_STATES,
    SESSION,
    TRIAL,
    Approval,
    ApprovalState,
    DecisionRecord,
    Resolution,
    StoredApproval,
)
from fumehood.approvals.store import ApprovalTable, Step
from fumehood.approvals.transitions import TRANSITIONS
from fumehood.core.errors import ApprovalExpired, IdempotencyConflict
from fumehood.storage.database import open_database
from support.answers import envelope_of
from support.asking import asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]


def decision(kind: str) -> Callable[[Approval, datetime], DecisionRecord]:
    def make(approval: Approval, now: datetime) -> DecisionRecord:
        return DecisionRecord(
            at=now, approver=f"approver:{approval.version}", channel="test", decision=kind,  # type: ignore[arg-type]
            action_digest=approval.action_digest,
        )  # fmt: skip

    return make


ANSWER = envelope_of()

approve, deny = decision("approve"), decision("deny")

MADE: dict[str, Callable[[StoredApproval, datetime], Step]] = {
    "approve": lambda stored, now: steps.approved(
        approve(stored.approval, now), version=None, start_by=now + timedelta(days=1),
        edited=None, remember=None, counts=lambda approver: True,
    ),
    "deny": lambda stored, now: steps.denied(
        deny(stored.approval, now), version=None, answer=ANSWER
    ),
    "cancel": lambda stored, now: steps.cancelled("ann", now, ANSWER),
    "update": lambda stored, now: steps.previewed(stored.approval, stored, now),
    "warn": lambda stored, now: steps.expiring(now),
    "expire": lambda stored, now: steps.expired(now, ANSWER),
    "end with its session": lambda stored, now: steps.outlived(SESSION, now, ANSWER),
    "end with its engine": lambda stored, now: steps.outlived(TRIAL, now, ANSWER),
    "start": lambda stored, now: steps.started(stored.approval, now),
    "succeed": lambda stored, now: steps.ended(ApprovalState.DONE, ANSWER, (), now),
    "fail": lambda stored, now: steps.ended(ApprovalState.FAILED, ANSWER, (), now),
    "change": lambda stored, now: steps.ended(ApprovalState.EXPIRED, ANSWER, ("image",), now),
    "stop": lambda stored, now: steps.ended(ApprovalState.CANCELLED, ANSWER, (), now),
    "interrupt": lambda stored, now: steps.interrupted(now, ANSWER),
    "resolve as done": lambda stored, now: steps.resolved(
        Resolution(outcome="done", note="seen"), "approver:eve", now, ANSWER
    ),
    "resolve as failed": lambda stored, now: steps.resolved(
        Resolution(outcome="failed", note="seen"), "approver:eve", now, ANSWER
    ),
}  # fmt: skip


def test_each_row_has_a_step_and_each_step_its_row() -> None:
    assert MADE.keys() == TRANSITIONS.keys()


@pytest.mark.parametrize("name", TRANSITIONS)
async def test_step_is_the_row_of_its_name(name: str) -> None:
    async with asking() as desk:
        stored = await desk.engine.approvals.requests.table.get(await desk.parked())
    assert MADE[name](stored, desk.clock.now()).transition is TRANSITIONS[name]


def test_states_that_no_row_leaves_are_the_ends_of_a_call() -> None:
    left = {state for row in TRANSITIONS.values() for state in row.leaves}
    assert left == OPEN_STATES | {ApprovalState.INTERRUPTED}
    reached = {row.to for row in TRANSITIONS.values()} - {None}
    assert reached == set(ApprovalState) - {ApprovalState.PENDING}


def test_call_never_starts_without_approval_and_never_twice() -> None:
    """Whatever way leads to `started`, the state before it was `approved`."""
    (start,) = [row for row in TRANSITIONS.values() if row.to is ApprovalState.STARTED]
    assert start.leaves == {ApprovalState.APPROVED}
    (approve,) = [row for row in TRANSITIONS.values() if row.to is ApprovalState.APPROVED]
    assert approve.leaves == {ApprovalState.PENDING}
    assert not [row for row in TRANSITIONS.values() if row.to is ApprovalState.PENDING]


@given(st.lists(st.sampled_from(sorted(TRANSITIONS)), min_size=1, max_size=8))
async def test_store_follows_the_table_and_nothing_else(walk: list[str]) -> None:
    async with asking() as desk:
        approval_id = await desk.parked()
        parked = await desk.engine.approvals.requests.table.get(approval_id)
    now = desk.clock.now()
    database = open_database(None)
    try:
        table = ApprovalTable(database, subscribers=None, kept_days=1)
        await table.create(parked, now - timedelta(days=1))
        expected, version = ApprovalState.PENDING, parked.approval.version
        for name in walk:
            row, before = TRANSITIONS[name], await table.get(approval_id)
            step = MADE[name](before, now)
            if expected in row.leaves:
                (after,) = await table.change([(approval_id, step)])
                expected = row.to or expected
                version += step.is_seen
            else:
                with pytest.raises((IdempotencyConflict, ApprovalExpired)):
                    await table.change([(approval_id, step)])
                after = await table.get(approval_id)
                assert after == before
            assert (after.approval.state, after.approval.version) == (expected, version)
    finally:
        database.close()
