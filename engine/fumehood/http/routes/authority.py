"""`/v1/tokens`, `/v1/approvers` and `/v1/changes`: authority, on the control socket."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fumehood.answers import (
    Whoami,
)
from fumehood.core.errors import IdempotencyConflict, InvalidParams, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import As, Method, Needs, endpoint
from fumehood.identity.model import (
    ApproverInfo,
    Change,
    MadeApprover,
    MadeToken,
    NewApprover,
    NewToken,
    TokenInfo,
)
from fumehood.storage import changes

SHOWN_CHANGES = 100


@endpoint("GET", "/v1/tokens", Needs.ADMIN, client="tokens.list")
async def list_tokens(
    engine: Engine,
) -> Annotated[tuple[TokenInfo, ...], As("items", "TokenList", "Every token, oldest first.")]:
    """List all tokens, without their secrets."""
    now = engine.now()
    return tuple(token.info(now) for token in engine.tokens.all())


@endpoint("POST", "/v1/tokens", Needs.ADMIN, client="tokens.new")
async def new_token(engine: Engine, caller: Principal, body: NewToken) -> MadeToken:
    """Create a token; only this answer shows it."""
    now = engine.now()
    token, text = await engine.tokens.new(
        body.name,
        principal_id=body.principal_id or f"token:{body.name}",
        scopes=body.scopes,
        agents=body.agents,
        expires_at=_in_utc(body.expires_at),
        by=caller,
        now=now,
    )
    return MadeToken(token=token.info(now), secret=text)


@endpoint(
    "DELETE",
    "/v1/tokens/{token_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="tokens.revoke",
)
async def revoke_token(
    engine: Engine,
    caller: Principal,
    token_id: Annotated[str, "A token's id, as shown in the list."],
) -> Annotated[TokenInfo, As("token", "TokenAnswer", "A token as it is now.")]:
    """Revoke a token immediately."""
    now = engine.now()
    token = await engine.tokens.revoke(token_id, by=caller, now=now)
    return token.info(now)


@endpoint("GET", "/v1/approvers", Needs.ADMIN, client="approvers.list")
async def list_approvers(
    engine: Engine,
) -> Annotated[
    tuple[ApproverInfo, ...],
    As("items", "ApproverList", "Those who have authority now, oldest first."),
]:
    """List the current approvers."""
    return tuple(approver.info for approver in engine.approvers.current())


@endpoint(
    "POST", "/v1/approvers", Needs.ADMIN, errors=[IdempotencyConflict], client="approvers.add"
)
async def add_approver(engine: Engine, caller: Principal, body: NewApprover) -> MadeApprover:
    """Create an approver; only this answer shows the credential."""
    made, text = await engine.approvers.add(body.name, body.scopes, by=caller, now=engine.now())
    return MadeApprover(approver=made.info, secret=text)


@endpoint(
    "DELETE",
    "/v1/approvers/{approver}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client=Method("approvers.remove", renamed={"approver": "name"}),
)
async def remove_approver(
    engine: Engine, caller: Principal, approver: Annotated[str, "An approver's name."]
) -> Annotated[ApproverInfo, As("approver", "ApproverAnswer", "An approver as it is now.")]:
    """Remove an approver immediately."""
    removed = await engine.approvers.remove(approver, by=caller, now=engine.now())
    return removed.info


@endpoint("GET", "/v1/whoami", Needs.APPROVER, authorize=require_authority)
async def whoami(caller: Principal) -> Whoami:
    """Show the principal and the scopes of this credential. Approvers may ask, too."""
    return Whoami(principal_id=caller.id, scopes=tuple(sorted(caller.scopes)))


@endpoint("GET", "/v1/changes", Needs.APPROVER, authorize=require_authority, client="changes")
async def list_changes(
    engine: Engine,
) -> Annotated[tuple[Change, ...], As("items", "ChangeList", "The newest changes first.")]:
    """List the newest 100 changes of authority, agents and registry.

    Approvers may see them, too.
    """
    rows = await engine.database.read(lambda c: changes.list_changes(c, SHOWN_CHANGES))
    return tuple(Change.model_validate(row) for row in rows)


def _in_utc(moment: datetime | None) -> datetime | None:
    try:
        return None if moment is None else moment.astimezone(UTC)
    except OverflowError:  # the first or last hours of the calendar, outside UTC
        raise InvalidParams("expires_at cannot be used.", fields=["expires_at"]) from None


OPERATIONS = [
    list_tokens,
    new_token,
    revoke_token,
    list_approvers,
    add_approver,
    remove_approver,
    whoami,
    list_changes,
]
