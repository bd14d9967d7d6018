# Made by scripts/make_sync_client.py from client/async_approvals.py. Do not edit it here.
"""Approvals: `Client.approvals` and `ControlClient.approvals`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Unpack

from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    NewDecision,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
)
from fumehood.client.requests import approvals
from fumehood.client.sync.transport import Transport
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import ApprovalQueryKeywords, show_keywords


@show_keywords
class OwnApprovals:
    """What waits for a human's yes of the caller's own calls. A part of `Client`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, **query: Unpack[ApprovalQueryKeywords]) -> ApprovalPage:
        """A page, newest first. `query` is that of `ApprovalQuery`."""
        return self._transport.send(approvals.list_approvals(**query))

    def show(self, approval_id: str) -> Approval:
        """One of them."""
        return self._transport.send(approvals.show_approval(approval_id))

    def cancel(self, approval_id: str) -> Approval:
        """Take the call back, as long as it has not begun."""
        return self._transport.send(approvals.cancel_approval(approval_id))


@show_keywords
class ControlledApprovals:
    """Everybody's approvals, to be decided. A part of `ControlClient`.

    `version` is that of the approval as it was looked at: if it is another one by now, nothing
    is done (`Refused`, IDEMPOTENCY_CONFLICT). None decides on whatever it is.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, **query: Unpack[ApprovalQueryKeywords]) -> ApprovalPage:
        """A page, newest first. `query` is that of `ApprovalQuery`."""
        return self._transport.send(approvals.list_approvals(**query))

    def show(self, approval_id: str) -> Approval:
        """One of them, whole."""
        return self._transport.send(approvals.show_approval(approval_id))

    def approve(
        self,
        approval_id: str,
        *,
        version: int | None,
        reason: str | None = None,
        arguments: JsonObject | None = None,
        remember: RememberWish | None = None,
        action_digest: str | None = None,
    ) -> Approval:
        """Say yes, to the call with other `arguments` where they are given.

        `action_digest` is that of what was looked at (`preview_edit`): if it would be something
        else by now, nothing is done.
        """
        decision = NewDecision(
            decision="approve", reason=reason, arguments=arguments, remember=remember,
            action_digest=action_digest,
        )  # fmt: skip
        return self._transport.send(approvals.decide(approval_id, decision, version))

    def deny(self, approval_id: str, *, version: int | None, reason: str | None = None) -> Approval:
        """Say no. The model is told the reason."""
        decision = NewDecision(decision="deny", reason=reason)
        return self._transport.send(approvals.decide(approval_id, decision, version))

    def decide_all(self, items: Iterable[OneOfSeveral]) -> tuple[Approval, ...]:
        """Decide on several at once: all of them, or none."""
        return self._transport.send(approvals.decide_all(items))

    def preview_remember(self, approval_id: str, wish: RememberWish) -> RememberedRule:
        """The rule that approving with this wish would leave behind. Nothing is saved."""
        return self._transport.send(approvals.preview_remember(approval_id, wish))

    def preview_edit(self, approval_id: str, arguments: JsonObject) -> Approval:
        """It as a yes to these arguments would make it, or why that cannot be. Nothing is saved."""
        return self._transport.send(approvals.preview_edit(approval_id, arguments))

    def resolve(
        self, approval_id: str, outcome: Literal["done", "failed"], *, note: str | None = None
    ) -> Approval:
        """Say what became of an interrupted call. It is not run again."""
        return self._transport.send(approvals.resolve(approval_id, outcome, note))

    def next_change(self, after: int = -1, *, wait_s: float = approvals.LONGEST_POLL_S) -> int:
        """Wait until the number of changes is another than `after`, 25 s at most."""
        return self._transport.send(approvals.next_change(after, wait_s))

    def remembered(self) -> tuple[RememberedRule, ...]:
        """The rules that decisions left behind."""
        return self._transport.send(approvals.list_remembered())

    def forget(self, rule_id: str) -> RememberedRule:
        """End such a rule."""
        return self._transport.send(approvals.forget(rule_id))
