"""Determine the principal of a request from the peer's user id and the request's credential.

Host side. Without a credential, a peer has at most the rights of a caller. In single-user mode,
only the daemon's own uid has these rights. In service mode, every user whom the socket's group
admits has them. All other authority comes from credentials. Invariant: a request with a credential
has that credential's principal or is refused.

Every user and every web page of this machine can connect to the loopback address (`tcp`), and with
TLS or a proxy other machines can connect as well. Invariant: a request over TCP is answered only if
it names this server as its host (or came with TLS or through the proxy), does not come from a web
page of another origin, and has a token with the scope `call`.
"""

from __future__ import annotations

import os

from starlette.requests import Request

from fumehood.core.errors import EngineError, PermissionDenied, Unauthorized
from fumehood.core.identity import OVERFLOW_UID, Peer, Principal, Scope
from fumehood.engine import Engine
from fumehood.http.answers import engine_of, headers_of
from fumehood.identity import approvers, tokens
from fumehood.identity.principals import require_caller
from fumehood.protocol.loopback import own_names, why_not_ours

BEARER = "bearer "
MAX_CREDENTIAL_CHARACTERS = 200


def principal_of(request: Request) -> Principal | None:
    """Return the principal of a request. It is the principal of the request's credential. If the
    request has no credential, it is the principal of the peer's user. Return None if that user is
    unknown or is not served.

    Raises:
        Unauthorized: the token is unknown, expired or revoked, or the header with it is malformed.
    """
    engine = engine_of(request)
    credential = _credential(request)
    if credential is not None:
        return engine.tokens.principal_of(credential, engine.now())
    uid = _peer(request).uid
    is_served = engine.config.mode == "service" or uid == os.geteuid()
    return engine.principal_of_uid(uid) if is_served and uid != OVERFLOW_UID else None


def require_principal(request: Request) -> Principal:
    """Return the principal of a request. Raises Unauthorized if the request has none."""
    return require_caller(principal_of(request))


def require_own_user(request: Request) -> None:
    """Raise PermissionDenied unless the peer is the engine's own user and uses a Unix socket."""
    if _peer(request).uid != os.geteuid():
        raise PermissionDenied("Only the engine's own user may, over its Unix socket.")


async def require_admin(request: Request) -> Principal:
    """Require a credential with the scope `admin`, and return its principal. This scope allows
    changes to authority, agents, tokens and the registry.

    The caller must have read the request's body before. Otherwise, a credential that is revoked
    while the body arrives would be accepted. Refusals are logged.

    Raises:
        Unauthorized: the request has no credential, or an unknown one.
        PermissionDenied: the credential lacks the scope.
        RateLimited: too many credentials are being checked.
    """
    return await _require(request, Scope.ADMIN)


async def require_approver(request: Request) -> Principal:
    """Require a credential with the scope `approve`, and return its principal.

    This scope allows decisions on calls. Raises for the same reasons as `require_admin`.
    """
    return await _require(request, Scope.APPROVE)


async def require_decider(request: Request) -> Principal:
    """Require a credential with the scope `approve`, and return its principal. If the credential
    lacks the scope, also record the attempt in the audit chain (the tamper-evident log).

    Raises for the same reasons as `require_admin`.
    """
    approval_id: str | None = request.path_params.get("approval_id")
    try:
        return await require_approver(request)
    except PermissionDenied:
        engine = engine_of(request)
        by, peer = await _known(request, engine), peer_principal_id(request)
        await engine.approvals.note_refusal(approval_id, by, peer, "no scope")
        raise


async def require_authority(request: Request) -> Principal:
    """Require a credential with the scope `approve` or `admin`, and return its principal.

    Raises for the same reasons as `require_admin`.
    """
    return await _require(request, Scope.APPROVE, Scope.ADMIN)


def peer_principal_id(request: Request) -> str | None:
    """Return the id of the principal that belongs to the peer's uid. The request's credential is
    ignored. Return None if the uid is unknown, or in single-user mode.
    """
    engine = engine_of(request)
    uid = _peer(request).uid
    # In single-user mode, approvers and callers have the same uid, so it does not distinguish them.
    if engine.config.mode == "single-user" or uid == OVERFLOW_UID:
        return None
    return engine.principal_of_uid(uid).id


def log_refusal(request: Request, event: str, refusal: EngineError) -> None:
    """Log that a request was refused because of `refusal`. `event` is the name of the log event.
    The event also contains the error code, and the peer's uid and pid.
    """
    engine = engine_of(request)
    peer = _peer(request)
    engine.log.warning(event, code=refusal.code, uid=peer.uid, pid=peer.pid)


def refusal_over_tcp(request: Request) -> EngineError | None:
    """Return the reason for refusing a request that arrived over TCP, or None to accept the
    request.
    """
    config, headers = engine_of(request).config, request.scope["headers"]
    if config.tls is None and not config.tcp_behind_proxy:
        why = why_not_ours(own_names(*request.scope["server"]), headers)
    else:  # a page cannot pose as this server without the certificate for its name
        origins = headers_of(request.scope, b"origin")
        why = "Pages of a browser may not use this address." if origins else None
    if why is not None:
        return PermissionDenied(why)
    try:
        principal = principal_of(request)
    except Unauthorized as refusal:
        return refusal
    if principal is None or Scope.CALL not in principal.scopes:
        return Unauthorized(
            "This address needs a token with the scope call, as `authorization: Bearer …`."
        )
    return None


async def _require(request: Request, *scopes: Scope) -> Principal:
    """Return the principal of the request's credential, which must have one of `scopes`.

    Raises for the same reasons as `require_admin`. Refusals are logged.
    """
    words = " or ".join(scopes)
    try:
        if _credential(request) is None:
            raise Unauthorized(
                f"This needs a credential with {words}: an approver's, or a token with that scope."
            )
        principal = await _known(request, engine_of(request))
        if not principal.scopes.intersection(scopes):
            raise PermissionDenied(f"This credential does not have {words}. Do not retry.")
    except EngineError as refusal:
        log_refusal(request, "authority.refused", refusal)
        raise
    return principal


async def _known(request: Request, engine: Engine) -> Principal:
    """Return the principal to whom the request's credential belongs. Scopes are not checked.

    Raises:
        Unauthorized: the request has no credential, or one that is unknown or no longer valid.
        RateLimited: too many credentials are being checked.
    """
    credential = _credential(request) or ""
    if credential.startswith(f"{tokens.KIND}_"):
        return engine.tokens.principal_of(credential, engine.now())
    if credential.startswith(f"{approvers.KIND}_"):
        return await engine.approvers.principal_of(credential)
    raise Unauthorized("This credential is unknown. Do not retry.")


def _credential(request: Request) -> str | None:
    """Return the credential in the header `authorization`, or None if the header is missing.

    Raises:
        Unauthorized: the header is malformed, or occurs more than once.
    """
    found = headers_of(request.scope, b"authorization")
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
