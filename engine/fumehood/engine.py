"""The engine: the composition root. The only place that names concrete classes.

Above it the faces (daemon, command line, an embedding program); below it the rooms.
Entering it starts the walls, leaving it ends them with everything that runs in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any

import anyio
import anyio.lowlevel
from pydantic import ValidationError

from fumehood.call.shape import shape_error
from fumehood.call.spine import Rooms, run_call
from fumehood.config import Config, load_config
from fumehood.gates.approvers import Approvers
from fumehood.gates.tokens import Tokens
from fumehood.model.call import CallBody, CallOptions, CallRequest
from fumehood.model.envelope import Envelope, Metadata, Performance, Resources, UsageReport
from fumehood.model.errors import EngineError, InvalidParams
from fumehood.model.identity import Principal, Scope, uid_principal_id
from fumehood.model.json_types import JsonObject
from fumehood.model.limits import Limit
from fumehood.model.tool import ToolDefinition
from fumehood.model.usage import EstimatingCounter, TokenCounter
from fumehood.observe.clock import Clock, IdSource, SystemClock, timestamp
from fumehood.observe.log import Logger, quiet_logger
from fumehood.registry.agents import Agents
from fumehood.registry.declare import FunctionTool
from fumehood.registry.definitions import InvalidDefinition, parse_definition
from fumehood.registry.discover import LoadFault, discover
from fumehood.registry.index import RegisteredTool, Source, ToolIndex
from fumehood.sandbox.host import Host
from fumehood.sandbox.process.interpreter import InterpreterWall
from fumehood.sandbox.wall import Wall, Walls
from fumehood.store.database import Database, open_database
from fumehood.wire import strict_json

MAX_KEYS = 1000
"""Parameters of one call: each unknown one would become a message or a warning."""

Tool = FunctionTool | ToolDefinition | JsonObject


class Engine:
    """Runs tools behind their gates and walls.

        async with Engine(tools=[send_invoice]) as engine:
            envelope = await engine.call("calculator", {"expression": "5! + 2**10"})

    What must survive the process is kept in `database` (`open_database`); without one it is
    kept in memory and ends with the engine.

    `tools` come from the embedding program, which is its own operator: functions made by
    `@tool(sandboxed=False)`, definitions, or documents of definitions. Built-in tools and
    entry points are found by themselves.

    Raises:
        InvalidDefinition: a tool of `tools` is wrong, with every fault of every one.
    """

    def __init__(
        self,
        tools: Iterable[Tool] = (),
        *,
        config: Config | None = None,
        token_counter: TokenCounter | None = None,
        log: Logger | None = None,
        clock: Clock | None = None,
        interpreter: Wall | None = None,
        database: Database | None = None,
    ) -> None:
        self.config = config if config is not None else load_config()
        self.log = log if log is not None else quiet_logger()
        self._clock = clock if clock is not None else SystemClock()
        self._counter = token_counter if token_counter is not None else EstimatingCounter()
        self._ids = IdSource()
        self._registry = ToolIndex()
        self.load_faults: list[LoadFault] = discover(self._registry, self.config.host_tools)
        for fault in self.load_faults:
            self.log.error("tools.left_out", entry_point=fault.entry_point, reason=fault.reason)
        _register_all(self._registry, tools)
        self._interpreter: Wall = (
            interpreter
            if interpreter is not None
            else InterpreterWall(self.config.interpreter_limits, on_event=self._on_wall_event)
        )
        self._owns_database = database is None
        self.database = database if database is not None else open_database(None)
        self.agents = Agents(self.database)
        self.tokens = Tokens(self.database)
        self.approvers = Approvers(self.database)
        self._rooms = Rooms(
            registry=self._registry,
            agents=self.agents,
            walls=Walls(interpreter=self._interpreter, host=Host()),
            clock=self._clock,
            log=self.log,
            counter=self._counter,
            prices=self.config.resource_prices,
            allow_debug=self.config.allow_debug,
            is_draining=lambda: self._is_draining or not self._is_open,
        )
        self._is_draining = False
        self._is_open = False
        self._running = 0
        self._idle = anyio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Engine:
        if self._owns_database:
            self._stack.callback(self.database.close)
        if isinstance(self._interpreter, InterpreterWall):
            await self._stack.enter_async_context(self._interpreter)
        self._is_open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_open = False
        await self._stack.aclose()
        await anyio.lowlevel.checkpoint()  # the last calls' last events are still to be logged

    async def call(
        self, tool: str, arguments: JsonObject | None = None, **options: Any
    ) -> Envelope:
        """Call a tool (`name` or `name@version`) as the owner of this process.

        `options` are those of `CallOptions`. Always answers with an envelope, also where
        arguments or options are no JSON at all.
        """
        try:
            # What a daemon's client could not send, an embedding program cannot either.
            call = {"arguments": arguments if arguments is not None else {}, "options": options}
            raw = strict_json.loads(
                strict_json.dumps({"tool": str(tool), "call": call}), max_depth=65
            )
            body = parse_call_body(raw["call"])
        except (TypeError, ValueError, RecursionError) as error:
            return self.refusal(InvalidParams(f"The call is not JSON: {error}."))
        except EngineError as error:
            return self.refusal(error, tool=str(tool))
        return await self.run(raw["tool"], body, self.owner)

    @property
    def owner(self) -> Principal:
        """The principal of this process's own calls."""
        return self.principal_of_uid(os.getuid())

    def principal_of_uid(self, uid: int) -> Principal:
        """Whom a Unix user is here: `call` and nothing else comes with a uid."""
        principal_id = self.config.principal_ids.get(uid) or uid_principal_id(uid)
        agents = self.agents.spoken_for_by(principal_id)
        return Principal(principal_id, frozenset({Scope.CALL}), agents)

    def now(self) -> datetime:
        """The engine's clock."""
        return self._clock.now()

    async def run(self, tool: str, body: CallBody, principal: Principal | None) -> Envelope:
        """Carry out one call of somebody whose identity the face has established."""
        trace_id = body.options.trace_id or self._ids.trace_id(self._clock.now())
        request = CallRequest(
            tool=tool,
            arguments=body.arguments,
            options=body.options,
            principal=principal,
            call_id=self._ids.call_id(),
            trace_id=trace_id,
        )
        self._running += 1
        try:
            return await run_call(request, self._rooms)
        finally:
            self._running -= 1
            if self._is_draining and not self._running:
                self._idle.set()

    def tools(self) -> list[ToolDefinition]:
        """The preferred version of every registered tool, by name."""
        return [tool.definition for tool in self._registry]

    def tool(self, reference: str) -> RegisteredTool:
        """One tool by `name` or `name@version`. Raises ToolNotFound."""
        return self._registry.get(reference)

    def versions(self, name: str) -> list[str]:
        """The versions of one tool, newest first."""
        return [tool.definition.version for tool in self._registry.versions(name)]

    def answer(self, data: JsonObject) -> Envelope:
        """An envelope for what is no call, such as a list of tools."""
        return self._outside_calls(data, None, None)

    def refusal(self, error: EngineError, tool: str | None = None) -> Envelope:
        """An envelope for what was refused before it became a call."""
        return self._outside_calls({}, error, tool)

    def drain(self) -> None:
        """Take no new calls from now on; what runs goes on."""
        self._is_draining = True
        if not self._running:
            self._idle.set()

    async def drained(self) -> None:
        """Wait, after `drain`, until no call runs any more."""
        await self._idle.wait()

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self._is_draining

    @property
    def walls(self) -> dict[str, dict[str, Any]]:
        """For each wall, what it enforces here, whether that is enough, and what is wrong."""
        report = {}
        for name, wall in (("interpreter", self._interpreter),):
            required: frozenset[Limit] = wall.required
            report[name] = {
                "enforced": sorted(limit.value for limit in wall.enforced),
                "ready": not required - wall.enforced,
                "faults": list(getattr(wall, "faults", ())),
                "guest_pid": getattr(wall, "guest_pid", None),
            }
        return report

    def _on_wall_event(self, event: str, values: JsonObject) -> None:
        level = self.log.warning if event == "guest.lost" else self.log.info
        level(event, **values)

    def _outside_calls(
        self, data: JsonObject, error: EngineError | None, tool: str | None
    ) -> Envelope:
        now = self._clock.now()
        return Envelope(
            success=error is None,
            status="success" if error is None else "error",
            data=data,
            error=shape_error(error) if error is not None else None,
            metadata=Metadata(
                tool_name=tool[:80] if tool is not None else None,
                tool_version=None,
                call_id=None,
                trace_id=self._ids.trace_id(now),
                timestamp=timestamp(now),
                execution_time_ms=0.0,
                performance=Performance(total_ms=0.0),
                sandbox=None,
                resources=Resources(),
                usage=UsageReport(currency=self.config.prices.currency),
            ),
        )


