"""`/v1/approvals`: calls that wait for approval.

On the callers' socket each principal sees and cancels its own approvals. On the control socket
approvers see all and decide; a signed webhook callback decides where that is allowed. A decision
names the version it was made on, in `If-Match`; if that changed, it is refused.
Invariant: nothing on the callers' socket decides anything.
*Source* for `ETag` and `If-Match`: RFC 9110, sections 8.8.3 and 13.1.1; one strong tag or `*`.
"""

from __future__ import annotations

import asyncio
import re

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    ApprovalAnswer,
    ApprovalChanges,
    ApprovalList,
    DecidedApprovals,
    Pagination,
    RememberedAnswer,
    RememberedList,
)
from fumehood.approvals.channels.webhook import HEADER
from fumehood.approvals.model import (
    Approval,
    ApprovalPage,
    ApprovalQuery,
    NewDecision,
    NewEdit,
    OneOfSeveral,
    RememberWish,
    Resolution,
    SeveralDecisions,
)
from fumehood.core.errors import (
    ApprovalExpired,
    EngineError,
    IdempotencyConflict,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    ResourceNotFound,
    ShuttingDown,
    Unauthorized,
)
from fumehood.core.identity import Principal, Scope
from fumehood.http.answers import (
    answer,
    engine_of,
    envelope_response,
    parse_body,
    parse_json,
    query_of,
    read_json,
    read_raw,
)
from fumehood.http.caller import (
    log_refusal,
    peer_principal_id,
    require_approver,
    require_decider,
    require_principal,
)
from fumehood.http.operation import Needs, Operation

APPROVAL = {"approval_id": "The approval's id, `apr_…`."}
RULE = {"rule_id": "The remembered rule's id."}
LONGEST_POLL_S = 25.0
WEBHOOK = Principal("webhook", frozenset({Scope.APPROVE}))
"""The principal of a signed callback."""

ANY = "*"
_TAG = re.compile(r'"(0|[1-9][0-9]{0,14})"', re.ASCII)


class ChangesQuery(BaseModel):
    """The number to wait after; without one the answer comes at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    after: int = Field(default=-1, ge=-1)
    wait: float = Field(default=LONGEST_POLL_S, ge=0, le=LONGEST_POLL_S)
    """Seconds, after which the answer is the same number."""


class CallbackBody(OneOfSeveral):
    """A callback's decision, on the version of the message that it answers."""

    version: int = Field(strict=True)


async def list_own_approvals(request: Request) -> Response:
    """List the caller's own approvals, newest first."""
    principal = require_principal(request)
    query = query_of(ApprovalQuery, request)
    page = await engine_of(request).desk.list(query, principal=principal)
    return _page(request, page, [for_its_caller(item) for item in page.items])


async def show_own_approval(request: Request) -> Response:
    """Show one of the caller's own approvals."""
    principal = require_principal(request)
    found = await engine_of(request).desk.show(_id(request), principal=principal)
    return _approval(request, for_its_caller(found))


async def cancel_approval(request: Request) -> Response:
    """Cancel one of the caller's own calls that waits for approval or has not used it yet."""
    principal = require_principal(request)
    found = await engine_of(request).desk.cancel(_id(request), principal)
    return _approval(request, for_its_caller(found))


async def list_approvals(request: Request) -> Response:
    """List all approvals, newest first, without their bindings."""
    await require_approver(request)
    page = await engine_of(request).desk.list(query_of(ApprovalQuery, request))
    return _page(request, page, page.items)


async def show_approval(request: Request) -> Response:
    """Show one approval in full. A decision sends its `ETag` back in `If-Match`."""
    await require_approver(request)
    return _approval(request, await engine_of(request).desk.show(_id(request)))


async def decide_approval(request: Request) -> Response:
    """Approve, approve with other arguments, or deny.

    `If-Match` is required: the `ETag` of the version that the approver was shown, or `*` for the
    current one. If the approval has changed or was already decided, nothing is done
    (`IDEMPOTENCY_CONFLICT`, with `details.state` and `details.version`).
    """
    document = await read_json(request)
    by = await require_decider(request, _id(request))
    decision = parse_body(NewDecision, document)
    approval = await engine_of(request).desk.decide(
        _id(request),
        decision,
        by,
        channel="control",
        peer=peer_principal_id(request),
        version=expected_version(request),
    )
    return _approval(request, approval)


