"""Authorize: may this caller use this tool with these arguments?

Third stage. Takes a `ValidatedCall`, returns a `PermittedCall` with the policy's decision: a denied
call ends here, a call that needs approval continues to `approve`. A principal with the scope `call`
may use any tool that no rule denies; an agent may use only its own tools, as checked by `resolve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fumehood.core.call import CallRequest
from fumehood.core.errors import PermissionDenied
from fumehood.core.identity import Principal, TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.identity.principals import require_caller, require_credential
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.model import CallFacts, Decision, Verdict
from fumehood.policy.service import PolicyGate
from fumehood.registry.index import RegisteredTool


@dataclass(frozen=True, slots=True)
class PermittedCall:
    """A call that its caller may make, immediately or after approval."""

    validated: ValidatedCall
    principal: Principal
    decision: Decision

    @property
    def request(self) -> CallRequest:
        return self.validated.resolved.request

    def with_request(self, request: CallRequest) -> PermittedCall:
        """Return the same call with other options."""
        resolved = replace(self.validated.resolved, request=request)
        return replace(self, validated=replace(self.validated, resolved=resolved))

    @property
    def tool(self) -> RegisteredTool:
        return self.validated.resolved.tool

    @property
    def arguments(self) -> JsonObject:
        return self.validated.arguments

    @property
    def trust_domain(self) -> TrustDomain:
        """The trust domain of the call: it may share processes with calls of the same domain."""
        options = self.request.options
        return TrustDomain(self.principal.id, options.agent_id, options.session_id)


def authorize(
    validated: ValidatedCall, policy: PolicyGate, is_over_budget: Callable[[], bool]
) -> PermittedCall:
    """Check the caller's scope and its credential, then the policy.

    Raises:
        Unauthorized: the caller is unknown, or has presented no token for a tool that needs one.
        PermissionDenied: the caller lacks the scope, or a rule denies the call.
    """
    resolved = validated.resolved
    tool = resolved.tool.definition
    principal = require_caller(resolved.request.principal)
    require_credential(principal, tool)
    decision = policy.decide(facts_of(validated, principal.id, is_over_budget))
    if decision.verdict is Verdict.DENY:
        if not resolved.request.options.dry_run:
            policy.count(decision)
        why = f" {decision.reason}" if decision.reason else ""
        raise PermissionDenied(
            f"A policy rule forbids this call of {tool.name}.{why} Do not retry.",
            details={"rule": decision.rule},
        )
    if resolved.request.is_decision_on_trial and decision.verdict is Verdict.ALLOW:
        decision = replace(decision, verdict=Verdict.ASK, rule=f"trial: {decision.rule}")
    return PermittedCall(validated, principal, decision)


def facts_of(
    validated: ValidatedCall, principal_id: str, is_over_budget: Callable[[], bool]
) -> CallFacts:
    """Return the facts of a call that policy rules and explanations use."""
    resolved = validated.resolved
    options = resolved.request.options
    return CallFacts(
        resolved.tool.definition,
        validated.arguments,
        principal_id,
        options.agent_id,
        options.session_id,
        is_over_budget,
    )