def parse_call_body(document: Any) -> CallBody:
    """The body of a call from JSON that has been parsed strictly.

    Raises:
        InvalidParams: with every field that is wrong.
    """
    if not isinstance(document, dict):
        raise InvalidParams('The body must be an object: {"arguments": {…}, "options": {…}}.')
    for where in (document, document.get("options"), document.get("arguments")):
        if isinstance(where, dict) and len(where) > MAX_KEYS:
            raise InvalidParams(f"The call has more than {MAX_KEYS} keys in one object of its own.")
    try:
        return CallBody.model_validate(document)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        fields = [".".join(map(str, fault["loc"]))[:120] for fault in faults[:20]]
        words = "; ".join(
            f"{field}: {fault['msg']}" for field, fault in zip(fields, faults, strict=False)
        )
        raise InvalidParams(f"The call is wrong: {words}.", fields=fields) from None


def _parse(document: object) -> ToolDefinition:
    if not isinstance(document, dict):
        fault = "definition: neither made by @tool nor a definition"
        name = getattr(document, "__name__", type(document).__name__)
        raise InvalidDefinition(str(name), [fault])
    return parse_definition(document)


def _register_all(registry: ToolIndex, tools: Iterable[Tool]) -> None:
    faults: list[InvalidDefinition] = []
    for tool in tools:
        try:
            if isinstance(tool, FunctionTool):
                registry.register(tool.definition, Source.PROGRAM, function=tool.invoke)
            else:
                definition = tool if isinstance(tool, ToolDefinition) else _parse(tool)
                registry.register(definition, Source.PROGRAM)
        except InvalidDefinition as error:
            faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        names = ", ".join(error.message for error in faults)
        raise InvalidDefinition(names, [fault for error in faults for fault in error.faults])


__all__ = ["CallOptions", "Engine", "parse_call_body"]