async def decide_approvals(request: Request) -> Response:
    """Decide on several approvals: all or none."""
    document = await read_json(request)
    by = await require_decider(request)
    items = parse_body(SeveralDecisions, document).items
    _refuse_twice(items)
    decided = await engine_of(request).desk.decide_all(
        items, by, channel="control", peer=peer_principal_id(request)
    )
    return answer(request, DecidedApprovals(items=decided))


async def preview_remembered(request: Request) -> Response:
    """Preview the rule that approving with this request would create. Nothing is saved."""
    document = await read_json(request)
    await require_approver(request)
    wish = parse_body(RememberWish, document)
    rule = await engine_of(request).desk.preview_remember(_id(request), wish)
    return answer(request, RememberedAnswer(rule=rule))


async def preview_edit(request: Request) -> Response:
    """Preview the approval with these arguments: action, changes and approvers. Nothing is saved.

    A decision sends its `action_digest`, which binds the decision to this action. The `ETag` is
    that of the current approval.
    """
    document = await read_json(request)
    by = await require_approver(request)
    edit = parse_body(NewEdit, document)
    peer = peer_principal_id(request)
    edited = await engine_of(request).desk.preview_edit(_id(request), edit.arguments, by, peer=peer)
    return _approval(request, edited)


async def resolve_approval(request: Request) -> Response:
    """Record the outcome of an interrupted call. It is not run again."""
    document = await read_json(request)
    by = await require_decider(request, _id(request))
    resolution = parse_body(Resolution, document)
    peer = peer_principal_id(request)
    found = await engine_of(request).desk.resolve(_id(request), resolution, by, peer=peer)
    return _approval(request, found)


async def await_approval_changes(request: Request) -> Response:
    """Wait until any approval changes: a long poll.

    `changes` is a number. Send it back in `after`: the answer comes when the number differs, or
    after `wait` seconds (25 at most).
    """
    await require_approver(request)
    query = query_of(ChangesQuery, request)
    engine = engine_of(request)
    try:
        changes = await engine.desk.next_change(query.after, within_s=query.wait)
    except asyncio.CancelledError:
        if not engine.is_draining:
            raise
        stopping = ShuttingDown("The engine is stopping. Ask again when it is back.")
        return envelope_response(engine.refusal(stopping))
    return answer(request, ApprovalChanges(changes=changes))


async def list_remembered(request: Request) -> Response:
    """List the rules remembered from approvers' decisions."""
    await require_approver(request)
    rules = await engine_of(request).desk.remembered()
    return answer(request, RememberedList(items=tuple(rules)))


async def forget_remembered(request: Request) -> Response:
    """Remove a remembered rule: the calls it allowed need approval again."""
    by = await require_approver(request)
    rule = await engine_of(request).desk.forget(request.path_params["rule_id"], by)
    return answer(request, RememberedAnswer(rule=rule))


async def receive_callback(request: Request) -> Response:
    """Decide with a signed body, as the approver `webhook`. No credential is needed.

    Only if the setting `webhook.may_decide` allows it. The body names the `version` in the
    message.
    """
    raw = await read_raw(request)
    engine = engine_of(request)
    webhook = engine.webhook
    if webhook is None or webhook.callbacks is None:
        raise PermissionDenied("Callbacks may not decide here. See webhook.may_decide.")
    try:
        webhook.callbacks.check(request.headers.getlist(HEADER), raw, engine.now())
    except EngineError as refusal:
        log_refusal(request, "webhook.callback_refused", refusal)
        raise
    body = parse_body(CallbackBody, await parse_json(raw))
    approval = await engine.desk.decide(
        body.approval_id,
        body.decision,
        WEBHOOK,
        channel="webhook",
        peer=peer_principal_id(request),
        version=body.version,
    )
    return _approval(request, approval)


def for_its_caller(approval: Approval) -> Approval:
    """Hide the fields that a caller must not see; the service hides fixed arguments."""
    return approval.model_copy(update={"binding": None, "approvers": ()})


def _id(request: Request) -> str:
    found: str = request.path_params["approval_id"]
    return found


def _page(
    request: Request, page: ApprovalPage, items: tuple[Approval, ...] | list[Approval]
) -> Response:
    pagination = Pagination(**page.model_dump(exclude={"items"}))
    return answer(request, ApprovalList(items=tuple(items), pagination=pagination))


def _approval(request: Request, approval: Approval) -> Response:
    response = answer(request, ApprovalAnswer(approval=approval))
    response.headers["etag"] = etag(approval.version)
    return response


