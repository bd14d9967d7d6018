"""Authorise: may this caller use this tool?

Third stage. Takes a `ValidatedCall`, returns a `PermittedCall`. In this version there is
no policy: any principal with the scope `call` may use any tool, for an agent only the
agent's (`resolve` has looked), and what is dangerous is stopped later, by `approve`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.call.validate import ValidatedCall
from fumehood.gates.identity import require_caller
from fumehood.model.call import CallRequest
from fumehood.model.identity import Principal, TrustDomain
from fumehood.registry.index import RegisteredTool


@dataclass(frozen=True, slots=True)
class PermittedCall:
    """A call of somebody who may make it."""

    validated: ValidatedCall
    principal: Principal

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


def authorise(validated: ValidatedCall) -> PermittedCall:
    """Ask the gates that know the caller.

    Raises:
        Unauthorized: unknown caller.
        PermissionDenied: known, and not allowed.
    """
    principal = require_caller(validated.resolved.request.principal)
    return PermittedCall(validated, principal)
