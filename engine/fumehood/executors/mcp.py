"""MCP servers: keep those of the configuration alive, and run their tools.

Host side, one task for each server. A server that cannot be reached or that dies is started again
after a growing pause; meanwhile its last known tools stay registered, and their calls are refused
as retryable. Invariants: a server determines only the names, descriptions and schemas of its tools;
a tool whose definition tries to manipulate models is dangerous, whatever the configuration says; a
tool whose name belongs to another source is left out; a call ends within its time limit, and its
server is then notified; everything in a result is untrusted and bounded, and the engine never
requests a URL from it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread

from fumehood.core.errors import (
    EndedBy,
    EngineError,
    ExecutionError,
    NetworkError,
    OutputLimitExceeded,
    PermissionDenied,
    SandboxUnavailable,
    UpstreamTimeout,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.names import named_apart
from fumehood.core.returned_file import FILE_CONTENT
from fumehood.core.tool import SECRET_REFERENCE, ToolDefinition, ToolType
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.mcp_settings import SEPARATOR, McpServerSettings
from fumehood.executors.mcp_wire import (
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
from fumehood.executors.outcome import Outcome
from fumehood.executors.rest import MAX_BODY_SHOWN, concluded
from fumehood.executors.upstreams import BodyTooLarge, UpstreamRequest, Upstreams
from fumehood.gateway.door import Door, NetworkUse, Send
from fumehood.gateway.service import ENVIRONMENT
from fumehood.observe.log import Logger, log_fault
from fumehood.protocol import strict_json
from fumehood.protocol.cursors import Cursors
from fumehood.protocol.files import one_line
from fumehood.protocol.framing import whole_words
from fumehood.redaction.redactor import Redactor
from fumehood.redaction.secret_values import SecretValues
from fumehood.registry.definitions import (
    MAX_DEFINITION_BYTES,
    InvalidDefinition,
    is_credential_name,
)
from fumehood.registry.index import RegisteredTool, Source, ToolIndex, tool_of_document
from fumehood.registry.json_schema import without_nils, without_wrong_defaults
from fumehood.registry.registrations import Registrations
from fumehood.sandbox.wall import CallPort, Network, Wall

FRAME_BYTES = 64 * 1024
"""Bytes reserved for the parts of a message around its result."""

MAX_UNREAD = 5
"""Maximum number of parts of one result whose faults are described."""

_DATA_URL = re.compile(r"data:([^,;]*)[^,]*;base64,", re.IGNORECASE)
_ONE_BASE64 = str.maketrans("-_", "+/", " \t\r\n")

_HOST = Placement(
    "host", "host", "the executor 'mcp' asks a server that runs on the host, as the operator's "
    "configuration says (mcp_servers, place)",
)  # fmt: skip
_HTTP = Placement(
    "host", "host", "the executor 'mcp' asks a server over HTTP from the engine's own process, at "
    "public addresses and at the hosts that rest.allowed_hosts names",
)  # fmt: skip
_CONTAINER = Placement(
    "container", "host", "the executor 'mcp' asks a server that runs in a container of its own, "
    "with no network but by the gateway, to the hosts of mcp_servers.NAME.network",
)  # fmt: skip


class McpExecutor(Executor):
    """Runs tools of MCP servers."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        if tool.endpoint is not None:
            return _HTTP
        return _CONTAINER if tool.sandboxed else _HOST

    def sends(
        self,
        tool: RegisteredTool,
        arguments: JsonObject,
        upstreams: Upstreams,
        cursors: Cursors,
        principal_id: str,
    ) -> JsonObject | None:
        return server_of(tool, upstreams).shown(tool.definition.name)

    def run(self, run: ToolRun) -> Coroutine[Any, Any, Outcome]:
        return call_tool(run, server_of(run.tool, run.upstreams))


def server_of(tool: RegisteredTool, upstreams: Upstreams) -> McpServer:
    """Return the server of a tool. Raises SandboxUnavailable."""
    name, servers = tool.definition.name, upstreams.mcp
    # Only tools that this engine registered for an MCP server: the definition of any other
    # tool could declare itself harmless.
    server = None
    if servers is not None and tool.source is Source.MCP:
        server = servers.of_tool(name)
    if server is None:
        raise SandboxUnavailable(
            f"No MCP server of the configuration (mcp_servers) has the tool {name}. Do not retry.",
            retryable=False,
        )
    return server