def _refuse_twice(items: tuple[OneOfSeveral, ...]) -> None:
    ids = [item.approval_id for item in items]
    if len(set(ids)) != len(ids):
        raise InvalidParams("An approval is given twice.", fields=["items"])


def etag(version: int) -> str:
    """Return the `ETag` of a version."""
    return f'"{version}"'


def expected_version(request: Request) -> int | None:
    """Return the version that the client has seen, or None if it accepts any (`*`).

    Raises:
        InvalidParams: `If-Match` is missing or invalid. Without it, a decision could apply to
            something that somebody else has changed meanwhile.
    """
    given = request.headers.getlist("if-match")
    if not given:
        raise InvalidParams(
            "Send If-Match with the ETag of what you were shown, or `*` for the current version.",
            fields=["If-Match"],
        )
    if given == [ANY]:
        return None
    match = _TAG.fullmatch(given[0].strip(" \t")) if len(given) == 1 else None
    if match is None:
        raise InvalidParams('If-Match takes one ETag such as "3", or `*`.', fields=["If-Match"])
    return int(match[1])


DECIDING = frozenset({ResourceNotFound, IdempotencyConflict, ApprovalExpired, InvalidParams})

OPERATIONS = [
    Operation(
        "GET",
        "/v1/approvals",
        list_own_approvals,
        Needs.CALLER,
        data=ApprovalList,
        query=ApprovalQuery,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "GET",
        "/v1/approvals/{approval_id}",
        show_own_approval,
        Needs.CALLER,
        data=ApprovalAnswer,
        parameters=APPROVAL,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "POST",
        "/v1/approvals/{approval_id}/cancel",
        cancel_approval,
        Needs.CALLER,
        data=ApprovalAnswer,
        parameters=APPROVAL,
        errors=frozenset({ResourceNotFound, IdempotencyConflict}),
    ),
]

CONTROL_OPERATIONS = [
    Operation(
        "GET",
        "/v1/approvals",
        list_approvals,
        Needs.APPROVER,
        data=ApprovalList,
        query=ApprovalQuery,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "GET",
        "/v1/approvals/changes",
        await_approval_changes,
        Needs.APPROVER,
        data=ApprovalChanges,
        query=ChangesQuery,
        errors=frozenset({ShuttingDown}),
    ),
    Operation(
        "POST",
        "/v1/approvals/decisions",
        decide_approvals,
        Needs.APPROVER,
        data=DecidedApprovals,
        body=SeveralDecisions,
        errors=DECIDING,
    ),
    Operation(
        "POST",
        "/v1/approvals/callback",
        receive_callback,
        Needs.SIGNATURE,
        data=ApprovalAnswer,
        body=CallbackBody,
        errors=DECIDING | {RateLimited, Unauthorized, PermissionDenied},
    ),
    Operation(
        "GET",
        "/v1/approvals/{approval_id}",
        show_approval,
        Needs.APPROVER,
        data=ApprovalAnswer,
        parameters=APPROVAL,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "POST",
        "/v1/approvals/{approval_id}/decision",
        decide_approval,
        Needs.APPROVER,
        data=ApprovalAnswer,
        body=NewDecision,
        parameters=APPROVAL,
        errors=DECIDING,
    ),
    Operation(
        "POST",
        "/v1/approvals/{approval_id}/remember-preview",
        preview_remembered,
        Needs.APPROVER,
        data=RememberedAnswer,
        body=RememberWish,
        parameters=APPROVAL,
        errors=frozenset({ResourceNotFound}),
    ),
    Operation(
        "POST",
        "/v1/approvals/{approval_id}/edit-preview",
        preview_edit,
        Needs.APPROVER,
        data=ApprovalAnswer,
        body=NewEdit,
        parameters=APPROVAL,
        errors=DECIDING,
    ),
    Operation(
        "POST",
        "/v1/approvals/{approval_id}/resolve",
        resolve_approval,
        Needs.APPROVER,
        data=ApprovalAnswer,
        body=Resolution,
        parameters=APPROVAL,
        errors=frozenset({ResourceNotFound, IdempotencyConflict}),
    ),
    Operation("GET", "/v1/policy/remembered", list_remembered, Needs.APPROVER, data=RememberedList),
    Operation(
        "DELETE",
        "/v1/policy/remembered/{rule_id}",
        forget_remembered,
        Needs.APPROVER,
        data=RememberedAnswer,
        parameters=RULE,
        errors=frozenset({ResourceNotFound}),
    ),
]
