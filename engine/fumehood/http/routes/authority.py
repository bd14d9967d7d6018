"""`/v1/tokens`, `/v1/approvers` and `/v1/changes`: authority, on the control socket."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    ApproverAnswer,
    ApproverList,
    ChangeList,
    TokenAnswer,
    TokenList,
)
from fumehood.core.errors import IdempotencyConflict, InvalidParams, ResourceNotFound
from fumehood.http.answers import answer, engine_of, parse_body, read_json
from fumehood.http.caller import require_admin, require_authority
from fumehood.http.operation import Needs, Operation
from fumehood.identity.model import Change, MadeApprover, MadeToken, NewApprover, NewToken
from fumehood.storage import changes

SHOWN_CHANGES = 100


async def list_tokens(request: Request) -> Response:
    """List all tokens, without their secrets."""
    await require_admin(request)
    engine = engine_of(request)
    now = engine.now()
    return answer(request, TokenList(items=tuple(t.info(now) for t in engine.tokens.all())))


async def new_token(request: Request) -> Response:
    """Create a token; only this answer shows it."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    now = engine.now()
    body = parse_body(NewToken, document)
    token, text = await engine.tokens.new(
        body.name,
        principal_id=body.principal_id or f"token:{body.name}",
        scopes=body.scopes,
        agents=body.agents,
        expires_at=_in_utc(body.expires_at),
        by=by,
        now=now,
    )
    return answer(request, MadeToken(token=token.info(now), secret=text))


async def revoke_token(request: Request) -> Response:
    """Revoke a token immediately."""
    by = await require_admin(request)
    engine = engine_of(request)
    now = engine.now()
    token = await engine.tokens.revoke(request.path_params["token_id"], by=by, now=now)
    return answer(request, TokenAnswer(token=token.info(now)))


async def list_approvers(request: Request) -> Response:
    """List the current approvers."""
    await require_admin(request)
    approvers = engine_of(request).approvers.current()
    return answer(request, ApproverList(items=tuple(a.info for a in approvers)))


async def add_approver(request: Request) -> Response:
    """Create an approver; only this answer shows the credential."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    body = parse_body(NewApprover, document)
    approver, text = await engine.approvers.add(body.name, body.scopes, by=by, now=engine.now())
    return answer(request, MadeApprover(approver=approver.info, secret=text))


async def remove_approver(request: Request) -> Response:
    """Remove an approver immediately."""
    by = await require_admin(request)
    engine, name = engine_of(request), request.path_params["approver"]
    approver = await engine.approvers.remove(name, by=by, now=engine.now())
    return answer(request, ApproverAnswer(approver=approver.info))


async def list_changes(request: Request) -> Response:
    """List the newest 100 changes of authority, agents and registry.

    Approvers may see them, too.
    """
    await require_authority(request)
    database = engine_of(request).database
    rows = await database.read(lambda c: changes.list_changes(c, SHOWN_CHANGES))
    items = tuple(Change.model_validate(row) for row in rows)
    return answer(request, ChangeList(items=items))


def _in_utc(moment: datetime | None) -> datetime | None:
    try:
        return None if moment is None else moment.astimezone(UTC)
    except OverflowError:  # the first or last hours of the calendar, outside UTC
        raise InvalidParams("expires_at cannot be used.", fields=["expires_at"]) from None


OPERATIONS = [
    Operation("GET", "/v1/tokens", list_tokens, Needs.ADMIN, data=TokenList),
    Operation("POST", "/v1/tokens", new_token, Needs.ADMIN, data=MadeToken, body=NewToken),
    Operation(
        "DELETE",
        "/v1/tokens/{token_id}",
        revoke_token,
        Needs.ADMIN,
        data=TokenAnswer,
        parameters={"token_id": "A token's id, as shown in the list."},
        errors=frozenset({ResourceNotFound}),
    ),
    Operation("GET", "/v1/approvers", list_approvers, Needs.ADMIN, data=ApproverList),
    Operation(
        "POST",
        "/v1/approvers",
        add_approver,
        Needs.ADMIN,
        data=MadeApprover,
        body=NewApprover,
        errors=frozenset({IdempotencyConflict}),
    ),
    Operation(
        "DELETE",
        "/v1/approvers/{approver}",
        remove_approver,
        Needs.ADMIN,
        data=ApproverAnswer,
        parameters={"approver": "An approver's name."},
        errors=frozenset({ResourceNotFound}),
    ),
    Operation("GET", "/v1/changes", list_changes, Needs.APPROVER, data=ChangeList),
]
