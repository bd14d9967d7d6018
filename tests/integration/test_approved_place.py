"""An approval is bound to its image and runtime: if either changes, it expires."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from fumehood import Config, Engine
from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import Database, open_database

pytestmark = [pytest.mark.anyio, pytest.mark.needs("docker"), pytest.mark.row("A2", "S10")]

ASKS = '[[rules]]\nid = "look-first"\ndecision = "ask"\ntools = ["run_python"]\n'
ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
OVER = set(ApprovalState) - {ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.STARTED}


def _engine(home: Path, database: Database, **container: Any) -> Engine:
    policy = home / "policy.toml"
    policy.write_text(ASKS)
    place: Any = {"pool_min": 0, "memory_mb": 128, "images": {"python": "python"}, **container}
    return Engine(config=Config(home=home, policy_file=policy, container=place), database=database)


async def _over(engine: Engine, approval_id: str) -> Approval:
    seen = 0
    with anyio.fail_after(60):
        while (one := await engine.approvals.show(approval_id)).state not in OVER:
            seen = await engine.approvals.next_change(seen, within_s=1)
    return one


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        pytest.param({}, ApprovalState.DONE, id="unchanged"),
        pytest.param({"images": {"python": "python-data"}}, ApprovalState.EXPIRED, id="image"),
        pytest.param(
            {"runtime": "runsc"}, ApprovalState.EXPIRED, id="runtime",
            marks=pytest.mark.needs("runsc"),
        ),
    ],
)  # fmt: skip
async def test_approval_expires_if_image_or_runtime_changed_since_the_request(
    home: Path, changed: dict[str, Any], ends: ApprovalState
) -> None:
    """The program's definition, arguments and limits stay what they were."""
    database = open_database(home / "state.db")
    try:
        async with _engine(home, database) as engine:
            admin = Principal("approver:first", frozenset({Scope.ADMIN}))
            await engine.approvers.add("alice", [Scope.APPROVE], by=admin, now=datetime.now(UTC))
            asked = await engine.call("run_python", {"code": "print(6 * 7)"})
            assert asked.error is not None
            assert asked.error.approval_id is not None, asked.error
            approval_id = asked.error.approval_id
            shown = (await engine.approvals.show(approval_id)).binding
            assert shown is not None
            assert shown["place"]["image"] == "python"
            assert shown["place"]["image_digest"].startswith("sha256:")
        async with _engine(home, database, **changed) as engine:
            yes = NewDecision(decision="approve")
            await engine.approvals.decide(approval_id, yes, ALICE, channel="test")
            one = await _over(engine, approval_id)
            answer = await engine.approvals.answer_of(one.call_id, engine.owner)
    finally:
        database.close()
    assert one.state is ends
    assert answer is not None
    if ends is ApprovalState.DONE:
        assert answer.data["stdout"] == "42\n"
        return
    assert answer.error is not None
    assert answer.error.code == "APPROVAL_EXPIRED"
    assert answer.error.details == {"changed": ["place"]}