async def call_tool(run: ToolRun, server: McpServer) -> Outcome:
    """Send one call to its server and turn the result into an outcome."""
    tool, started = run.tool.definition, time.monotonic()
    meta: JsonObject = {"traceparent": run.traceparent}
    request = Request("tools/call", meta, run.handle.report)
    request.max_bytes = run.limits.output_bytes + FRAME_BYTES
    outcome = Outcome(EndedBy.OK, "none")
    try:
        result = await _ask(server, tool.name, run.arguments, request, run.limits)
        data, unread = result_data(result, tool)
        # The message was already bounded. Here files count as base64, which is longer.
        most = 2 * run.limits.output_bytes if "files" in data else None
        outcome = replace(outcome, data=data, max_data_bytes=most, warnings=unread)
    except EngineError as error:
        outcome = concluded(outcome, error, request.attempt, tool)
    if (use := server.take_use()) is not None:
        warnings = (*outcome.warnings, *use.warnings())
        outcome = replace(outcome, network=use.report(), warnings=warnings)
    return replace(outcome, network_ms=(time.monotonic() - started) * 1e3)


async def _ask(
    server: McpServer, name: str, arguments: JsonObject, request: Request, limits: Limits
) -> JsonObject:
    """Return the server's result. Raises EngineError if there is none."""
    try:
        with anyio.fail_after(limits.wall_s):
            return await server.call(name, arguments, request)
    except TimeoutError:
        raise UpstreamTimeout(
            f"The MCP server did not answer in {limits.wall_s:g} s.",
            details={"ended_by": "wall_time", "limit": {"timeout_seconds": limits.wall_s}},
        ) from None
    except BodyTooLarge:
        raise OutputLimitExceeded(
            f"The answer of the MCP server is over {limits.output_bytes} bytes. Ask for less.",
            details={"ended_by": "output", "limit": {"output_bytes": limits.output_bytes}},
        ) from None
    except RpcError as error:
        shown = whole_words(str(error), MAX_BODY_SHOWN)
        raise ExecutionError(f"The MCP server refused the call: {shown}") from None


def result_data(result: JsonObject, tool: ToolDefinition) -> tuple[JsonObject, tuple[str, ...]]:
    """Return the tool's data, and a warning for each part of the result that is not understood.

    The data is the structured content if there is one, otherwise the texts as `text`. Files and
    links are added as `files` and `links` unless those names are taken. The tool has already run,
    so one malformed part does not lose the others.

    Raises:
        ExecutionError: the tool failed or asks for input, or nothing in the result is understood.
    """
    if (result.get("resultType") or "complete") != "complete":
        raise ExecutionError("The tool of the MCP server asks for more input. Do not retry.")
    content = result.get("content") or []
    found: dict[str, list[Any]] = {"text": [], "files": [], "links": []}
    unread: list[str] = []
    for number, block in enumerate(content if isinstance(content, list) else [content], 1):
        try:
            place, part = _part(block, number)
            found[place].append(part)
        except ValueError as why:
            unread.append(f"Part {number} of the MCP server's result was left out: {why}.")
    unread[MAX_UNREAD:] = [f"{len(unread)} parts were left out."] if unread[MAX_UNREAD:] else []
    text = "\n".join(found["text"])
    if result.get("isError") is True:
        shown = whole_words(text, MAX_BODY_SHOWN) or "no reason given"
        raise ExecutionError(f"The tool failed: {shown}")
    structured = result.get("structuredContent")
    if unread and structured is None and not any(found.values()):
        raise ExecutionError(
            f"The tool has run, but its result is not understood. {' '.join(unread)} Do not retry."
        )
    if tool.output_schema is not None and not isinstance(structured, dict):
        raise ExecutionError("The result lacks the structured content that the tool promises.")
    data: JsonObject = dict(structured) if isinstance(structured, dict) else {"text": text}
    if structured is not None and not isinstance(structured, dict):
        data["value"] = structured
    for name in ("files", "links"):
        if found[name]:
            data.setdefault(name, found[name])
    return data, tuple(unread)


