"""Keeps the configured MCP servers running, and registers their tools.

Host side, with one task for each server. A server that cannot be reached, or that has ended, is
started again after a pause, which grows with each attempt. Meanwhile, its last known tools stay
registered, and their calls are refused with a retryable error. Invariants:

* A server determines only the names, the descriptions and the schemas of its tools.
* A tool counts as dangerous if its definition tries to manipulate models, whatever the
  configuration says.
* A tool is left out if another source has a tool with the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread

from fumehood.core.errors import (
    EngineError,
    NetworkError,
    SandboxUnavailable,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.names import named_apart
from fumehood.core.tool import SECRET_REFERENCE, ToolDefinition, ToolType
from fumehood.engine_part import EnginePart, around_lasting
from fumehood.executors.around import LastingProgram, Share, Surroundings
from fumehood.mcp.client.program import ContainerProgram, NetworkedProgram
from fumehood.mcp.client.settings import SEPARATOR, McpServerSettings
from fumehood.mcp.client.wire import (
    MAX_MESSAGE,
    MODERN,
    HostProgram,
    HttpWire,
    Lost,
    Request,
    RpcError,
    Streams,
    Wire,
    served,
)
from fumehood.observe.log import Logger, log_fault
from fumehood.outgoing.secret_values import SecretValues
from fumehood.outgoing.upstreams import BodyTooLarge, UpstreamRequest, Upstreams
from fumehood.protocol import strict_json
from fumehood.protocol.files import one_line
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import (
    MAX_DEFINITION_BYTES,
    InvalidDefinition,
    is_credential_name,
)
from fumehood.registry.index import RegisteredTool, ToolIndex, tool_of_document
from fumehood.registry.json_schema import without_nils, without_wrong_defaults
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.wall import OpensPrograms, Wall

SOURCE = "mcp"
"""The source of MCP servers' tools, as lists of tools show it."""

GREETING_S = 12.0
"""Maximum seconds for agreeing with a server on a version of the protocol."""

LIST_S = 20.0
"""Maximum seconds for a server to list its tools, for all pages together."""

CHECK_S = 10.0
"""Maximum seconds of processor time for checking the definitions in one list. A thousand ordinary
definitions take less.
"""

POLL_S = 10.0
"""Seconds between two requests for the tools of a server over HTTP. Over HTTP, a server does not
notify the engine of changes.
"""

CHANGE_PAUSE_S = 1.0
"""Minimum seconds between two requests for the tools of a program that notifies the engine of
changes. The pause is also at least four times as long as the last request took.
"""

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
"""Shortest and longest pause, in seconds, before a server is started again."""

STABLE_S = 30.0
"""If a server ends after it has run for this many seconds, the pause before its next start is
`MIN_PAUSE_S` again.
"""

MAX_TOOLS = 1000
"""Maximum number of tools of one server. Further tools are left out."""

MAX_PAGES = 50
"""Maximum number of pages of one list of tools. Further pages are not requested."""

FAULTS_LOGGED = 20
"""Maximum number of faults in one list of tools that are logged."""

MAX_NAME = 64
"""Maximum number of characters of a tool's name."""


class McpServers:
    """All MCP servers of an engine. They run inside the `async with` block of `run`."""

    def __init__(
        self,
        settings: Mapping[str, McpServerSettings],
        registry: ToolIndex,
        registrations: Registrations,
        upstreams: Upstreams,
        redactor: Redactor,
        container: Wall,
        log: Logger,
        parts: Iterable[EnginePart],
    ) -> None:
        self._registry = registry
        self._registrations = registrations
        self._log = log
        self._tools: dict[str, list[RegisteredTool]] = {}
        self.servers = {
            name: McpServer(name, each, upstreams, redactor, container, self._put, log, parts)
            for name, each in settings.items()
        }

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keep all servers running until the `async with` block ends."""
        async with anyio.create_task_group() as group:
            for server in self.servers.values():
                group.start_soon(server.follow)
            try:
                yield
            finally:
                group.cancel_scope.cancel()

    def _put(self, server: str, tools: list[RegisteredTool], faults: dict[str, str]) -> None:
        """Replace the registered tools of one server by `tools`, and log each of `faults`, which
        maps the name of a faulty tool in the server's list to a description of the fault.
        """
        self._tools[server] = []
        for tool in tools:
            name = tool.definition.name
            owner = self._registry.owner(name, but=SOURCE)
            if owner is None:
                self._tools[server].append(tool)
            else:
                faults[name] = f"left out: the name belongs to another source ({owner})"
        for name, why in list(faults.items())[:FAULTS_LOGGED]:
            self._log.warning("mcp.tool_fault", server=server, tool=name, fault=why)
        every = [tool for name in sorted(self._tools) for tool in self._tools[name]]
        self._registry.replace_source(SOURCE, every)
        self._registrations.apply_switches()
        self._log.info("mcp.tools_listed", server=server, tools=len(self._tools[server]))


@dataclass(frozen=True, slots=True)
class Listed:
    """The checked list of one server's tools."""

    own_names: dict[str, str]
    """The engine's name of a tool → the server's own name of this tool."""
    tools: list[RegisteredTool]
    faults: dict[str, str]
    """Name of a tool → a description of its fault. The name is empty if the tool has none, or if
    the fault concerns the whole list.
    """


