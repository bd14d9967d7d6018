"""An approval given while the engine begins to stop is kept for the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood import Config, Engine, tool
from fumehood.approvals.model import ApprovalState, NewDecision
from fumehood.core.identity import Principal, Scope

pytestmark = pytest.mark.anyio
APPROVER = Principal("approver:ann", frozenset({Scope.APPROVE}))


@pytest.mark.row("A5", "D6")
@pytest.mark.parametrize("is_stopping", [True, False])
async def test_approved_call_not_yet_started_at_shutdown_stays_approved(
    home: Path, is_stopping: bool
) -> None:
    ran = []

    @tool(sandboxed=False, dangerous=True)
    async def act() -> None:
        """Act."""
        ran.append(1)

    async with Engine(tools=[act], config=Config(home=home, host_tools=("act",))) as engine:
        engine.approvals.requests.eligibility.require_enough = lambda *asked: None  # type: ignore[method-assign]
        waiting = await engine.call("act")
        assert waiting.error is not None
        approval_id = waiting.error.approval_id
        assert approval_id is not None
        if is_stopping:
            engine.drain()
            engine.approvals.requests.is_draining = lambda: (
                False
            )  # as it was when it had the call carried out
        await engine.approvals.decide(
            approval_id, NewDecision(decision="approve"), APPROVER, channel="control"
        )
        await engine.approvals.requests.runs.drained()
        after = await engine.approvals.show(approval_id)
        state = ApprovalState.APPROVED if is_stopping else ApprovalState.DONE
        assert (after.state, len(ran)) == (state, 0 if is_stopping else 1)
        engine.approvals.requests.is_draining = lambda: True
