"""The requests about approvals, each as a function that makes one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fumehood.answers import (
    ApprovalAnswer,
    ApprovalChanges,
    ApprovalList,
    CallAnswer,
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
from fumehood.client.api_request import ApiRequest, address, data_of, encode, query_text
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import ApprovalQueryKeywords, checked

LONGEST_POLL_S = 25.0


def list_approvals(**asked: Any) -> ApiRequest[ApprovalPage]:
    """A page of them, newest first."""
    read = data_of(ApprovalList)
    query = query_text(checked(ApprovalQueryKeywords, "list", asked))
    return ApiRequest("GET", address("approvals") + query, lambda raw: read(raw).page)


def show_approval(approval_id: str) -> ApiRequest[Approval]:
    """One approval."""
    return ApiRequest("GET", address("approvals", approval_id), _approval)


def cancel_approval(approval_id: str) -> ApiRequest[Approval]:
    """Take back one's own call."""
    return ApiRequest("POST", address("approvals", approval_id, "cancel"), _approval)


def call_state(call_id: str) -> ApiRequest[CallAnswer]:
    """One call of the caller's own, with its approval and its answer."""
    return ApiRequest("GET", address("calls", call_id), data_of(CallAnswer))


def decide(approval_id: str, decision: NewDecision, version: int | None) -> ApiRequest[Approval]:
    """Approve or deny what was seen as this version; None is whatever it is now."""
    return ApiRequest(
        "POST",
        address("approvals", approval_id, "decision"),
        _approval,
        encode(_given(decision)),
        headers=_if_match(version),
    )


def decide_all(items: Iterable[OneOfSeveral]) -> ApiRequest[tuple[Approval, ...]]:
    """Decide on several, all or none."""
    read = data_of(DecidedApprovals)
    body = SeveralDecisions(items=tuple(items))
    path = address("approvals", "decisions")
    return ApiRequest("POST", path, lambda raw: read(raw).items, encode(_given(body)))


def preview_remember(approval_id: str, wish: RememberWish) -> ApiRequest[RememberedRule]:
    """The rule that approving with this wish would leave behind."""
    path = address("approvals", approval_id, "remember-preview")
    return ApiRequest("POST", path, _rule, encode(_given(wish)))


def preview_edit(approval_id: str, arguments: JsonObject) -> ApiRequest[Approval]:
    """The approval as a yes to these arguments would make it."""
    path = address("approvals", approval_id, "edit-preview")
    return ApiRequest("POST", path, _approval, encode(_given(NewEdit(arguments=arguments))))


def resolve(
    approval_id: str, outcome: Literal["done", "failed"], note: str | None
) -> ApiRequest[Approval]:
    """Say what became of an interrupted call."""
    body = Resolution(outcome=outcome, note=note)
    return ApiRequest(
        "POST", address("approvals", approval_id, "resolve"), _approval, encode(_given(body))
    )


def next_change(after: int, wait_s: float) -> ApiRequest[int]:
    """Wait until something changes."""
    read = data_of(ApprovalChanges)
    asked = {"after": after, "wait": wait_s}
    return ApiRequest(
        "GET",
        address("approvals", "changes") + query_text(asked),
        lambda raw: read(raw).changes,
        work_s=wait_s,
    )


def list_remembered() -> ApiRequest[tuple[RememberedRule, ...]]:
    """The rules that decisions left behind."""
    read = data_of(RememberedList)
    return ApiRequest("GET", address("policy", "remembered"), lambda raw: read(raw).items)


def forget(rule_id: str) -> ApiRequest[RememberedRule]:
    """End such a rule."""
    return ApiRequest("DELETE", address("policy", "remembered", rule_id), _rule)


def _if_match(version: int | None) -> Mapping[str, str]:
    return {"if-match": "*" if version is None else f'"{version}"'}


def _given(
    body: NewDecision | NewEdit | SeveralDecisions | RememberWish | Resolution,
) -> dict[str, Any]:
    """What was said. What was not said is left out, at every depth."""
    return body.model_dump(mode="json", exclude_unset=True)


def _approval(raw: bytes) -> Approval:
    return data_of(ApprovalAnswer)(raw).approval


def _rule(raw: bytes) -> RememberedRule:
    return data_of(RememberedAnswer)(raw).rule