def _part(block: Any, number: int) -> tuple[str, Any]:
    """Return the place for a part of a result in the data, and the part as it is there.

    Raises:
        ValueError: the part is not understood. The text tells why.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return "text", block["text"]
    if kind == "resource_link":
        return "links", _link(block)
    inner = block.get("resource") if kind == "resource" else block
    if kind in ("image", "audio", "resource") and isinstance(inner, dict):
        return "files", _file(inner, number, may_be_text=kind == "resource")
    if kind in ("text", "resource"):
        raise ValueError(f"its {kind} is missing")
    raise ValueError(f"its type {str(kind)[:40]!a} is not known")


def _file(block: JsonObject, number: int, *, may_be_text: bool) -> JsonObject:
    """Return an image, audio or embedded resource as a file. Raises ValueError.

    Its encoded data may be a `data:` URL, be broken into lines, use the alphabet for URLs, or lack
    its padding.
    """
    kind, content = block.get("mimeType"), None
    encoded = next((each for each in map(block.get, ("data", "blob")) if each is not None), None)
    if encoded is None and may_be_text and isinstance(block.get("text"), str):
        content = block["text"].encode("utf-8", "replace")
    elif isinstance(encoded, str):
        if (found := _DATA_URL.match(encoded)) is not None:
            kind, encoded = kind or found[1], encoded[found.end() :]
        plain = encoded.translate(_ONE_BASE64)
        with contextlib.suppress(ValueError):
            content = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    if content is None:
        raise ValueError("its data is missing, or is not base64")
    kind = kind[:200] if isinstance(kind, str) and kind.isprintable() else ""
    ending = kind.rpartition("/")[2].partition(";")[0]
    suffix = ending if ending.isalnum() and len(ending) <= 8 else "bin"
    return {
        "filename": f"result-{number}.{suffix}",
        "content_type": kind or "application/octet-stream",
        "size": len(content),
        FILE_CONTENT: base64.b64encode(content).decode(),
    }


def _link(block: JsonObject) -> JsonObject:
    """Return a link with the server's own texts. The engine never follows it."""
    keys = ("uri", "name", "mimeType", "description")
    return {key: block[key] for key in keys if isinstance(block.get(key), str)}


# -- the servers ----------------------------------------------------------------------------

GREETING_S = 12.0
"""Seconds that a server has to agree on a version of the protocol."""

LIST_S = 20.0
"""Seconds that a server has to list its tools, in all pages."""

CHECK_S = 10.0
"""Seconds of processor time to check the definitions of one list. A thousand ordinary ones take
less."""

POLL_S = 10.0
"""Seconds between two lists of an HTTP server, over which the engine receives no notifications."""

CHANGE_PAUSE_S = 1.0
"""Minimum seconds between two lists of a program that reports changes. The pause also lasts at
least four times as long as the list took."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
"""Shortest and longest pause in seconds before a server is started again."""

STABLE_S = 30.0
"""Seconds that a server must have run for the pause after it to be the shortest again."""

MAX_TOOLS = 1000
"""Maximum number of tools of one server; further ones are left out."""

MAX_PAGES = 50
"""Maximum number of pages of one list; further ones are not requested."""

FAULTS_LOGGED = 20
"""Maximum number of faults that are logged for one list."""

MAX_NAME = 64
"""Maximum length of a tool's name in characters."""


