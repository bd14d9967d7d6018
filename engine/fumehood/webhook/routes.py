"""HTTP route of the webhook: a signed callback decides an approval, if the operator allows
callbacks.
"""

from __future__ import annotations

from pydantic import Field
from starlette.requests import Request

from fumehood.approvals.model import OneOfSeveral
from fumehood.core.errors import EngineError, PermissionDenied, RateLimited, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.engine import Engine
from fumehood.http.bodies import parse_body, parse_in_thread, read_raw
from fumehood.http.caller import log_refusal, peer_principal_id
from fumehood.http.endpoint import Needs, endpoint
from fumehood.http.routes.approvals import DECIDING, ApprovalAnswer
from fumehood.webhook.channel import HEADER, NAME
from fumehood.webhook.in_engine import Webhook

PRINCIPAL = Principal(NAME, frozenset({Scope.APPROVE}))
"""The principal of a signed callback."""


class CallbackBody(OneOfSeveral):
    """A signed request's decision on an approval. `version` is the approval's version in the
    webhook's message.
    """

    version: int = Field(strict=True)


@endpoint(
    "POST",
    "/v1/approvals/callback",
    Needs.SIGNATURE,
    body=CallbackBody,
    errors=DECIDING | {RateLimited, Unauthorized, PermissionDenied},
    client=None,
)
async def receive_callback(request: Request, engine: Engine) -> ApprovalAnswer:
    """Decide on an approval with a signed body, as the approver `webhook`.

    No credential is needed. The setting `webhook.may_decide` must allow callbacks to decide. The
    body contains the `version` from the webhook's message.
    """
    raw = await read_raw(request)
    channel = engine.part(Webhook).channel
    if channel is None or channel.callbacks is None:
        raise PermissionDenied("Callbacks may not decide here. See webhook.may_decide.")
    try:
        channel.callbacks.check(request.headers.getlist(HEADER), raw, engine.now())
    except EngineError as refusal:
        log_refusal(request, "webhook.callback_refused", refusal)
        raise
    body = parse_body(CallbackBody, await parse_in_thread(raw))
    return await engine.approvals.decide(
        body.approval_id,
        body.decision,
        PRINCIPAL,
        channel=NAME,
        peer=peer_principal_id(request),
        version=body.version,
    )


CONTROL_OPERATIONS = [receive_callback]
