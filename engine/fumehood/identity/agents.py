"""The registry of agents and of the tools that each agent has.

Host side, used by `pipeline/resolve`, HTTP and the other interfaces. Calls read the registry from
memory. The database stores it for the engine's next start. Invariants: a change is in the database
before any caller can see it; a caller cannot distinguish an unknown agent, a disabled agent, and an
agent for which the caller may not act.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from sqlalchemy import Connection, delete, insert, select

from fumehood.core.errors import (
    IdempotencyConflict,
    ResourceNotFound,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ALTERNATIVES, ToolDefinition, with_own_root
from fumehood.identity.model import Agent, Binding
from fumehood.registry.index import LeftOut, ToolIndex
from fumehood.storage.changes import OneChange, recorded, stamp
from fumehood.storage.database import Database
from fumehood.storage.schema import AGENTS, BINDINGS


class Agents:
    """All agents and their bindings. A binding is an agent's configuration of one tool.

    Methods that change something record `by`, the principal that makes the change, and `now`, the
    time of the change.
    """

    def __init__(self, database: Database) -> None:
        self.changes = 0
        """The number of changes since this object was created. Other code compares this number with
        an earlier one to detect changes."""
        self._database = database
        self._changing = OneChange(self._reload)
        self._load(*database.read_now(_all_rows))

    def spoken_for_by(self, principal_id: str) -> frozenset[str]:
        """Return the ids of the agents that this principal may act for."""
        return self._spoken_for.get(principal_id, frozenset())

    def find(self, agent_id: str) -> Agent | None:
        return self._agents.get(agent_id)

    def get(self, agent_id: str) -> Agent:
        """Return an agent. Raises ResourceNotFound if no agent has this id."""
        if agent_id not in self._agents:
            raise ResourceNotFound(f"There is no agent {agent_id[:80]!r}.")
        return self._agents[agent_id]

    def all(self) -> list[Agent]:
        return [self._agents[agent_id] for agent_id in sorted(self._agents)]

    def bindings(self, agent_id: str) -> list[Binding]:
        """Return an agent's bindings in their configured order, including disabled ones. Raises
        ResourceNotFound if no agent has this id.
        """
        found = self._bindings.get(self.get(agent_id).id, {}).values()
        return sorted(found, key=lambda binding: (binding.sort_order, binding.tool))

    def binding(self, agent_id: str, tool_name: str) -> Binding | None:
        """Return the agent's binding of the tool with this name, or None."""
        return self._bindings.get(agent_id, {}).get(tool_name)

    def tools(self, agent_id: str, index: ToolIndex) -> tuple[list[ToolDefinition], list[LeftOut]]:
        """Return two lists. The first has the definitions of the tools that the agent can use now,
        as the agent sees them, in the order of the bindings. The second has the agent's tools that
        are unavailable now, each with the reason. `index` contains all registered tools.

        Raises ResourceNotFound if no agent has this id.
        """
        seen: list[ToolDefinition] = []
        left_out: list[LeftOut] = []
        for binding in self.bindings(agent_id):
            try:
                tool = index.get(binding.tool)
            except ToolNotFound:
                left_out.append(LeftOut(binding.tool_name, "it is not registered"))
                continue
            if binding.is_enabled and tool.disabled_because is None:
                seen.append(seen_by_agent(tool.definition, binding))
            else:
                left_out.append(LeftOut(binding.tool_name, "it is disabled"))
        return seen, left_out

    async def create(self, agent: Agent, *, by: Principal, now: datetime) -> None:
        """Create an agent.

        Raises:
            IdempotencyConflict: an agent with this id already exists.
        """
        async with self._changing():
            if agent.id in self._agents:
                raise IdempotencyConflict(f"The agent {agent.id!r} already exists.")
            await self._put("agent.create", agent, by, now)

    async def update(self, agent: Agent, *, by: Principal, now: datetime) -> None:
        """Replace the fields of the agent with the id `agent.id` by those of `agent`. The agent's
        bindings stay unchanged. Raises ResourceNotFound if no agent has this id.
        """
        async with self._changing():
            self.get(agent.id)
            await self._put("agent.update", agent, by, now)

    async def delete(self, agent_id: str, *, by: Principal, now: datetime) -> None:
        """Delete an agent and its bindings. Raises ResourceNotFound if no agent has this id."""
        async with self._changing():
            self.get(agent_id)
            await self._write(
                lambda connection: _delete_agent(connection, agent_id),
                "agent.delete", agent_id, {}, by, now,
            )  # fmt: skip
            del self._agents[agent_id]
            self._bindings.pop(agent_id, None)
            self._index_speakers()

    async def bind(self, agent_id: str, binding: Binding, *, by: Principal, now: datetime) -> None:
        """Bind a tool to an agent. If the agent already has a binding of this tool, of any version,
        the new binding replaces it.

        Raises:
            ResourceNotFound: no agent has this id.
        """
        # Only the names of arguments are recorded, because their values may be private.
        details: JsonObject = {
            "tool": binding.tool,
            "fixed": sorted(binding.fixed),
            "defaults": sorted(binding.defaults),
            "is_enabled": binding.is_enabled,
        }
        async with self._changing():
            self.get(agent_id)
            await self._write(
                lambda connection: _put_binding(connection, agent_id, binding),
                "agent.bind", agent_id, details, by, now,
            )  # fmt: skip
            self._bindings.setdefault(agent_id, {})[binding.tool_name] = binding
            self.changes += 1

    async def unbind(self, agent_id: str, tool_name: str, *, by: Principal, now: datetime) -> None:
        """Remove the binding of a tool from an agent.

        Raises:
            ResourceNotFound: no agent has this id, or the agent does not have the tool.
        """
        async with self._changing():
            self.get(agent_id)
            if self.binding(agent_id, tool_name) is None:
                raise ResourceNotFound(f"The agent {agent_id!r} has no tool {tool_name[:80]!r}.")
            await self._write(
                lambda connection: _unbind(connection, agent_id, tool_name),
                "agent.unbind", agent_id, {"tool": tool_name}, by, now,
            )  # fmt: skip
            del self._bindings[agent_id][tool_name]
            self.changes += 1

    async def _reload(self) -> None:
        self._load(*await self._database.write(_all_rows))

    def _load(self, agents: list[Agent], bindings: list[tuple[str, Binding]]) -> None:
        self._agents = {agent.id: agent for agent in agents}
        self._bindings: dict[str, dict[str, Binding]] = {}
        for agent_id, binding in bindings:
            self._bindings.setdefault(agent_id, {})[binding.tool_name] = binding
        self._index_speakers()

    async def _put(self, action: str, agent: Agent, by: Principal, now: datetime) -> None:
        await self._write(
            lambda connection: _put_agent(connection, agent, stamp(now)),
            action, agent.id, agent.model_dump(mode="json"), by, now,
        )  # fmt: skip
        self._agents[agent.id] = agent
        self._index_speakers()

    async def _write(
        self,
        change: Callable[[Connection], None],
        action: str,
        subject: str,
        details: JsonObject,
        by: Principal,
        now: datetime,
    ) -> None:
        await self._database.write(
            recorded(change, at=now, by=by.id, action=action, subject=subject, details=details)
        )

    def _index_speakers(self) -> None:
        speakers: dict[str, set[str]] = {}
        for agent in self._agents.values():
            for principal_id in agent.principals:
                speakers.setdefault(principal_id, set()).add(agent.id)
        self._spoken_for: dict[str, frozenset[str]] = {
            who: frozenset(agents) for who, agents in speakers.items()
        }
        self.changes += 1


