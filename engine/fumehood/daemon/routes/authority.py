"""`/v1/tokens`, `/v1/approvers`, `/v1/changes`: who has authority, on the control socket."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response, parse_body, read_json
from fumehood.daemon.caller import require_admin
from fumehood.engine import Engine
from fumehood.gates.approvers import Approver
from fumehood.gates.tokens import Token
from fumehood.model.agent import PrincipalId
from fumehood.model.call import Id
from fumehood.model.errors import InvalidParams
from fumehood.model.identity import Scope
from fumehood.model.json_types import JsonObject
from fumehood.store import changes

SHOWN_CHANGES = 100

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NewToken(_Body):
    """`principal_id` is `token:<name>` unless it is given."""

    name: Name
    principal_id: PrincipalId | None = None
    scopes: tuple[Scope, ...] = (Scope.CALL,)
    agents: tuple[Id, ...] = Field(default=(), max_length=100)
    expires_at: AwareDatetime | None = None


class NewApprover(_Body):
    """Scopes are `approve`, `admin`, or both."""

    name: Name
    scopes: tuple[Scope, ...] = (Scope.APPROVE,)


async def list_tokens(request: Request) -> Response:
    """Every token without its secret."""
    await require_admin(request)
    engine = _engine(request)
    now = engine.now()
    return _answer(engine, {"items": [_token(token, now) for token in engine.tokens.all()]})


async def new_token(request: Request) -> Response:
    """Make a token; the answer is the only place where it is shown."""
    document = await read_json(request)
    by = await require_admin(request)
    engine, now = _engine(request), _engine(request).now()
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
    return _answer(engine, {"token": _token(token, now), "secret": text})


async def revoke_token(request: Request) -> Response:
    """End a token at once."""
    by = await require_admin(request)
    engine, now = _engine(request), _engine(request).now()
    token = await engine.tokens.revoke(request.path_params["token_id"], by=by, now=now)
    return _answer(engine, {"token": _token(token, now)})


async def list_approvers(request: Request) -> Response:
    """Those who have authority now."""
    await require_admin(request)
    engine = _engine(request)
    return _answer(engine, {"items": [_approver(a) for a in engine.approvers.current()]})


async def add_approver(request: Request) -> Response:
    """Make an approver; the answer is the only place where the credential is shown."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = _engine(request)
    body = parse_body(NewApprover, document)
    approver, text = await engine.approvers.add(body.name, body.scopes, by=by, now=engine.now())
    return _answer(engine, {"approver": _approver(approver), "secret": text})


async def remove_approver(request: Request) -> Response:
    """Take an approver's authority back at once."""
    by = await require_admin(request)
    engine = _engine(request)
    name = request.path_params["approver"]
    approver = await engine.approvers.remove(name, by=by, now=engine.now())
    return _answer(engine, {"approver": _approver(approver)})


async def list_changes(request: Request) -> Response:
    """The newest changes of authority, of agents and of the registry."""
    await require_admin(request)
    engine = _engine(request)
    rows = await engine.database.read(lambda c: changes.list_changes(c, SHOWN_CHANGES))
    return _answer(engine, {"items": rows})


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _answer(engine: Engine, data: JsonObject) -> Response:
    return envelope_response(engine.answer(data))


def _in_utc(moment: datetime | None) -> datetime | None:
    try:
        return None if moment is None else moment.astimezone(UTC)
    except OverflowError:  # the first or last hours of the calendar, in a zone of their own
        raise InvalidParams("expires_at cannot be used.", fields=["expires_at"]) from None


def _token(token: Token, now: datetime) -> JsonObject:
    return {
        "id": token.id,
        "name": token.name,
        "principal_id": token.principal_id,
        "scopes": sorted(token.scopes),
        "agents": sorted(token.agents),
        "created_at": token.created_at.isoformat(),
        "created_by": token.created_by,
        "expires_at": token.expires_at.isoformat() if token.expires_at else None,
        "revoked_at": token.revoked_at.isoformat() if token.revoked_at else None,
        "is_valid": token.is_valid(now),
    }


def _approver(approver: Approver) -> JsonObject:
    return {
        "name": approver.name,
        "scopes": sorted(approver.scopes),
        "created_at": approver.created_at.isoformat(),
        "created_by": approver.created_by,
        "removed_at": approver.removed_at.isoformat() if approver.removed_at else None,
    }
