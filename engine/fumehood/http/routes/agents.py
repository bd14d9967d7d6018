"""`/v1/agents`: agents and their tools, on the control socket."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import (
    AgentAnswer,
    AgentDetails,
    AgentList,
    BindingAnswer,
    BindingList,
    Deleted,
)
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.http.answers import answer, engine_of, parse_body, read_json
from fumehood.http.caller import require_admin
from fumehood.http.operation import Needs, Operation
from fumehood.identity.model import Agent, AgentFields, Binding, BindingFields

AGENT = {"agent_id": "An agent's id."}
AGENTS_TOOL = {**AGENT, "tool": "A tool's name, or `name@version`."}
NOT_FOUND = frozenset({ResourceNotFound})


async def list_agents(request: Request) -> Response:
    """List all agents."""
    await require_admin(request)
    return answer(request, AgentList(items=tuple(engine_of(request).agents.all())))


async def create_agent(request: Request) -> Response:
    """Create an agent."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = engine_of(request)
    agent = parse_body(Agent, document)
    await engine.agents.create(agent, by=by, now=engine.now())
    return answer(request, AgentAnswer(agent=agent))


async def show_agent(request: Request) -> Response:
    """Show one agent with its tools."""
    await require_admin(request)
    agents, agent_id = engine_of(request).agents, request.path_params["agent_id"]
    agent, tools = agents.get(agent_id), tuple(agents.bindings(agent_id))
    return answer(request, AgentDetails(agent=agent, tools=tools))


async def replace_agent(request: Request) -> Response:
    """Replace all fields of an agent; its tools stay."""
    return await _change(request, is_whole=True)


async def update_agent(request: Request) -> Response:
    """Change the given fields of an agent; other fields and its tools stay."""
    return await _change(request, is_whole=False)


async def delete_agent(request: Request) -> Response:
    """Delete an agent and its bindings."""
    by = await require_admin(request)
    engine, agent_id = engine_of(request), request.path_params["agent_id"]
    await engine.agents.delete(agent_id, by=by, now=engine.now())
    return answer(request, Deleted(deleted=agent_id))


async def list_bindings(request: Request) -> Response:
    """List an agent's bindings, in the agent's order."""
    await require_admin(request)
    bindings = engine_of(request).agents.bindings(request.path_params["agent_id"])
    return answer(request, BindingList(items=tuple(bindings)))


async def bind_tool(request: Request) -> Response:
    """Bind a tool to an agent, or change its binding."""
    document = await read_json(request)
    by = await require_admin(request)
    engine, path = engine_of(request), request.path_params
    fields = parse_body(BindingFields, document)
    if fields.tool not in (None, path["tool"]):
        raise InvalidParams("The tools in the address and in the body differ.", fields=["tool"])
    binding = parse_body(Binding, {**dict(fields), "tool": path["tool"]})
    engine.tool(binding.tool)  # a missing tool cannot be bound
    await engine.agents.bind(path["agent_id"], binding, by=by, now=engine.now())
    return answer(request, BindingAnswer(binding=binding))


async def unbind_tool(request: Request) -> Response:
    """Unbind a tool from an agent."""
    by = await require_admin(request)
    engine, path = engine_of(request), request.path_params
    name = path["tool"].partition("@")[0]
    await engine.agents.unbind(path["agent_id"], name, by=by, now=engine.now())
    return answer(request, Deleted(deleted=name))


async def _change(request: Request, *, is_whole: bool) -> Response:
    document = await read_json(request)
    by = await require_admin(request)
    engine, agent_id = engine_of(request), request.path_params["agent_id"]
    known = engine.agents.get(agent_id)
    fields = parse_body(AgentFields, document)
    if fields.id not in (None, agent_id):
        raise InvalidParams("An agent's id cannot be changed.", fields=["id"])
    given = fields.model_dump(exclude={"id"}, exclude_unset=not is_whole)
    agent = parse_body(Agent, {**dict(known), **given})
    await engine.agents.update(agent, by=by, now=engine.now())
    return answer(request, AgentAnswer(agent=agent))


OPERATIONS = [
    Operation("GET", "/v1/agents", list_agents, Needs.ADMIN, data=AgentList),
    Operation(
        "POST",
        "/v1/agents",
        create_agent,
        Needs.ADMIN,
        data=AgentAnswer,
        body=Agent,
        errors=frozenset({IdempotencyConflict}),
    ),
    Operation(
        "GET",
        "/v1/agents/{agent_id}",
        show_agent,
        Needs.ADMIN,
        data=AgentDetails,
        parameters=AGENT,
        errors=NOT_FOUND,
    ),
    Operation(
        "PUT",
        "/v1/agents/{agent_id}",
        replace_agent,
        Needs.ADMIN,
        data=AgentAnswer,
        body=AgentFields,
        parameters=AGENT,
        errors=NOT_FOUND,
    ),
    Operation(
        "PATCH",
        "/v1/agents/{agent_id}",
        update_agent,
        Needs.ADMIN,
        data=AgentAnswer,
        body=AgentFields,
        parameters=AGENT,
        errors=NOT_FOUND,
    ),
    Operation(
        "DELETE",
        "/v1/agents/{agent_id}",
        delete_agent,
        Needs.ADMIN,
        data=Deleted,
        parameters=AGENT,
        errors=NOT_FOUND,
    ),
    Operation(
        "GET",
        "/v1/agents/{agent_id}/tools",
        list_bindings,
        Needs.ADMIN,
        data=BindingList,
        parameters=AGENT,
        errors=NOT_FOUND,
    ),
    Operation(
        "PUT",
        "/v1/agents/{agent_id}/tools/{tool}",
        bind_tool,
        Needs.ADMIN,
        data=BindingAnswer,
        body=BindingFields,
        parameters=AGENTS_TOOL,
        errors=NOT_FOUND | {ToolNotFound},
    ),
    Operation(
        "DELETE",
        "/v1/agents/{agent_id}/tools/{tool}",
        unbind_tool,
        Needs.ADMIN,
        data=Deleted,
        parameters=AGENTS_TOOL,
        errors=NOT_FOUND,
    ),
]
