"""Which tools a call may use that is made for an agent.

Host side, asked by `pipeline/resolve`, since what is not an agent's does not exist for it.
Invariant: an agent that is unknown, switched off, or not this principal's to speak for is
refused in the same words, so that nobody learns which agents there are.
"""

from __future__ import annotations

from collections.abc import Sequence

from fumehood.core.errors import PermissionDenied, ResourceNotFound, ToolDisabled
from fumehood.core.identity import Principal
from fumehood.core.names import did_you_mean
from fumehood.identity.agent import Agent, Binding


def require_agent(principal: Principal | None, agent_id: str, agent: Agent | None) -> None:
    """Raises ResourceNotFound where the principal may not speak for such an agent."""
    speaks = principal is not None and agent_id in principal.agents
    if agent is None or not agent.is_enabled or not speaks:
        raise ResourceNotFound(
            f"There is no agent {agent_id[:80]!r} that you may speak for. Do not retry."
        )


def require_binding(
    agent_id: str, tool_name: str, binding: Binding | None, own: Sequence[str] = ()
) -> Binding:
    """The agent's binding of a tool; `own` are the names of the tools that it may use.

    Raises:
        PermissionDenied: the agent does not have it.
        ToolDisabled: it has, and it is switched off for this agent.
    """
    if binding is None:
        raise PermissionDenied(
            f"The agent {agent_id!r} has no tool {tool_name[:80]!r}. Do not retry; use one of "
            f"its own tools.{did_you_mean(tool_name, own)}"
        )
    if not binding.is_enabled:
        raise ToolDisabled(
            f"The tool {binding.tool_name} is switched off for the agent {agent_id!r}. "
            "Do not retry."
        )
    return binding
