"""`/v1/agents`: agents and their tools, on the control socket."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request

from fumehood.answers import (
    AgentDetails,
    Deleted,
)
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.answers import engine_of, parse_body
from fumehood.http.endpoint import As, Given, Method, Needs, endpoint
from fumehood.http.routes.tools import ToolName
from fumehood.identity.model import Agent, AgentFields, Binding, BindingFields

AgentAnswer = Annotated[Agent, As("agent", "AgentAnswer", "An agent as it is now.")]
AgentId = Annotated[str, "An agent's id."]


def _known(request: Request, _: Principal) -> Agent:
    return engine_of(request).agents.get(request.path_params["agent_id"])


KnownAgent = Annotated[Agent, Given(_known, {"agent_id": "An agent's id."})]


@endpoint("GET", "/v1/agents", Needs.ADMIN, client="agents.list")
async def list_agents(
    engine: Engine,
) -> Annotated[tuple[Agent, ...], As("items", "AgentList", "Every agent by id.")]:
    """List all agents."""
    return tuple(engine.agents.all())


@endpoint(
    "POST",
    "/v1/agents",
    Needs.ADMIN,
    errors=[IdempotencyConflict],
    client=Method("agents.create", renamed={"id": "agent_id"}),
)
async def create_agent(engine: Engine, caller: Principal, body: Agent) -> AgentAnswer:
    """Create an agent."""
    await engine.agents.create(body, by=caller, now=engine.now())
    return body


@endpoint(
    "GET", "/v1/agents/{agent_id}", Needs.ADMIN, errors=[ResourceNotFound], client="agents.show"
)
async def show_agent(engine: Engine, agent: KnownAgent) -> AgentDetails:
    """Show one agent with its tools."""
    return AgentDetails(agent=agent, tools=tuple(engine.agents.bindings(agent.id)))


@endpoint("PUT", "/v1/agents/{agent_id}", Needs.ADMIN, errors=[ResourceNotFound], client=None)
async def replace_agent(
    engine: Engine, caller: Principal, agent: KnownAgent, body: AgentFields
) -> AgentAnswer:
    """Replace all fields of an agent; its tools stay."""
    return await _change(engine, caller, agent, body, is_whole=True)


@endpoint(
    "PATCH",
    "/v1/agents/{agent_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client=Method("agents.update", renamed={"id": "agent_id"}),
)
async def update_agent(
    engine: Engine, caller: Principal, agent: KnownAgent, body: AgentFields
) -> AgentAnswer:
    """Change the given fields of an agent; other fields and its tools stay."""
    return await _change(engine, caller, agent, body, is_whole=False)


@endpoint(
    "DELETE",
    "/v1/agents/{agent_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.delete",
)
async def delete_agent(engine: Engine, caller: Principal, agent_id: AgentId) -> Deleted:
    """Delete an agent and its bindings."""
    await engine.agents.delete(agent_id, by=caller, now=engine.now())
    return Deleted(deleted=agent_id)


@endpoint(
    "GET",
    "/v1/agents/{agent_id}/tools",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.bindings",
)
async def list_bindings(
    engine: Engine, agent_id: AgentId
) -> Annotated[
    tuple[Binding, ...],
    As(
        "items",
        "BindingList",
        "An agent's tools in its order, those that are switched off included.",
    ),
]:
    """List an agent's bindings, in the agent's order."""
    return tuple(engine.agents.bindings(agent_id))


@endpoint(
    "PUT",
    "/v1/agents/{agent_id}/tools/{tool}",
    Needs.ADMIN,
    errors=[ResourceNotFound, ToolNotFound],
    client="agents.bind",
)
async def bind_tool(
    engine: Engine, agent_id: AgentId, tool: ToolName, caller: Principal, body: BindingFields
) -> Annotated[Binding, As("binding", "BindingAnswer", "A binding as it is now.")]:
    """Bind a tool to an agent, or change its binding."""
    if body.tool not in (None, tool):
        raise InvalidParams("The tools in the address and in the body differ.", fields=["tool"])
    binding = parse_body(Binding, {**dict(body), "tool": tool})
    engine.tool(binding.tool)  # a missing tool cannot be bound
    await engine.agents.bind(agent_id, binding, by=caller, now=engine.now())
    return binding


@endpoint(
    "DELETE",
    "/v1/agents/{agent_id}/tools/{tool}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.unbind",
)
async def unbind_tool(
    engine: Engine, agent_id: AgentId, tool: ToolName, caller: Principal
) -> Deleted:
    """Unbind a tool from an agent."""
    name = tool.partition("@")[0]
    await engine.agents.unbind(agent_id, name, by=caller, now=engine.now())
    return Deleted(deleted=name)


async def _change(
    engine: Engine, by: Principal, known: Agent, fields: AgentFields, *, is_whole: bool
) -> AgentAnswer:
    if fields.id not in (None, known.id):
        raise InvalidParams("An agent's id cannot be changed.", fields=["id"])
    given = fields.model_dump(exclude={"id"}, exclude_unset=not is_whole)
    agent = parse_body(Agent, {**dict(known), **given})
    await engine.agents.update(agent, by=by, now=engine.now())
    return agent


OPERATIONS = [
    list_agents,
    create_agent,
    show_agent,
    replace_agent,
    update_agent,
    delete_agent,
    list_bindings,
    bind_tool,
    unbind_tool,
]
