"""The rights of a principal: to call tools, to act for an agent, to use a tool of that agent.

Host side, used by `pipeline/authorize` and `pipeline/resolve`. Rights must be granted explicitly. A
call is refused if it has no principal, or if its principal lacks the scope `call`. Invariant: an
unknown agent, a disabled agent, and an agent for which the principal may not act are refused with
the same message, so that no caller learns which agents exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from fumehood.core.errors import PermissionDenied, ResourceNotFound, ToolDisabled, Unauthorized
from fumehood.core.identity import Principal, Scope
from fumehood.core.names import did_you_mean
from fumehood.core.tool import ToolDefinition
from fumehood.identity.model import Agent, Binding


def require_caller(principal: Principal | None) -> Principal:
    """Check that a principal may call tools, and return the principal.

    Raises:
        Unauthorized: `principal` is None.
        PermissionDenied: the principal lacks the scope `call`.
    """
    if principal is None:
        raise Unauthorized("This socket serves only its owner, and the caller is another user.")
    if Scope.CALL not in principal.scopes:
        raise PermissionDenied("This identity may not call tools. Do not retry.")
    return principal


def require_credential(principal: Principal, tool: ToolDefinition) -> None:
    """Raise Unauthorized if the tool requires a token and the caller did not present one."""
    if tool.requires_auth and not principal.has_authenticated:
        raise Unauthorized(
            f"The tool {tool.name} needs a token, and this caller is known by its user only. Ask "
            "an administrator for one (fumehood tokens new NAME), and send it as `authorization: "
            "Bearer …`."
        )


def require_agent(principal: Principal | None, agent_id: str, agent: Agent | None) -> None:
    """Check that a principal may act for an agent. `agent` is the agent with the id `agent_id`, or
    None if there is no such agent.

    Raises:
        ResourceNotFound: there is no such agent, the agent is disabled, or the principal may not
            act for it.
    """
    speaks = principal is not None and agent_id in principal.agents
    if agent is None or not agent.is_enabled or not speaks:
        raise ResourceNotFound(
            f"There is no agent {agent_id[:80]!r} that you may speak for. Do not retry."
        )


def require_binding(
    agent_id: str, tool_name: str, binding: Binding | None, own: Sequence[str] = ()
) -> Binding:
    """Check that an agent may use a tool, and return the binding.

    `binding` is the agent's binding of the tool, or None if there is none. `own` contains the names
    of all tools of the agent, so that the error message can suggest similar names.

    Raises:
        PermissionDenied: the agent does not have the tool.
        ToolDisabled: the binding is disabled.
    """
    if binding is None:
        raise PermissionDenied(
            f"The agent {agent_id!r} has no tool {tool_name[:80]!r}. Do not retry; use one of "
            f"its own tools.{did_you_mean(tool_name, own)}"
        )
    if not binding.is_enabled:
        raise ToolDisabled(
            f"The tool {binding.tool_name} is disabled for the agent {agent_id!r}. Do not retry."
        )
    return binding