def seen_by_agent(tool: ToolDefinition, binding: Binding) -> ToolDefinition:
    """Return the tool definition as the agent of this binding sees it.

    Arguments that the binding fixes are hidden. Arguments for which the binding has a default are
    optional. Calls are still validated against the full definition.
    """
    if not binding.fixed and not binding.defaults:
        return tool
    parameters = _parameters_seen(with_own_root(tool.parameters), binding)
    examples = tuple(
        {name: value for name, value in example.items() if name not in binding.fixed}
        for example in tool.input_examples
    )
    return tool.model_copy(update={"parameters": parameters, "input_examples": examples})


def _parameters_seen(schema: JsonObject, binding: Binding) -> JsonObject:
    """Return a schema of parameters as the agent sees it. Arguments that `binding` fixes are left
    out. Arguments for which `binding` has a default value are optional and have this default.

    `schema` is the schema of all parameters of a tool, or a schema inside it, such as one in
    `anyOf`.
    """
    seen = dict(schema)
    if "properties" in schema:
        seen["properties"] = {
            name: _with_default(said, name, binding)
            for name, said in schema["properties"].items()
            if name not in binding.fixed
        }
    if "required" in schema:
        given = binding.fixed.keys() | binding.defaults.keys()
        seen["required"] = [name for name in schema["required"] if name not in given]
    for keyword in ALTERNATIVES:
        if keyword in schema:
            parts = schema[keyword]
            seen[keyword] = [
                _parameters_seen(part, binding) if isinstance(part, dict) else part
                for part in parts
            ]
    return seen


