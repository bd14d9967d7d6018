"""`/v1/approvals`: calls that wait for approval.

On the callers' socket each principal sees and cancels its own approvals. On the control socket
approvers see all approvals and decide on them. A decision names, in `If-Match`, the version that
the approver saw, and is refused if the approval has changed since then. Invariant: no request on
the callers' socket can approve or deny a call. `If-Match` must be one strong tag or `*`. *Source*:
RFC 9110, sections 8.8.3 and 13.1.1.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field
from starlette.requests import Request

from fumehood.answers import (
    ApprovalChanges,
    ApprovalList,
    Pagination,
)
from fumehood.approvals.model import (
    LONGEST_POLL_S,
    Approval,
    ApprovalQuery,
    NewDecision,
    NewEdit,
    RememberedRule,
    RememberWish,
    Resolution,
    SeveralDecisions,
)
from fumehood.core.errors import (
    ApprovalExpired,
    IdempotencyConflict,
    InvalidParams,
    ResourceNotFound,
    ShuttingDown,
)
from fumehood.core.identity import Principal
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.caller import peer_principal_id, require_decider
from fumehood.http.endpoint import As, Method, Needs, endpoint

ApprovalId = Annotated[str, "The approval's id, `apr_…`."]
DECIDING = frozenset({ResourceNotFound, IdempotencyConflict, ApprovalExpired, InvalidParams})

_TAG = re.compile(r'"(0|[1-9][0-9]{0,14})"', re.ASCII)


ApprovalAnswer = Annotated[
    Approval,
    As(
        "approval",
        "ApprovalAnswer",
        "The current state of an approval.",
        lambda one: f'"{one.version}"',
    ),
]
RememberedAnswer = Annotated[
    RememberedRule,
    As(
        "rule",
        "RememberedAnswer",
        "A remembered rule: as it is stored, or as an approval would store it.",
    ),
]


class ChangesQuery(Value):
    """The query of a long poll. `after` is the number of changes that the client last received.
    With the default -1, the answer is sent without waiting.
    """

    after: int = Field(default=-1, ge=-1)
    wait: float = Field(default=LONGEST_POLL_S, ge=0, le=LONGEST_POLL_S)
    """Seconds after which the answer is sent even if the number has not changed."""


@endpoint("GET", "/v1/approvals", Needs.CALLER, errors=[ResourceNotFound], client="approvals.list")
async def list_own_approvals(
    engine: Engine, caller: Principal, query: ApprovalQuery
) -> ApprovalList:
    """List the caller's own approvals, newest first."""
    page = await engine.approvals.list(query, principal=caller)
    return ApprovalList(items=page.items, pagination=Pagination.of(page))


@endpoint(
    "GET",
    "/v1/approvals/{approval_id}",
    Needs.CALLER,
    errors=[ResourceNotFound],
    client="approvals.show",
)
async def show_own_approval(
    engine: Engine, caller: Principal, approval_id: ApprovalId
) -> ApprovalAnswer:
    """Show one of the caller's own approvals."""
    return await engine.approvals.show(approval_id, principal=caller)


@endpoint(
    "POST",
    "/v1/approvals/{approval_id}/cancel",
    Needs.CALLER,
    errors=[ResourceNotFound, IdempotencyConflict],
    client="approvals.cancel",
)
async def cancel_approval(
    engine: Engine, caller: Principal, approval_id: ApprovalId
) -> ApprovalAnswer:
    """Cancel one of the caller's own calls that needs approval and has not started.

    The call is waiting for approval, or it was approved but has not started yet.
    """
    return await engine.approvals.cancel(approval_id, caller)


@endpoint(
    "GET", "/v1/approvals", Needs.APPROVER, errors=[ResourceNotFound], client="approvals.list"
)
async def list_approvals(engine: Engine, query: ApprovalQuery) -> ApprovalList:
    """List all approvals, newest first, without the field `binding`."""
    page = await engine.approvals.list(query)
    return ApprovalList(items=page.items, pagination=Pagination.of(page))


@endpoint(
    "GET",
    "/v1/approvals/{approval_id}",
    Needs.APPROVER,
    errors=[ResourceNotFound],
    client="approvals.show",
)
async def show_approval(engine: Engine, approval_id: ApprovalId) -> ApprovalAnswer:
    """Show one approval with all fields.

    A decision on this version sends the `ETag` of this answer in `If-Match`. While the approval is
    pending, `preview` is computed again. If the files have changed since the last preview, the
    approval gets a new version, and earlier decisions do not count for the new version.
    """
    return await engine.approvals.opened(approval_id)


@endpoint(
    "POST",
    "/v1/approvals/{approval_id}/decision",
    Needs.APPROVER,
    authorize=require_decider,
    errors=DECIDING,
    client=None,
)
async def decide_approval(
    request: Request,
    engine: Engine,
    caller: Principal,
    approval_id: ApprovalId,
    body: NewDecision,
) -> ApprovalAnswer:
    """Approve a call, approve it with other arguments, or deny it.

    The header `If-Match` is required: the `ETag` of the version that the approver was shown, or
    `*` for the current version. If the approval has changed or was already decided, the decision
    is refused (`IDEMPOTENCY_CONFLICT`, with `details.state` and `details.version`).
    """
    return await engine.approvals.decide(
        approval_id,
        body,
        caller,
        channel="control",
        peer=peer_principal_id(request),
        version=expected_version(request),
    )


