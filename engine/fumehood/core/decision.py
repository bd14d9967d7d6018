"""Decisions on calls of external tools: the request and the answer. Values only.

The caller runs an external tool itself, if the decision is `allow`. Inside the engine, a request
for a decision is a call of the tool `external:NAME`, which does nothing. `registry/index` creates
this tool. Every gate (a check before a call runs) treats this call like any other call.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fumehood.core.call import CallBody, CallOptions, Id
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    ApprovalDenied,
    ApprovalExpired,
    CallInProgress,
    PermissionDenied,
    QuotaExceeded,
    RateLimited,
    RequiresHumanApproval,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import EXTERNAL, EXTERNAL_NAME_PATTERN
from fumehood.core.value import StrictValue, Value

ExternalName = Annotated[str, Field(pattern=EXTERNAL_NAME_PATTERN)]

ALLOWED: JsonObject = {"decision": "allow"}
"""The `data` of the answer to a call that every gate (check before a call) allowed."""

_PENDING = frozenset({RequiresHumanApproval.code, CallInProgress.code})
DENIALS = frozenset(
    {
        ApprovalDenied.code,
        ApprovalExpired.code,
        PermissionDenied.code,
        QuotaExceeded.code,
        RateLimited.code,
        RequiresHumanApproval.code,  # if no approval was created, because nobody can approve it
    }
)
"""Codes that mean a denial. Other errors mean that the engine could not decide, or that the request
is invalid."""


class DecisionOptions(StrictValue):
    """Options of a decision. Each has the same meaning as the call option of the same name.

    `session_id` must name one of the caller's own sessions.
    """

    wait_for_approval: bool | float | None = None
    session_id: Id | None = None
    agent_id: Id | None = None
    trace_id: Id | None = None
    new_call: bool = False


class DecisionBody(StrictValue):
    """The body of `POST /v1/decisions`.

    `context` is everything besides the arguments that determines the effect of the tool, such as
    the working directory. Approvers see the context, and the decision applies only to this context
    and these arguments.
    """

    tool: ExternalName
    arguments: dict[str, Any] = Field(default_factory=dict)
    context: dict[str, Any] = Field(default_factory=dict)
    options: DecisionOptions = DecisionOptions()

    @property
    def reference(self) -> str:
        """The tool's name inside the engine, `external:NAME`."""
        return EXTERNAL + self.tool

    @property
    def call(self) -> ExternalCall:
        """This request as a call, which the engine checks like any other call but does not run."""
        options = CallOptions(**dict(self.options))
        return ExternalCall(arguments=self.arguments, context=self.context, options=options)


class ExternalCall(CallBody):
    """A call of a tool that the caller, not the engine, runs."""

    context: JsonObject


class Decision(Value):
    """The decision on one call. Unless it is `allow`, the caller must not run the tool now."""

    decision: Literal["allow", "deny", "pending"]
    tool: str
    """The tool's name in rules and in the call log, `external:NAME`."""
    reason: str
    """The reason, worded for the model."""
    code: str | None = None
    """The error code that the call would have; null if the call is allowed."""
    rule: str | None = None
    approval_id: str | None = None
    approval_url: str | None = None
    expires_at: str | None = None
    """When the approval expires, if the decision is pending."""
    retry_after_ms: int | None = None


def decided(envelope: Envelope, tool: str) -> Envelope:
    """Convert the envelope of an external tool's call to the envelope of the decision on this call.

    `tool` is the tool's name, `external:NAME`. If the engine could not decide because of an error,
    `envelope` is returned unchanged.
    """
    decision = _decision(envelope, tool)
    if decision is None:
        return envelope
    return envelope.model_copy(
        update={
            "success": True,
            "status": "success",
            "data": decision.model_dump(mode="json"),
            "error": None,
        }
    )


def _decision(envelope: Envelope, tool: str) -> Decision | None:
    error = envelope.error
    if error is None and envelope.data != ALLOWED:  # a human resolved the call after a crash
        return Decision(decision="deny", tool=tool, reason="It is resolved. Ask again if needed.")
    if error is None:
        return Decision(decision="allow", tool=tool, reason="The policy or an approver allows it.")
    details = error.details or {}
    known: JsonObject = {
        "tool": tool, "code": error.code, "rule": details.get("rule"),
        "approval_id": error.approval_id, "retry_after_ms": error.retry_after_ms,
    }  # fmt: skip
    if error.code in _PENDING and error.approval_id is not None:
        return Decision(
            decision="pending",
            reason=f"This call of {tool} waits for approval {error.approval_id} and must not run "
            "yet. Tell the user what you want to do. Repeat exactly the same call to learn the "
            "decision; do not try to do the same in another way.",
            approval_url=error.approval_url,
            expires_at=details.get("expires_at"),
            **known,
        )
    if error.code not in DENIALS:
        return None
    return Decision(decision="deny", reason=error.message, **known)


__all__ = ["Decision", "DecisionBody", "DecisionOptions", "ExternalCall", "decided"]