class McpServer:
    """One MCP server of the configuration. `put` registers its tools."""

    def __init__(
        self,
        name: str,
        settings: McpServerSettings,
        upstreams: Upstreams,
        redactor: Redactor,
        container: Wall,
        put: Callable[[str, list[RegisteredTool], dict[str, str]], None],
        log: Logger,
        parts: Iterable[EnginePart],
    ) -> None:
        self.name = name
        self._settings = settings
        self._upstreams = upstreams
        self._redactor = redactor
        self._container = container
        self._put = put
        self._log = log
        self._parts = parts
        self._wire: Wire | None = None
        self._around = Surroundings()
        """What parts of the engine gave to the server's program when it was last started, such as
        environment variables.
        """
        self._own_names: dict[str, str] = {}
        self._found: list[Any] | None = None
        """The last list of tools as the server sent it, before any check."""
        self._why = "it has not answered yet"
        self._skip_probe = False
        for key, value in settings.env.items():
            if is_credential_name(key):
                redactor.learn(value.get_secret_value())

    def shown(self, tool: str) -> JsonObject:
        """Return a description of the server for approvers of a call. It contains the server's own
        name of the tool `tool`.

        The description contains the names of environment variables and secrets, but never their
        values. In the command, the values of secret variables and keys in well-known formats are
        redacted.
        """
        given = self._settings
        called: JsonObject = {"server": self.name, "tool": self._own_names.get(tool, tool)}
        if given.url is not None:
            headers = tuple(given.headers.items())
            return {**called, **UpstreamRequest("POST", given.url, (), headers).shown}
        command = [self._redactor.line(word) for word in given.command]
        called |= {"command": command, "variables": sorted(given.env)}
        if given.place == "host":
            return {**called, "place": "host"}
        return {**called, "place": "container", "image": given.image,
                "network": list(given.network)}  # fmt: skip

    def bound(self) -> JsonObject:
        """Return the server's configured command in the field `command`, or {} if the server has a
        URL. If the command changes, earlier approvals of calls are no longer valid.
        """
        given = self._settings
        return {} if given.url is not None else {"command": list(given.command)}

    async def call(self, tool: str, arguments: JsonObject, request: Request) -> JsonObject:
        """Call the tool `tool` of the server, and return the result. `tool` is the engine's name of
        the tool. `request` represents the call; its `attempt` records whether it was sent.

        Raises:
            SandboxUnavailable: the server is a program, and does not run now or no longer has the
                tool.
            NetworkError: the server ended before it answered. For a server with a URL, also if the
                server is not connected now or no longer has the tool.
            RpcError, BodyTooLarge, EngineError: the server returned no result.
        """
        wire, own = self._wire, self._own_names.get(tool)
        if wire is None or own is None:
            # A NetworkError would open the circuit, which would then refuse calls even after the
            # program has been started again. So it is not raised for a program.
            refusal = SandboxUnavailable if self._settings.url is None else NetworkError
            raise refusal(
                f"The MCP server {self.name} does not run now, or has this tool no longer. Nothing "
                "was sent. Repeat the call later."
            )
        params = {"name": own, "arguments": arguments, "_meta": request.params}
        try:
            return await wire.ask("tools/call", params, request)
        except Lost:
            when = "during" if request.attempt.was_sent else "before"
            raise NetworkError(f"The MCP server {self.name} ended {when} the call.") from None

    def used(self) -> list[Share]:
        """Return what the engine's parts add to the outcome of the call that has just ended, such
        as a report on the server's network requests.
        """
        return self._around.used()

    async def follow(self) -> None:
        """Start the server, register its tools, and follow their changes. If the server ends, start
        it again.

        This method runs until it is cancelled.
        """
        pause_s = MIN_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                await self._live()
            except (Lost, RpcError, EngineError, BodyTooLarge, OSError, TimeoutError) as fault:
                self._why = self._in_words(fault)
            except Exception as fault:
                self._why = "the engine failed"
                log_fault(self._log, "mcp.failed", fault)
            finally:
                self._wire = None
            if time.monotonic() - began > STABLE_S:
                pause_s = MIN_PAUSE_S
            self._log.warning(
                "mcp.server_lost", server=self.name, reason=self._why, retry_in_s=pause_s
            )
            await anyio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _in_words(self, fault: Exception) -> str:
        if isinstance(fault, TimeoutError):
            return "it did not answer in time"
        text = fault.message if isinstance(fault, EngineError) else str(fault)
        return one_line(self._redactor.line(text)[:500]) or type(fault).__name__

    async def _live(self) -> None:
        """Start the server or connect to it, and use it until it ends. This method never returns:
        it always raises `Lost` or another error.
        """
        if self._settings.url is not None:
            given = self._settings.headers.items()
            plain = {name: value for name, value in given if not SECRET_REFERENCE.search(value)}
            wire = HttpWire(self._settings.url, plain, self._upstreams, self._secret_headers)
            await self._greet(wire)
            while True:
                await anyio.sleep(POLL_S)
                await self._list(wire)
        program = LastingProgram(
            id=f"mcp:{self.name}",
            tool=self.name.replace("-", "_"),
            hosts=self._settings.network,
            redactor=self._redactor,
        )
        async with around_lasting(program, self._parts) as self._around:
            await self._run_program(await self._start(self._around))
        raise Lost("it was ended")

    async def _run_program(self, streams: Streams) -> None:
        """Exchange messages with the running program until it ends. Then raise Lost."""
        async with served(streams) as (stream_wire, reading):
            following = asyncio.ensure_future(self._follow_changes(stream_wire))
            try:
                await asyncio.wait({reading, following}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    await following  # it only ends with an error
            finally:
                following.cancel()
                await asyncio.wait({following})
                if not following.cancelled():
                    following.exception()
            why, said = reading.result(), streams.said.decode("utf-8", "replace").strip()[-300:]
            self._skip_probe = stream_wire.version is None and not self._skip_probe
            raise Lost(f"{why}; it said: {said}" if said else why)

    async def _start(self, around: Surroundings) -> Streams:
        env = {name: value.get_secret_value() for name, value in self._settings.env.items()}
        if self._settings.place == "host":
            return await HostProgram.start(self._settings.command, env)
        if not isinstance(self._container, OpensPrograms):
            raise Lost("this engine has no containers")
        given = self._settings
        (stream,) = around.streams or (None,)
        program = ContainerProgram(
            await self._container.open_program(
                given.command, {**around.environment, **env}, image=given.image,
                memory_mb=given.memory_mb, has_network=stream is not None,
            )
        )  # fmt: skip
        return program if stream is None else NetworkedProgram(program, stream)

    async def _follow_changes(self, wire: Wire) -> None:
        await self._greet(wire)
        listening = asyncio.ensure_future(self._listen(wire))
        try:
            while True:
                await wire.changed.wait()
                wire.changed.clear()
                began = time.monotonic()
                await self._list(wire)
                # The pause is needed because a server may report changes all the time.
                await anyio.sleep(max(CHANGE_PAUSE_S, 4 * (time.monotonic() - began)))
        finally:
            listening.cancel()

    async def _listen(self, wire: Wire) -> None:
        if wire.version == MODERN:
            # Not all servers can notify the engine of changes.
            with contextlib.suppress(RpcError, Lost, BodyTooLarge):
                await wire.ask(
                    "subscriptions/listen", {"notifications": {"toolsListChanged": True}}
                )

    async def _greet(self, wire: Wire) -> None:
        with anyio.fail_after(GREETING_S):
            await wire.negotiate(skip_probe=self._skip_probe)
        await self._list(wire)
        self._wire = wire
        self._log.info("mcp.server_ready", server=self.name, version=wire.version)

    async def _list(self, wire: Wire) -> None:
        """Request the list of the server's tools. If it has changed, check it and register the
        tools.
        """
        found: list[Any] = []
        params: JsonObject = {}
        size = 0
        with anyio.fail_after(LIST_S):
            for _ in range(MAX_PAGES):
                page = await wire.ask("tools/list", params)
                items = page.get("tools")
                found += items if isinstance(items, list) else []
                size += len(strict_json.dumps(items))
                if size > MAX_MESSAGE:
                    raise Lost(f"it lists tools of over {MAX_MESSAGE} bytes")
                cursor = page.get("nextCursor")
                if not isinstance(cursor, str) or len(found) >= MAX_TOOLS:
                    break
                params = {"cursor": cursor}
        if found == self._found:
            return
        listed = await anyio.to_thread.run_sync(self._read_tools, found[:MAX_TOOLS])
        self._found = found
        self._own_names = listed.own_names
        self._put(self.name, listed.tools, listed.faults)

    def _read_tools(self, found: list[Any]) -> Listed:
        """Check the definitions in a server's list, and convert them to tools.

        This runs in a thread, because the check of many schemas takes a while.
        """
        listed = Listed({}, [], {})
        began = time.thread_time()
        for each in found:
            if time.thread_time() - began > CHECK_S:
                listed.faults[""] = f"left out, and all after it: over {CHECK_S:g} s of checking"
                break
            own = each.get("name") if isinstance(each, dict) else None
            if not isinstance(own, str) or not own:
                listed.faults[""] = "left out: a tool without a name"
                continue
            name = engine_name(self.name, own)
            if name in listed.own_names:
                listed.faults[own[:80]] = f"left out: another of its tools is {name}, too"
                continue
            try:
                tool = self._tool(name, own, each, listed.faults)
            except InvalidDefinition as fault:
                listed.faults[name] = f"left out: {'; '.join(fault.faults)[:500]}"
                continue
            listed.own_names[name] = own
            listed.tools.append(tool)
        return listed

    def _tool(
        self, name: str, own: str, listed: JsonObject, noted: dict[str, str]
    ) -> RegisteredTool:
        """Convert one tool of the server's list. `name` is the engine's name of the tool, `own` the
        server's, and `listed` the server's definition.

        If the text of the tool tries to manipulate models, the tool counts as dangerous, and a
        fault is added to `noted`.

        Raises:
            InvalidDefinition: the definition is too large or invalid.
        """
        if len(strict_json.dumps(listed)) > MAX_DEFINITION_BYTES:
            raise InvalidDefinition(name, [f"definition: over {MAX_DEFINITION_BYTES} bytes"])
        from fumehood.registry.poison import poison  # its patterns take a while to compile

        text = str(listed.get("description") or listed.get("title") or f"The tool {own}.")
        document: JsonObject = {
            "name": name,
            "type": ToolType.MCP.value,
            "description": text[:10_000].encode("utf-8", "replace").decode(),
            "parameters": without_nils(listed.get("inputSchema") or {}),
            "endpoint": self._settings.url,
        }
        promised = listed.get("outputSchema")
        if isinstance(promised, dict) and promised.get("type") == "object":
            document["output_schema"] = without_nils(promised)
        findings = poison(document)
        document["dangerous"] = own not in self._settings.harmless or bool(findings)
        tool = replace(tool_of_document(document, SOURCE), service=self)
        parameters = without_wrong_defaults(tool.definition.parameters)
        if parameters is not tool.definition.parameters:
            sound = tool_of_document({**document, "parameters": parameters}, SOURCE)
            tool = replace(sound, service=self)
        if findings:
            rules = sorted({finding.rule for finding in findings})
            noted[name] = f"dangerous, because its definition attacks models: {', '.join(rules)}"
        if self._settings.place == "host" and self._settings.url is None:
            definition = tool.definition.model_copy(update={"sandboxed": False})
            return replace(tool, definition=definition)
        return tool

    async def _secret_headers(self) -> tuple[tuple[tuple[str, str], ...], SecretValues]:
        """Return two values: those headers that contain secrets, and the values of these secrets.

        Only secrets that are bound to the name of this server can be used.
        """
        headers = {
            name: value
            for name, value in self._settings.headers.items()
            if SECRET_REFERENCE.search(value)
        }
        asker = ToolDefinition(
            name=self.name.replace("-", "_"), type=ToolType.MCP, description="An MCP server.",
            endpoint=self._settings.url, headers=headers,
        )  # fmt: skip
        secrets = await self._upstreams.read_secrets(asker, self._redactor)
        filled = tuple(
            (name, SECRET_REFERENCE.sub(lambda found: secrets[found[1]], value))
            for name, value in headers.items()
        )
        return filled, SecretValues(secrets.values())


def engine_name(server: str, own: str) -> str:
    """Return the engine's name of a tool which the server `server` calls `own`.

    Each character that the engine does not allow in names is replaced by `_`.
    """
    name = f"{server}{SEPARATOR}{re.sub(r'[^A-Za-z0-9_-]', '_', own)}"
    return named_apart(name, own, MAX_NAME)