@endpoint(
    "POST",
    "/v1/approvals/decisions",
    Needs.APPROVER,
    authorize=require_decider,
    errors=DECIDING,
    client="approvals.decide_all",
)
async def decide_approvals(
    request: Request, engine: Engine, caller: Principal, body: SeveralDecisions
) -> Annotated[
    tuple[Approval, ...],
    As(
        "items",
        "DecidedApprovals",
        "The current state of the decided approvals, in the order of the request.",
    ),
]:
    """Decide on several approvals. If one decision is refused, none takes effect."""
    return await engine.approvals.decide_all(
        body.items, caller, channel="control", peer=peer_principal_id(request)
    )


@endpoint(
    "POST",
    "/v1/approvals/{approval_id}/remember-preview",
    Needs.APPROVER,
    errors=[ResourceNotFound],
    client=Method("approvals.preview_remember", whole="wish"),
)
async def preview_remembered(
    engine: Engine, approval_id: ApprovalId, body: RememberWish
) -> RememberedAnswer:
    """Preview the rule that an approval with this `remember` would create. Nothing is saved."""
    return await engine.approvals.preview_remember(approval_id, body)


@endpoint(
    "POST",
    "/v1/approvals/{approval_id}/edit-preview",
    Needs.APPROVER,
    errors=DECIDING,
    client="approvals.preview_edit",
)
async def preview_edit(
    request: Request,
    engine: Engine,
    caller: Principal,
    approval_id: ApprovalId,
    body: NewEdit,
) -> ApprovalAnswer:
    """Preview how an edit of the arguments would change an approval. Nothing is saved.

    The answer is the approval with the edited arguments: its action, changes and approvers. A
    decision that includes the `action_digest` of this answer applies only to this action. The
    answer has the `ETag` of the stored approval.
    """
    peer = peer_principal_id(request)
    return await engine.approvals.preview_edit(approval_id, body.arguments, caller, peer=peer)


@endpoint(
    "POST",
    "/v1/approvals/{approval_id}/resolve",
    Needs.APPROVER,
    authorize=require_decider,
    errors=[ResourceNotFound, IdempotencyConflict],
    client="approvals.resolve",
)
async def resolve_approval(
    request: Request,
    engine: Engine,
    caller: Principal,
    approval_id: ApprovalId,
    body: Resolution,
) -> ApprovalAnswer:
    """Record the outcome of an interrupted call. The call is not run again."""
    peer = peer_principal_id(request)
    return await engine.approvals.resolve(approval_id, body, caller, peer=peer)


@endpoint("GET", "/v1/approvals/changes", Needs.APPROVER, errors=[ShuttingDown], client=None)
async def await_approval_changes(engine: Engine, query: ChangesQuery) -> ApprovalChanges:
    """Wait until any approval changes (a long poll).

    The answer has the number of changes so far, `changes`. Send this number as `after` in the next
    request. The next answer is sent when the number differs, or after `wait` seconds (25 at most).
    """
    changes = await engine.approvals.next_change(query.after, within_s=query.wait)
    return ApprovalChanges(changes=changes, pending=await engine.approvals.count_pending())


@endpoint("GET", "/v1/policy/remembered", Needs.APPROVER, client="approvals.remembered")
async def list_remembered(
    engine: Engine,
) -> Annotated[
    tuple[RememberedRule, ...],
    As("items", "RememberedList", "The rules remembered from approvers' decisions, newest first."),
]:
    """List the rules remembered from approvers' decisions."""
    return tuple(await engine.approvals.remembered())


@endpoint(
    "DELETE",
    "/v1/policy/remembered/{rule_id}",
    Needs.APPROVER,
    errors=[ResourceNotFound],
    client="approvals.forget",
)
async def forget_remembered(
    engine: Engine, caller: Principal, rule_id: Annotated[str, "The remembered rule's id."]
) -> RememberedAnswer:
    """Remove a remembered rule, so that the calls that it allowed need approval again."""
    return await engine.approvals.forget(rule_id, caller)


def expected_version(request: Request) -> int | None:
    """Return the version of an approval that the approver has seen, as stated in the header
    `If-Match`. Return None if the header is `*`, which stands for any version.

    Raises:
        InvalidParams: `If-Match` is missing or invalid.
    """
    given = request.headers.getlist("if-match")
    # Without this header, a decision could apply to an approval that has changed since then.
    if not given:
        raise InvalidParams(
            "Send If-Match with the ETag of what you were shown, or `*` for the current version.",
            fields=["If-Match"],
        )
    if given == ["*"]:
        return None
    match = _TAG.fullmatch(given[0].strip(" \t")) if len(given) == 1 else None
    if match is None:
        raise InvalidParams('If-Match takes one ETag such as "3", or `*`.', fields=["If-Match"])
    return int(match[1])


OPERATIONS = [list_own_approvals, show_own_approval, cancel_approval]

# Fixed addresses come before those that have an id in the same place.
CONTROL_OPERATIONS = [
    list_approvals,
    await_approval_changes,
    decide_approvals,
    show_approval,
    decide_approval,
    preview_remembered,
    preview_edit,
    resolve_approval,
    list_remembered,
    forget_remembered,
]
