"""Sample approvals and rules, and a fake approval desk without the real one's logic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio

from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    ApprovalQuery,
    ApprovalState,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    StoredApproval,
    StoredRequest,
    own_view,
)
from fumehood.core.errors import IdempotencyConflict, ResourceNotFound
from fumehood.core.identity import Principal

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def approval(number: int = 1, **fields: Any) -> Approval:
    """A pending approval."""
    return Approval(
        **{
            "id": f"apr_{number:024x}", "version": 1, "state": ApprovalState.PENDING,
            "call_id": f"call_{number:024x}", "trace_id": "trace_20260102_000000000000",
            "tool": "delete_files", "tool_version": "1.0.0", "principal_id": "uid:1000",
            "agent_id": None, "session_id": None, "arguments": {"paths": ["a.txt"]},
            "preview": None, "rule": "default: dangerous tools wait for a human", "reason": None,
            "dangerous": True, "approvers": (), "quorum": 1, "decisions": (),
            "policy_version": "none", "action_digest": "0" * 64, "binding": {"secret": "binding"},
            "created_at": NOW, "expires_at": NOW + timedelta(hours=1),
        }
        | fields
    )  # fmt: skip


def rule(**fields: Any) -> RememberedRule:
    """A remembered rule."""
    return RememberedRule(
        **{
            "id": "rule_1", "tool": "delete_files", "principal_id": "uid:1000", "agent_id": None,
            "session_id": "sess_1", "arguments": {"paths": ["a.txt"]},
            "rule": "default", "definition": "0" * 64, "approval_id": f"apr_{1:024x}", "created_by": "approver:owner", "created_at": NOW,
            "expires_at": None, "uses_left": None, "used": 0, "removed_at": None,
        }
        | fields
    )  # fmt: skip


def _own(one: Approval) -> Approval:
    return own_view(StoredApproval(one, StoredRequest({}, {}, None)))


@dataclass
class FakeDesk:
    """Stores approvals by id; `decided` has the arguments of each decision."""

    approvals: dict[str, Approval] = field(default_factory=dict)
    decided: list[dict[str, Any]] = field(default_factory=list)
    changes: int = 0

    def __post_init__(self) -> None:
        self._changed = anyio.Event()

    def put(self, one: Approval) -> Approval:
        """Store the approval."""
        self.approvals[one.id] = one
        self.changes += 1
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        return one

    async def list(
        self, query: ApprovalQuery, *, principal: Principal | None = None
    ) -> ApprovalPage:
        found = [
            one
            for one in reversed(self.approvals.values())
            if (principal is None or one.principal_id == principal.id)
            and query.state in (None, one.state)
            and query.call_id in (None, one.call_id)
        ]
        items = tuple(one if principal is None else _own(one) for one in found[: query.limit])
        return ApprovalPage(
            items=items, has_more=len(items) < len(found), next_cursor=None, total_count=len(found)
        )

    async def show(self, approval_id: str, *, principal: Principal | None = None) -> Approval:
        one = self.approvals.get(approval_id)
        if one is None or (principal is not None and one.principal_id != principal.id):
            raise ResourceNotFound("There is no such approval. Do not retry.")
        return one if principal is None else _own(one)

    async def opened(self, approval_id: str) -> Approval:
        return await self.show(approval_id)

    async def decide(
        self, approval_id: str, decision: NewDecision, by: Principal, *,
        channel: str, peer: str | None = None, version: int | None = None,
    ) -> Approval:  # fmt: skip
        self.decided.append({
            "decision": decision, "by": by.id, "channel": channel, "peer": peer, "version": version,
        })  # fmt: skip
        one = await self.show(approval_id)
        if one.state is not ApprovalState.PENDING or version not in (None, one.version):
            raise IdempotencyConflict(
                "It is another by now.", details={"state": one.state, "version": one.version}
            )
        state = ApprovalState.APPROVED if decision.decision == "approve" else ApprovalState.DENIED
        return self.put(one.model_copy(update={"state": state, "version": one.version + 1}))

    async def decide_all(
        self, items: Sequence[OneOfSeveral], by: Principal, *, channel: str, peer: str | None = None
    ) -> tuple[Approval, ...]:
        return tuple([
            await self.decide(
                item.approval_id, item.decision, by, channel=channel, peer=peer,
                version=item.version,
            )
            for item in items
        ])  # fmt: skip

    async def cancel(self, approval_id: str, principal: Principal) -> Approval:
        await self.show(approval_id, principal=principal)
        one = self.approvals[approval_id]
        update = {"state": ApprovalState.CANCELLED, "version": one.version + 1}
        return _own(self.put(one.model_copy(update=update)))

    async def note_refusal(
        self, approval_id: str | None, by: Principal, peer: str | None, why: str
    ) -> None:
        """Do nothing."""

    async def next_change(self, after: int, *, within_s: float = 25) -> int:
        with anyio.move_on_after(within_s):
            while self.changes <= after:
                await self._changed.wait()
        return self.changes

    async def count_pending(self) -> int:
        return 1