class McpServers:
    """All MCP servers of an engine. They live inside the asynchronous context `run`."""

    def __init__(
        self,
        settings: Mapping[str, McpServerSettings],
        registry: ToolIndex,
        registrations: Registrations,
        upstreams: Upstreams,
        redactor: Redactor,
        container: Wall,
        log: Logger,
    ) -> None:
        self._registry = registry
        self._registrations = registrations
        self._log = log
        self._tools: dict[str, list[RegisteredTool]] = {}
        self.servers = {
            name: McpServer(name, each, upstreams, redactor, container, self._put, log)
            for name, each in settings.items()
        }

    def of_tool(self, name: str) -> McpServer | None:
        """Return the server to which a tool's name belongs, or None if it is not configured."""
        return self.servers.get(name.partition(SEPARATOR)[0])

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Keep every server alive while the context is open."""
        async with anyio.create_task_group() as group:
            for server in self.servers.values():
                group.start_soon(server.follow)
            try:
                yield
            finally:
                group.cancel_scope.cancel()

    def _put(self, server: str, tools: list[RegisteredTool], faults: dict[str, str]) -> None:
        """Replace the registered tools of one server, and log their faults."""
        self._tools[server] = []
        for tool in tools:
            name = tool.definition.name
            owner = self._registry.owner(name, but=Source.MCP)
            if owner is None:
                self._tools[server].append(tool)
            else:
                faults[name] = f"left out: the name belongs to another source ({owner.value})"
        for name, why in list(faults.items())[:FAULTS_LOGGED]:
            self._log.warning("mcp.tool_fault", server=server, tool=name, fault=why)
        every = [tool for name in sorted(self._tools) for tool in self._tools[name]]
        self._registry.replace_source(Source.MCP, every)
        self._registrations.apply_switches()
        self._log.info("mcp.tools_listed", server=server, tools=len(self._tools[server]))


@dataclass(frozen=True, slots=True)
class Listed:
    """The checked tools of one server."""

    own_names: dict[str, str]
    """The engine's name of a tool → the name that the server uses."""
    tools: list[RegisteredTool]
    faults: dict[str, str]
    """Name of a tool → what is wrong with it. The name is empty for faults of unnamed tools and of
    the whole list."""


