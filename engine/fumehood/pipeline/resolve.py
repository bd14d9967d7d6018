"""Resolve: find the version of the tool that a call names.

First stage. Takes a `CallRequest`, returns a `ResolvedCall`. A call for an agent can only find that
agent's tools, and only callers who may act for the agent can find the agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from fumehood.core.call import CallRequest
from fumehood.core.errors import PermissionDenied, ToolDeprecated, ToolDisabled, ToolNotFound
from fumehood.core.identity import Scope
from fumehood.core.names import EXTERNAL, NET_TOOL
from fumehood.core.tool import ToolDefinition
from fumehood.identity.agents import Agents
from fumehood.identity.model import Binding
from fumehood.identity.principals import require_agent, require_binding
from fumehood.registry.index import RegisteredTool, ToolIndex


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """A call whose tool exists, is enabled and has not passed its sunset date."""

    request: CallRequest
    tool: RegisteredTool
    warnings: tuple[str, ...]
    binding: Binding | None = None
    network: tuple[str, ...] = ()
    """Hosts that the call's options, the tool and the agent request for the program."""


def resolve(
    request: CallRequest, registry: ToolIndex, agents: Agents, now: Callable[[], datetime]
) -> ResolvedCall:
    """Find the tool of a call. `now` is called only if the tool has a sunset date.

    Raises:
        ResourceNotFound: there is no such agent, or the principal may not act for it.
        PermissionDenied: the agent does not have this tool, or is bound to another version of it.
        ToolNotFound: there is no such tool or version, or callers cannot call the tool directly.
        ToolDisabled: the tool is disabled, or it is host code that the operator did not allow.
        ToolDeprecated: the tool's sunset date has passed.
    """
    binding = None
    reference = request.tool
    agent_id = request.options.agent_id
    is_external = reference.startswith(EXTERNAL) or reference.partition("@")[0] == NET_TOOL
    if (
        is_external and request.context is None
    ):  # a key or the call log could return the decision again
        ask = " Use POST /v1/decisions." if reference.startswith(EXTERNAL) else ""
        raise ToolNotFound(f"The engine cannot run {reference[:80]}.{ask}")
    if agent_id is not None and is_external:
        require_agent(request.principal, agent_id, agents.find(agent_id))
    elif agent_id is not None:
        binding = _binding(request, agent_id, agents)
        reference = _bound_reference(request, binding)
    may_list = request.principal is not None and Scope.CALL in request.principal.scopes
    tool = registry.get(reference, names_others=may_list and agent_id is None)
    definition = tool.definition
    if tool.disabled_because is not None:
        raise ToolDisabled(f"The tool {definition.name} is disabled. {tool.disabled_because}")
    if not definition.is_active:
        raise ToolDisabled(f"The tool {definition.name} is disabled. Do not retry.")
    ends = definition.deprecated or definition.sunset_date is not None
    network = request.options.network or ()
    if definition.executor.startswith("code:"):
        agent = agents.find(agent_id) if agent_id is not None else None
        network = (*network, *definition.network, *(agent.network if agent is not None else ()))
    warnings = _deprecation(definition, now) if ends else ()
    return ResolvedCall(request, tool, warnings, binding, tuple(network))


def _binding(request: CallRequest, agent_id: str, agents: Agents) -> Binding:
    require_agent(request.principal, agent_id, agents.find(agent_id))
    name = request.tool.partition("@")[0]
    found = agents.binding(agent_id, name)
    if found is not None:
        return require_binding(agent_id, name, found)
    own = [binding.tool_name for binding in agents.bindings(agent_id) if binding.is_enabled]
    return require_binding(agent_id, name, None, own)


def _bound_reference(request: CallRequest, binding: Binding) -> str:
    """Return the tool's name, or `name@version` if the agent is bound to one version."""
    if "@" not in binding.tool:
        return request.tool
    if "@" in request.tool and request.tool != binding.tool:
        raise PermissionDenied(
            f"This agent has only {binding.tool}, no other version. Do not retry."
        )
    return binding.tool


def _deprecation(definition: ToolDefinition, now: Callable[[], datetime]) -> tuple[str, ...]:
    if definition.sunset_date is not None and definition.sunset_date < now().date():
        raise ToolDeprecated(
            f"{definition.name}@{definition.version} ended on {definition.sunset_date}."
            + (f" Use {definition.replacement} instead." if definition.replacement else ""),
            extra={
                "replacement": definition.replacement,
                "sunset_date": definition.sunset_date.isoformat(),
                "migration_guide": definition.migration_guide,
            },
        )
    when = f", until {definition.sunset_date}" if definition.sunset_date else ""
    use = f"; use {definition.replacement}" if definition.replacement else ""
    return (f"{definition.name}@{definition.version} is deprecated{when}{use}",)
