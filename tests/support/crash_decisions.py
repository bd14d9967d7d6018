"""A caller that runs its own tool after each approval, and an engine that dies meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fumehood.approvals.model import ApprovalQuery, ApprovalState, NewDecision

from .crash_approvals import (
    ALICE,
    CHANNEL,
    User,
    engine_in,
    mark,
    marks,
    prepare,
    settled,
    weakened,
)
from .crash_points import Hook, Say

__all__ = ["examine", "play", "prepare"]

YES = NewDecision(decision="approve")


async def ask(user: User, home: Path, *, say: Say) -> str | None:
    """Request a decision; run the tool if allowed, else return the pending approval."""
    decision = await user.engine.decide("deploy", {"what": "it"})
    if decision.decision == "allow":
        say("allowed")
        mark(home, "deploy")
        return None
    return decision.approval_id


async def play(home: Path, hook: Hook, say: Say) -> None:
    """Request, approve, and then request concurrently from two callers."""
    with weakened(home):
        async with engine_in(home, hook) as (engine, _, clock):
            user = User(engine, clock, lambda _: None)
            approval_id = await ask(user, home, say=say)
            assert approval_id is not None
            await user.desk.decide(approval_id, YES, ALICE, channel=CHANNEL)
            say("yes")
            await settled(user, with_pending=False)
            await asyncio.gather(*(ask(user, home, say=say) for _ in range(2)))


async def examine(home: Path) -> tuple[int, int]:
    """Repeat the request as the caller would; return the numbers of runs and approvals."""
    async with engine_in(home) as (engine, _, clock):
        user = User(engine, clock, lambda _: None)
        await settled(user, with_pending=False)
        for _ in range(2):
            await ask(user, home, say=lambda _: None)
        page = await user.desk.list(ApprovalQuery(state=ApprovalState.DONE))
        return marks(home)["deploy"], len(page.items)