class McpServer:
    """One MCP server of the configuration."""

    def __init__(
        self,
        name: str,
        settings: McpServerSettings,
        upstreams: Upstreams,
        redactor: Redactor,
        container: Wall,
        put: Callable[[str, list[RegisteredTool], dict[str, str]], None],
        log: Logger,
    ) -> None:
        self.name = name
        self._settings = settings
        self._upstreams = upstreams
        self._redactor = redactor
        self._container = container
        self._put = put
        self._log = log
        self._wire: Wire | None = None
        self._door: Door | None = None
        self._use = NetworkUse()
        """What its earlier lives did since the last call's end."""
        self._own_names: dict[str, str] = {}
        self._found: list[Any] | None = None
        """The server's last list of tools, as it was received."""
        self._why = "it has not answered yet"
        self._skip_probe = False
        for key, value in settings.env.items():
            if is_credential_name(key):
                redactor.learn(value.get_secret_value())

    def shown(self, tool: str) -> JsonObject:
        """Return the server and its own name of a tool, as approvers see them.

        It includes the names of environment variables and secrets, never the values. Keys of a
        known form in the command, and the values of secret variables, are redacted.
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

    async def call(self, tool: str, arguments: JsonObject, request: Request) -> JsonObject:
        """Call one of its tools and return the result.

        Raises:
            SandboxUnavailable: the server is a program that does not run now, or lacks the tool.
            NetworkError: the same for a server with a URL; or the server ended during the call.
            RpcError, BodyTooLarge, EngineError: there is no result.
        """
        wire, own = self._wire, self._own_names.get(tool)
        if wire is None or own is None:
            # Not a NetworkError for a program: it would open the circuit, which would refuse calls
            # even after the program has been started again.
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

    def take_use(self) -> NetworkUse | None:
        """Return what it did over the network since the last call's end, if it has any. What it may
        do begins anew.
        """
        if not self._settings.network:
            return None
        if self._door is not None:
            return self._door.take_use()
        used, self._use = self._use, NetworkUse()
        return used

    async def follow(self) -> None:
        """Start the server, list its tools and follow their changes, forever."""
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
        """Run the server once, until it ends. Always raises: `Lost` or another fault."""
        if self._settings.url is not None:
            given = self._settings.headers.items()
            plain = {name: value for name, value in given if not SECRET_REFERENCE.search(value)}
            wire = HttpWire(self._settings.url, plain, self._upstreams, self._secret_headers)
            await self._greet(wire)
            while True:
                await anyio.sleep(POLL_S)
                await self._list(wire)
        async with self._network() as (network, variables):
            await self._run_program(await self._start(network, variables))
        raise Lost("it put the placeholder of a secret where it must not be, and was ended")

    async def _run_program(self, streams: Streams) -> None:
        """Serve a program until it ends. Raises Lost."""
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

    @asynccontextmanager
    async def _network(self) -> AsyncIterator[tuple[Network | None, Mapping[str, str]]]:
        """Give its program the network that it is configured to have, and the variables for it.

        A program that misuses a secret is ended, if the secret says so.
        """
        given, gateway = self._settings.network, self._upstreams.gateway
        if not given:
            yield None, {}
            return
        if not gateway.is_open:
            raise Lost("it needs a network, and gateway.hosts names no host")
        async with gateway.door(
            given, _refuse, self._redactor, tool=self.name.replace("-", "_"),
            call_id=f"mcp:{self.name}", principal_id=f"mcp:{self.name}", agent_id=None,
            session_id=None,
        ) as (door, network):  # fmt: skip
            self._door = door
            with anyio.CancelScope() as scope:
                door.use = replace(self._use, scope=scope)
                try:
                    yield network, {**ENVIRONMENT, **door.placeholders.environment}
                finally:
                    self._door, self._use = None, replace(door.use, ended_for=None)

    async def _start(self, network: Network | None, variables: Mapping[str, str]) -> Streams:
        env = {name: value.get_secret_value() for name, value in self._settings.env.items()}
        if self._settings.place == "host":
            return await HostProgram.start(self._settings.command, env)
        opened = getattr(self._container, "open_program", None)
        if opened is None:
            raise Lost("this engine has no containers")
        given = self._settings
        return await opened(  # type: ignore[no-any-return]
            given.command, {**variables, **env}, image=given.image, memory_mb=given.memory_mb,
            network=network,
        )  # fmt: skip

    async def _follow_changes(self, wire: Wire) -> None:
        await self._greet(wire)
        listening = asyncio.ensure_future(self._listen(wire))
        try:
            while True:
                await wire.changed.wait()
                wire.changed.clear()
                began = time.monotonic()
                await self._list(wire)
                # A server may report changes all the time.
                await anyio.sleep(max(CHANGE_PAUSE_S, 4 * (time.monotonic() - began)))
        finally:
            listening.cancel()

    async def _listen(self, wire: Wire) -> None:
        if wire.version == MODERN:
            # The server may not support notifications of changes.
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
        """Request the list of its tools, and register them if the list has changed."""
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
        """Check the definitions in a server's list and convert them to tools.

        Runs in a thread, because checking many schemas takes a while.
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
        """Convert one listed tool. If its text attacks models, add a fault to `noted`.

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
        tool = tool_of_document(document, Source.MCP)
        parameters = without_wrong_defaults(tool.definition.parameters)
        if parameters is not tool.definition.parameters:
            tool = tool_of_document({**document, "parameters": parameters}, Source.MCP)
        if findings:
            rules = sorted({finding.rule for finding in findings})
            noted[name] = f"dangerous, because its definition attacks models: {', '.join(rules)}"
        if self._settings.place == "host" and self._settings.url is None:
            definition = tool.definition.model_copy(update={"sandboxed": False})
            return replace(tool, definition=definition)
        return tool

    async def _secret_headers(self) -> tuple[tuple[tuple[str, str], ...], SecretValues]:
        """Return the headers that contain secrets, and the secrets' values.

        The secrets are those that are bound to the server's name.
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


async def _refuse(arguments: JsonObject, send: Send, port: CallPort) -> EngineError | None:
    return PermissionDenied(
        "A request of a server belongs to no call, so no human can be asked. A rule of the policy "
        "for net can allow it."
    )


def engine_name(server: str, own: str) -> str:
    """Return the engine's name of a server's tool.

    Characters that are not allowed in names are replaced by `_`.
    """
    name = f"{server}{SEPARATOR}{re.sub(r'[^A-Za-z0-9_-]', '_', own)}"
    return named_apart(name, own, MAX_NAME)
