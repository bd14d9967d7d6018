"""Approvals: `AsyncClient.approvals` and `AsyncControlClient.approvals`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Unpack

from pydantic import BaseModel

from fumehood.answers import (
    ApprovalAnswer,
    ApprovalChanges,
    ApprovalList,
    DecidedApprovals,
    RememberedAnswer,
    RememberedList,
)
from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    NewDecision,
    NewEdit,
    OneOfSeveral,
    RememberedRule,
    RememberWish,
    Resolution,
    SeveralDecisions,
)
from fumehood.client.api_request import ask
from fumehood.client.async_transport import AsyncTransport
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import ApprovalQueryKeywords, checked, show_keywords

LONGEST_POLL_S = 25.0


@show_keywords
class AsyncOwnApprovals:
    """The caller's own approvals. A part of `AsyncClient`."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, **query: Unpack[ApprovalQueryKeywords]) -> ApprovalPage:
        """A page, newest first. `query` is that of `ApprovalQuery`."""
        asked = checked(ApprovalQueryKeywords, "list", query)
        found = await self._transport.send(ask("GET", ApprovalList, "approvals", query=asked))
        return found.page

    async def show(self, approval_id: str) -> Approval:
        """One of them."""
        found = await self._transport.send(ask("GET", ApprovalAnswer, "approvals", approval_id))
        return found.approval

    async def cancel(self, approval_id: str) -> Approval:
        """Take the call back, as long as it has not begun."""
        request = ask("POST", ApprovalAnswer, "approvals", approval_id, "cancel")
        found = await self._transport.send(request)
        return found.approval


@show_keywords
class AsyncControlledApprovals:
    """Everybody's approvals, to be decided. A part of `AsyncControlClient`.

    `version` is that of the approval as it was looked at: if it is another one by now, nothing
    is done (`Refused`, IDEMPOTENCY_CONFLICT). None decides on whatever it is.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self, **query: Unpack[ApprovalQueryKeywords]) -> ApprovalPage:
        """A page, newest first. `query` is that of `ApprovalQuery`."""
        asked = checked(ApprovalQueryKeywords, "list", query)
        found = await self._transport.send(ask("GET", ApprovalList, "approvals", query=asked))
        return found.page

    async def show(self, approval_id: str) -> Approval:
        """One of them, whole."""
        found = await self._transport.send(ask("GET", ApprovalAnswer, "approvals", approval_id))
        return found.approval

    async def approve(
        self,
        approval_id: str,
        *,
        version: int | None,
        reason: str | None = None,
        arguments: JsonObject | None = None,
        remember: RememberWish | None = None,
        action_digest: str | None = None,
    ) -> Approval:
        """Approve it; with `arguments`, approve the call with these arguments instead.

        `action_digest` is the digest of the preview (`preview_edit`): if the action has changed
        since then, nothing is decided.
        """
        decision = NewDecision(
            decision="approve", reason=reason, arguments=arguments, remember=remember,
            action_digest=action_digest,
        )  # fmt: skip
        return await self._decide(approval_id, decision, version)

    async def deny(
        self, approval_id: str, *, version: int | None, reason: str | None = None
    ) -> Approval:
        """Deny it. The model is told the reason."""
        decision = NewDecision(decision="deny", reason=reason)
        return await self._decide(approval_id, decision, version)

    async def decide_all(self, items: Iterable[OneOfSeveral]) -> tuple[Approval, ...]:
        """Decide on several at once: all of them, or none."""
        body = _given(SeveralDecisions(items=tuple(items)))
        request = ask("POST", DecidedApprovals, "approvals", "decisions", body=body)
        found = await self._transport.send(request)
        return found.items

    async def preview_remember(self, approval_id: str, wish: RememberWish) -> RememberedRule:
        """The rule that approving with this wish would leave behind. Nothing is saved."""
        parts = "approvals", approval_id, "remember-preview"
        found = await self._transport.send(ask("POST", RememberedAnswer, *parts, body=_given(wish)))
        return found.rule

    async def preview_edit(self, approval_id: str, arguments: JsonObject) -> Approval:
        """The approval with these arguments, or why they are refused. Nothing is saved."""
        parts, body = ("approvals", approval_id, "edit-preview"), NewEdit(arguments=arguments)
        found = await self._transport.send(ask("POST", ApprovalAnswer, *parts, body=_given(body)))
        return found.approval

    async def resolve(
        self, approval_id: str, outcome: Literal["done", "failed"], *, note: str | None = None
    ) -> Approval:
        """Record the outcome of an interrupted call. It is not run again."""
        parts, body = ("approvals", approval_id, "resolve"), Resolution(outcome=outcome, note=note)
        found = await self._transport.send(ask("POST", ApprovalAnswer, *parts, body=_given(body)))
        return found.approval

    async def next_change(self, after: int = -1, *, wait_s: float = LONGEST_POLL_S) -> int:
        """Wait until the number of changes is another than `after`, 25 s at most."""
        return (await self.changes(after, wait_s=wait_s)).changes

    async def changes(self, after: int = -1, *, wait_s: float = LONGEST_POLL_S) -> ApprovalChanges:
        """The same, with the number of approvals that are pending then."""
        query = {"after": after, "wait": wait_s}
        request = ask("GET", ApprovalChanges, "approvals", "changes", query=query, work_s=wait_s)
        return await self._transport.send(request)

    async def remembered(self) -> tuple[RememberedRule, ...]:
        """The rules that decisions left behind."""
        found = await self._transport.send(ask("GET", RememberedList, "policy", "remembered"))
        return found.items

    async def forget(self, rule_id: str) -> RememberedRule:
        """End such a rule."""
        request = ask("DELETE", RememberedAnswer, "policy", "remembered", rule_id)
        found = await self._transport.send(request)
        return found.rule

    async def _decide(
        self, approval_id: str, decision: NewDecision, version: int | None
    ) -> Approval:
        request = ask(
            "POST",
            ApprovalAnswer,
            "approvals",
            approval_id,
            "decision",
            body=_given(decision),
            headers={"if-match": "*" if version is None else f'"{version}"'},
        )
        found = await self._transport.send(request)
        return found.approval


def _given(body: BaseModel) -> JsonObject:
    """The given fields. Absent ones are left out, at every depth."""
    return body.model_dump(mode="json", exclude_unset=True)