def _with_default(schema: object, name: str, binding: Binding) -> object:
    if name not in binding.defaults or not isinstance(schema, dict):
        return schema
    shown: JsonObject = {**schema, "default": binding.defaults[name]}
    return shown


# -- rows ----------------------------------------------------------------------------------


def _all_rows(connection: Connection) -> tuple[list[Agent], list[tuple[str, Binding]]]:
    """Return all agents, and all bindings as pairs of agent id and binding."""
    agents = [
        Agent(
            id=row["id"],
            description=row["description"],
            principals=tuple(row["principals"]),
            is_enabled=row["is_enabled"],
            network=tuple(row["network"] or ()),
            presets=tuple(row["presets"] or ()),
        )
        for row in connection.execute(select(AGENTS)).mappings()
    ]
    bindings = [
        (
            row["agent_id"],
            Binding(
                tool=row["tool"],
                sort_order=row["sort_order"],
                fixed=row["fixed"],
                defaults=row["defaults"],
                is_enabled=row["is_enabled"],
            ),
        )
        for row in connection.execute(select(BINDINGS)).mappings()
    ]
    return agents, bindings


def _put_agent(connection: Connection, agent: Agent, at: str) -> None:
    """Create or replace an agent's row. The rows of its bindings stay unchanged."""
    known = connection.execute(select(AGENTS.c.created_at).where(AGENTS.c.id == agent.id)).scalar()
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent.id))
    row: JsonObject = agent.model_dump(mode="json")
    connection.execute(insert(AGENTS), {**row, "created_at": known or at})


def _delete_agent(connection: Connection, agent_id: str) -> None:
    """Delete an agent with its bindings."""
    connection.execute(delete(BINDINGS).where(BINDINGS.c.agent_id == agent_id))
    connection.execute(delete(AGENTS).where(AGENTS.c.id == agent_id))


def _put_binding(connection: Connection, agent_id: str, binding: Binding) -> None:
    """Store a binding. If the agent already has a binding of a tool with this name, the new binding
    replaces it.
    """
    _unbind(connection, agent_id, binding.tool)
    connection.execute(insert(BINDINGS), {"agent_id": agent_id, **binding.model_dump()})


def _unbind(connection: Connection, agent_id: str, tool: str) -> None:
    """Remove an agent's binding of a tool. `tool` is `name` or `name@version`. Only the name
    counts, so a binding of any version is removed.
    """
    name = tool.partition("@")[0]
    bound = connection.execute(
        select(BINDINGS.c.tool).where(BINDINGS.c.agent_id == agent_id)
    ).scalars()
    for reference in list(bound):
        if reference.partition("@")[0] == name:
            connection.execute(
                delete(BINDINGS).where(
                    BINDINGS.c.agent_id == agent_id, BINDINGS.c.tool == reference
                )
            )
