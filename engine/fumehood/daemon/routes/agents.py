"""`/v1/agents`: agents and their tools, on the control socket."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.daemon.answers import envelope_response, parse_body, read_json
from fumehood.daemon.caller import require_admin
from fumehood.engine import Engine
from fumehood.model.agent import Agent, Binding
from fumehood.model.errors import InvalidParams
from fumehood.model.json_types import JsonObject


async def list_agents(request: Request) -> Response:
    """Every agent."""
    await require_admin(request)
    engine = _engine(request)
    return _answer(engine, {"items": [_shown(agent) for agent in engine.agents.all()]})


async def create_agent(request: Request) -> Response:
    """A new agent."""
    document = await read_json(request)
    by = await require_admin(request)
    engine = _engine(request)
    agent = parse_body(Agent, document)
    await engine.agents.create(agent, by=by, now=engine.now())
    return _answer(engine, {"agent": _shown(agent)})


async def show_agent(request: Request) -> Response:
    """One agent with its tools."""
    await require_admin(request)
    engine, agent_id = _engine(request), request.path_params["agent_id"]
    agent = engine.agents.get(agent_id)
    tools = [binding.model_dump() for binding in engine.agents.bindings(agent_id)]
    return _answer(engine, {"agent": _shown(agent), "tools": tools})


async def update_agent(request: Request) -> Response:
    """Change an agent, whole (PUT) or in some fields (PATCH); its tools stay."""
    document = _object(await read_json(request))
    by = await require_admin(request)
    engine, agent_id = _engine(request), request.path_params["agent_id"]
    base: JsonObject = {"id": agent_id}
    if request.method == "PATCH":
        base = _shown(engine.agents.get(agent_id))
    agent = parse_body(Agent, {**base, **document})
    if agent.id != agent_id:
        raise InvalidParams("An agent's id cannot be changed.", fields=["id"])
    await engine.agents.update(agent, by=by, now=engine.now())
    return _answer(engine, {"agent": _shown(agent)})


async def delete_agent(request: Request) -> Response:
    """Remove an agent with its bindings."""
    by = await require_admin(request)
    engine, agent_id = _engine(request), request.path_params["agent_id"]
    await engine.agents.delete(agent_id, by=by, now=engine.now())
    return _answer(engine, {"deleted": agent_id})


async def list_bindings(request: Request) -> Response:
    """An agent's tools in its order, as they are configured."""
    await require_admin(request)
    engine = _engine(request)
    bindings = engine.agents.bindings(request.path_params["agent_id"])
    return _answer(engine, {"items": [binding.model_dump() for binding in bindings]})


async def bind_tool(request: Request) -> Response:
    """Give an agent a tool, or change how it has it."""
    document = _object(await read_json(request))
    by = await require_admin(request)
    engine, path = _engine(request), request.path_params
    binding = parse_body(Binding, {"tool": path["tool"], **document})
    if binding.tool != path["tool"]:
        raise InvalidParams("The tool of the address and of the body differ.", fields=["tool"])
    engine.tool(binding.tool)  # one that does not exist cannot be bound
    await engine.agents.bind(path["agent_id"], binding, by=by, now=engine.now())
    return _answer(engine, {"binding": binding.model_dump()})


async def unbind_tool(request: Request) -> Response:
    """Take a tool from an agent."""
    by = await require_admin(request)
    engine, path = _engine(request), request.path_params
    name = path["tool"].partition("@")[0]
    await engine.agents.unbind(path["agent_id"], name, by=by, now=engine.now())
    return _answer(engine, {"deleted": name})


def _engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


def _answer(engine: Engine, data: JsonObject) -> Response:
    return envelope_response(engine.answer(data))


def _object(document: object) -> JsonObject:
    if not isinstance(document, dict):
        raise InvalidParams("The body must be a JSON object.")
    return document


def _shown(agent: Agent) -> JsonObject:
    return agent.model_dump(mode="json")
