"""From the peer at the socket, and the credential it brings, to a principal.

Host side. A peer's uid makes a caller and never more: in single-user mode the daemon's own
uid, as a service any user whom the socket's group lets in. Invariant: who brings a
credential is what the credential says or nobody, and authority comes from credentials only.
"""

from __future__ import annotations

import os

from starlette.requests import Request

from fumehood.core.errors import EngineError, PermissionDenied, Unauthorized
from fumehood.core.identity import OVERFLOW_UID, Peer, Principal, Scope
from fumehood.engine import Engine
from fumehood.identity import approvers, tokens
from fumehood.identity.scopes import require_caller

BEARER = "bearer "
MAX_CREDENTIAL_CHARACTERS = 200


def principal_of(request: Request) -> Principal | None:
    """The principal at the other end, or None where the engine knows nobody there.

    Raises:
        Unauthorized: a token was brought that is not known, has expired or was revoked.
    """
    engine: Engine = request.app.state.engine
    credential = _credential(request)
    if credential is not None:
        return engine.tokens.principal_of(credential, engine.now())
    peer = _peer(request)
    if engine.config.mode == "single-user" and peer.uid != os.geteuid():
        return None
    if peer.uid == OVERFLOW_UID:
        return None
    return engine.principal_of_uid(peer.uid)


def require_principal(request: Request) -> Principal:
    """Raises Unauthorized where `principal_of` finds nobody."""
    return require_caller(principal_of(request))


async def require_admin(request: Request) -> Principal:
    """Whoever may change authority, agents, tokens and the registry. Never by uid.

    Call it once the body has arrived: a credential that was taken back meanwhile counts for
    nothing. Whoever is refused is named in the log.

    Raises:
        Unauthorized: no credential, or one that is not known.
        PermissionDenied: known, but without the scope `admin`.
        RateLimited: too many credentials are being checked.
    """
    return await _require(request, Scope.ADMIN)


async def require_approver(request: Request) -> Principal:
    """Whoever may decide on calls: an approver, or a token with the scope `approve`.

    Never by uid, and as `require_admin` in all else, with `approve` for `admin`.
    """
    return await _require(request, Scope.APPROVE)


async def require_decider(request: Request, approval_id: str | None = None) -> Principal:
    """As `require_approver`; who is known and may not, is kept in the audit log, too."""
    try:
        return await require_approver(request)
    except PermissionDenied:
        engine: Engine = request.app.state.engine
        by, peer = await _known(request, engine), peer_principal_id(request)
        await engine.desk.note_refusal(approval_id, by, peer, "no scope")
        raise


async def require_authority(request: Request) -> Principal:
    """Whoever may decide or administer, for what both may see. As `require_admin` in all else."""
    return await _require(request, Scope.APPROVE, Scope.ADMIN)


def peer_principal_id(request: Request) -> str | None:
    """Whom the user at the other end is as a caller, beside the credential that it brings.

    None in single-user mode, where approvers and callers are one user, and for nobody.
    """
    engine: Engine = request.app.state.engine
    uid = _peer(request).uid
    if engine.config.mode == "single-user" or uid == OVERFLOW_UID:
        return None
    return engine.principal_of_uid(uid).id


def log_refusal(request: Request, event: str, refusal: EngineError) -> None:
    """Name who was refused in the log."""
    engine: Engine = request.app.state.engine
    peer = _peer(request)
    engine.log.warning(event, code=refusal.code, uid=peer.uid, pid=peer.pid)


async def _require(request: Request, *scopes: Scope) -> Principal:
    """Whoever has one of the scopes."""
    engine: Engine = request.app.state.engine
    try:
        return await _with_authority(request, engine, scopes)
    except EngineError as refusal:
        log_refusal(request, "authority.refused", refusal)
        raise


async def _with_authority(request: Request, engine: Engine, scopes: tuple[Scope, ...]) -> Principal:
    words = " or ".join(scopes)
    if _credential(request) is None:
        raise Unauthorized(
            f"This needs a credential with {words}: an approver's, or a token with that scope."
        )
    principal = await _known(request, engine)
    if not principal.scopes.intersection(scopes):
        raise PermissionDenied(f"This credential does not have {words}. Do not retry.")
    return principal


async def _known(request: Request, engine: Engine) -> Principal:
    """Whoever the credential stands for, whatever it may do."""
    credential = _credential(request) or ""
    if credential.startswith(f"{tokens.KIND}_"):
        return engine.tokens.principal_of(credential, engine.now())
    if credential.startswith(f"{approvers.KIND}_"):
        return await engine.approvers.principal_of(credential)
    raise Unauthorized("This credential is not known. Do not retry.")


def _credential(request: Request) -> str | None:
    """What stands in the header `authorization`; None where there is none at all."""
    found = [value for key, value in request.scope["headers"] if key == b"authorization"]
    if not found:
        return None
    text: str = found[0].decode("latin-1")
    too_long = len(text) > MAX_CREDENTIAL_CHARACTERS
    if len(found) > 1 or too_long or text[: len(BEARER)].lower() != BEARER:
        raise Unauthorized("Send one credential, as `authorization: Bearer …`.")
    return text[len(BEARER) :].strip(" ")


def _peer(request: Request) -> Peer:
    peer: Peer = request.scope["state"]["peer"]
    return peer
