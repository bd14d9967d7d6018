"""Authorise: may this caller use this tool, with these arguments?

Third stage. Takes a `ValidatedCall`, returns a `PermittedCall` with what the policy decided:
a denied call ends here, one that has to be asked for goes on to `approve`. Any principal with
the scope `call` may use any tool that no rule denies, for an agent only the agent's (`resolve`
has looked).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fumehood.core.call import CallRequest
from fumehood.core.errors import PermissionDenied
from fumehood.core.identity import Principal, TrustDomain
from fumehood.identity.scopes import require_caller
from fumehood.pipeline.facts import facts_of
from fumehood.pipeline.validate import ValidatedCall
from fumehood.policy.decision import CallFacts, Decision, Verdict
from fumehood.registry.index import RegisteredTool


class Policy(Protocol):
    """The rules of this engine."""

    def decide(self, facts: CallFacts) -> Decision:
        """What they say of a call. No I/O."""
        ...

    def count(self, decision: Decision) -> None:
        """Count what rules in shadow mode would have said of a call that is really made."""
        ...


@dataclass(frozen=True, slots=True)
class PermittedCall:
    """A call of somebody who may make it, at once or after a human's yes."""

    validated: ValidatedCall
    principal: Principal
    decision: Decision

    @property
    def request(self) -> CallRequest:
        return self.validated.resolved.request

    @property
    def tool(self) -> RegisteredTool:
        return self.validated.resolved.tool

    @property
    def trust_domain(self) -> TrustDomain:
        """Whom this call may share a process with."""
        options = self.request.options
        return TrustDomain(self.principal.id, options.agent_id, options.session_id)


def authorize(
    validated: ValidatedCall, policy: Policy, is_over_budget: Callable[[], bool]
) -> PermittedCall:
    """Ask the gates that know the caller, then the rules.

    Raises:
        Unauthorized: unknown caller.
        PermissionDenied: known, and not allowed; or a rule says no.
    """
    principal = require_caller(validated.resolved.request.principal)
    decision = policy.decide(facts_of(validated, principal.id, is_over_budget))
    if decision.verdict is Verdict.DENY:
        why = f" {decision.reason}" if decision.reason else ""
        tool = validated.resolved.tool.definition
        raise PermissionDenied(
            f"A rule of this engine forbids this call of {tool.name}.{why} Do not retry.",
            details={"rule": decision.rule},
        )
    return PermittedCall(validated, principal, decision)
