"""The MCP server: answers the messages of clients, with or without a protocol handshake.

Host side, in the daemon, behind `endpoint.py`. To the engine, the server is a caller like any
other: each call goes through `Engine.run`. The server stores no MCP sessions. The id of an MCP
session only encodes what the client sent in `initialize`, and grants no rights. Invariants:

* A message of one principal never ends or answers a request of another principal.
* A `requestState` never runs a call. It only names a call, which is looked up among the principal's
  own calls.
* If the client's user answers a question with "accept", the server only looks for the approver's
  decision. This answer is never an approval.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio

from fumehood.approvals.model import Approval, ApprovalState
from fumehood.core.call import MAX_TOOL_CHARACTERS, CallBody
from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    CallInProgress,
    EngineError,
    HostError,
    RequiresHumanApproval,
    ResourceNotFound,
    ShuttingDown,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.core.nulls import without_nulls
from fumehood.core.pages import MAX_PAGE
from fumehood.core.returned_file import FILE_CONTENT, parse_blob_url, without_contents
from fumehood.core.tool import ToolDefinition
from fumehood.engine import Engine, parse_call_body
from fumehood.executors.base import CallHandle
from fumehood.mcp.server.messages import (
    ENVELOPE_KEY,
    FIRST_WITH_OUTPUT,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LIST_TOOLS,
    METHOD_NOT_FOUND,
    MODERN,
    OWN_TOOLS,
    RUN_TOOL,
    SUBSCRIPTION_KEY,
    TOOLS_CHANGED,
    UNCACHED,
    RpcError,
    discovered,
    encode_call,
    encode_result,
    initialized,
    is_id,
    meta_of,
    stamped,
)
from fumehood.mcp.server.tool_form import tool_to_mcp
from fumehood.observe.trace_context import HEADER, incoming
from fumehood.protocol import strict_json

MODEL_TEXT_CHARACTERS = 2000
"""Maximum number of characters of one text in a result. A longer text is shortened for the
model.
"""

LOOK_S = 3.0
"""Maximum seconds to wait for the approver's decision, after the client's user has answered
"accept".
"""

ANSWER_S = 600.0
"""Maximum seconds to wait for the answer of the client's user to a question."""

CHANGES_S = 0.5
"""Seconds between two checks whether the list of tools has changed for a client that subscribed to
changes.
"""

MAX_LISTS = 16
"""Maximum number of cached lists of tools. Each combination of agent, session and protocol version
has a list of its own. If the cache is full, all lists are dropped.
"""

RESOURCE_MISSING = -32002
"""The error code for a resource that does not exist, in protocol versions with a handshake. Later
versions use INVALID_PARAMS.
"""

LINK_PREFIX = "fumehood://"
"""The prefix that turns the path in a blob's URL into the URI of a resource."""

FILE_LISTS = ("images", "files")
"""The fields of a result's data that contain lists of files."""

QUESTION = "approval"
"""The key of the server's only question, in `inputRequests` and in `inputResponses`."""

LOOK = "look"
"""The name of the only field in the form of this question."""

STARTED = "started"
"""The message in the first progress report of each call."""

NO_STATE = "This requestState is not of this call. Send the call again without it."


@dataclass(frozen=True, slots=True)
class Client:
    """The client that sent a message: its principal, its protocol version, and the options for its
    calls.
    """

    principal: Principal
    version: str
    elicits: bool
    """Whether the client can ask its user a question, which MCP calls elicitation."""
    session: str = ""
    """The id of the client's MCP session, or "" if the client has none."""
    agent_id: str | None = None
    session_id: str | None = None
    """The id of the engine's session in which the client's calls run, or None."""
    wait_s: float | None = None
    """Seconds for which the client's calls wait for approval, or None if they do not wait."""

    @property
    def is_modern(self) -> bool:
        return self.version == MODERN


class Exchange(Protocol):
    """The channel to a client while the server answers one of its requests.

    Messages that are sent through this channel arrive before the response.
    """

    on_cancel: Callable[[], bool] | None
    """Cancels the call that the request runs, and returns True. Returns False if no call is
    running.
    """
    on_sent: Callable[[], None] | None
    """The server calls this after it has sent the response, if the client is still connected."""

    async def send(self, message: bytes) -> None:
        """Send a notification or a request to the client."""

    def cancel(self) -> None:
        """Cancel the call that the request runs. If no call is running, cancel the request."""


class McpServer:
    """Answers the MCP messages of all clients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lists: dict[tuple[Any, ...], tuple[Any, bytes]] = {}
        self._running: dict[tuple[str, str, str | int], Exchange] = {}
        self._asked: dict[str, tuple[str, asyncio.Future[JsonObject]]] = {}
        self._methods: dict[str, Callable[..., Coroutine[Any, Any, JsonObject | bytes]]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "server/discover": self._discover,
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "resources/list": partial(self._list_none, "resources"),
            "resources/templates/list": partial(self._list_none, "resourceTemplates"),
            "resources/read": self._read_resource,
            "subscriptions/listen": self._listen,
        }

    async def answer(self, request: JsonObject, client: Client, exchange: Exchange) -> bytes:
        """Return the encoded response to one request of `client`. Raises RpcError if the request
        fails.
        """
        request_id = request["id"]
        key = (client.principal.id, client.session, request_id)
        if client.session:
            if key in self._running:
                raise RpcError(INVALID_REQUEST, "A request with this id is not answered yet.")
            self._running[key] = exchange
        try:
            result = await self._result(request, client, exchange)
        except EngineError as error:
            code = INTERNAL_ERROR if isinstance(error, HostError) else INVALID_PARAMS
            raise RpcError(code, f"{error.code}: {error.message}") from None
        finally:
            if client.session:
                del self._running[key]
        if isinstance(result, dict):
            result = strict_json.dumps(stamped(result) if client.is_modern else result)
        return encode_result(request_id, result)

    def take(self, message: JsonObject, client: Client) -> None:
        """Process a message that needs no response: a notification that cancels a request, or the
        client's response to a question for its user. Other notifications and responses are ignored.
        """
        if message.get("method") == "notifications/cancelled":
            request_id = message.get("params", {}).get("requestId")
            if is_id(request_id) and client.session:
                running = self._running.get((client.principal.id, client.session, request_id))
                if running is not None:
                    running.cancel()
        elif "method" not in message:
            asked, answered = self._asked.get(str(message["id"]), ("", None))
            if answered is not None and asked == client.principal.id and not answered.done():
                result = message.get("result")
                answered.set_result(result if isinstance(result, dict) else {})

    async def follow_changes(self, client: Client, exchange: Exchange) -> None:
        """Notify a client each time the list of its tools changes. Return when the engine stops, or
        when the client's token has ended.

        This is only for protocol versions with a handshake.
        """
        await self._tell_changes(client, exchange, None)

    async def _result(
        self, request: JsonObject, client: Client, exchange: Exchange
    ) -> JsonObject | bytes:
        method, params = request["method"], request.get("params", {})
        answer = self._methods.get(method)
        removed = ("initialize", "ping") if client.is_modern else ("subscriptions/listen",)
        if answer is None or method in removed:
            raise RpcError(METHOD_NOT_FOUND, f"There is no method {method[:80]!r}.")
        if method == "subscriptions/listen":
            return await self._listen(params, client, exchange, request["id"])
        return await answer(params, client, exchange)

    # -- about the server ----------------------------------------------------------------

    async def _initialize(self, params: JsonObject, client: Client, _: Exchange) -> JsonObject:
        return initialized(client.version)

    async def _ping(self, params: JsonObject, client: Client, _: Exchange) -> JsonObject:
        return {}

    async def _discover(self, params: JsonObject, client: Client, _: Exchange) -> JsonObject:
        return discovered()

    # -- tools ---------------------------------------------------------------------------

    async def _list_tools(self, params: JsonObject, client: Client, _: Exchange) -> bytes:
        if params.get("cursor") is not None:
            raise RpcError(INVALID_PARAMS, "The list has one page, and no cursor.")
        principal, agent_id = client.principal, client.agent_id
        state = self._engine.tools_state(principal, agent_id)
        with_output = client.version >= FIRST_WITH_OUTPUT
        is_in_session = client.session_id is not None
        key = (agent_id, is_in_session, client.is_modern, with_output, principal.has_authenticated)
        kept = self._lists.get(key)
        if kept is None or kept[0] != state:
            tools = [
                tool_to_mcp(tool, with_output=with_output, in_session=is_in_session)
                for tool in self._tools(client)
            ]
            listed: JsonObject = {"tools": [*tools, *OWN_TOOLS]}
            if client.is_modern:
                listed = stamped({**listed, **UNCACHED})
            if len(self._lists) == MAX_LISTS:
                self._lists.clear()
            self._lists[key] = kept = (state, strict_json.dumps(listed))
        return kept[1]

    def _tools(self, client: Client) -> list[ToolDefinition]:
        """Return the tools that this client can call. Tools that work on a session's files are
        included only if the client has a session.
        """
        return [
            tool.for_models()
            for tool in self._engine.callable_tools(client.principal, client.agent_id)
            if tool.name not in (LIST_TOOLS, RUN_TOOL)
            and (
                client.session_id is not None
                or not tool.executor.startswith(("workspace", "process"))
            )
        ]

    async def _call_tool(
        self, params: JsonObject, client: Client, exchange: Exchange
    ) -> JsonObject:
        name, arguments = _named(params)
        if name == LIST_TOOLS:
            return self._find_tools(client, arguments)
        if name == RUN_TOOL:
            name, arguments = _named(arguments)
        if client.is_modern and "requestState" in params:
            return await self._look_for(params, name, arguments, client, exchange)
        with incoming(meta_of({"params": params}).get(HEADER)):
            envelope = await self._run(params, name, arguments, client, exchange)
        if _is_underway(envelope):
            # An MCP client cannot fetch the answer later.
            envelope = await self._look(envelope, client, exchange)
        if not client.elicits or _waiting_call(envelope) is None:
            return result_of(envelope)
        question = _question(name, envelope)
        if client.is_modern:
            return {
                "resultType": "input_required",
                "inputRequests": {QUESTION: {"method": "elicitation/create", "params": question}},
                "requestState": f"{envelope.metadata.call_id}.{_digest(name, arguments, client)}",
            }
        answered = await self._ask(question, client, exchange)
        if _is_accepted(answered):
            envelope = await self._look(envelope, client, exchange)
        return result_of(envelope)

    def _find_tools(self, client: Client, arguments: JsonObject) -> JsonObject:
        words = str(arguments.get("query") or "").lower().split()
        found = [
            tool
            for tool in self._tools(client)
            if all(word in f"{tool.name} {tool.description}".lower() for word in words)
        ]
        is_in_session = client.session_id is not None
        shown = [
            tool_to_mcp(tool, with_output=False, in_session=is_in_session)
            for tool in found[:MAX_PAGE]
        ]
        return plain_result({"tools": shown, "total_count": len(found)})

    async def _run(
        self, params: JsonObject, name: str, arguments: JsonObject, client: Client,
        exchange: Exchange,
    ) -> Envelope:  # fmt: skip
        """Run the call in a request, and return its envelope. `params` are the parameters of the
        request.

        If the request is cancelled, the call is cancelled too.
        """
        engine = self._engine
        try:
            body = self._body(name, arguments, client)
        except EngineError as error:
            return engine.refusal(error, tool=name)
        token = meta_of({"params": params}).get("progressToken")
        try:
            progress = _Progress(exchange, token) if is_id(token) else None
            handle = CallHandle() if progress is None else progress.handle
            handle.is_delivered_later = True
            exchange.on_cancel = handle.cancel
            exchange.on_sent = lambda: engine.delivered(handle)
            if progress is None:
                return await engine.run(name, body, client.principal, handle)
            async with progress.sending():
                return await engine.run(name, body, client.principal, handle)
        except asyncio.CancelledError:
            if not engine.is_draining:
                raise
            stopped = ShuttingDown("The engine stopped before the call ended.", retryable=False)
            return engine.refusal(stopped, tool=name)
        finally:
            exchange.on_cancel = None

    def _body(self, name: str, arguments: JsonObject, client: Client) -> CallBody:
        if None in arguments.values():
            try:
                parameters = self._engine.tool(name).tool.parameters
            except ToolNotFound:
                parameters = {}
            arguments = without_nulls(arguments, parameters)
        options = {
            "agent_id": client.agent_id,
            "session_id": client.session_id,
            "wait_for_approval": client.wait_s,
            "max_length": MODEL_TEXT_CHARACTERS,
        }
        return parse_call_body({"arguments": arguments, "options": options})

    # -- approvals -----------------------------------------------------------------------

    async def _ask(self, question: JsonObject, client: Client, exchange: Exchange) -> JsonObject:
        """Send a question for the client's user through the channel of the request.

        Return the user's answer, or an empty object if no answer arrives in time.
        """
        asked_id = f"fumehood-{secrets.token_hex(16)}"
        answered: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._asked[asked_id] = (client.principal.id, answered)
        try:
            await exchange.send(encode_call("elicitation/create", question, id=asked_id))
            async with asyncio.timeout(ANSWER_S):
                return await answered
        except TimeoutError:
            return {}
        finally:
            del self._asked[asked_id]

    async def _look_for(
        self, params: JsonObject, name: str, arguments: JsonObject, client: Client,
        exchange: Exchange,
    ) -> JsonObject:  # fmt: skip
        """Answer a repeated request whose call needed approval. Return the call's result, or a
        result that says that the call still waits for approval. The call is not run again.

        `params` are the parameters of the repeated request, `name` and `arguments` those of the
        tool. The field `requestState` in `params` names the call. The client received this field
        with the answer to its first request.

        If the client's user has agreed, first wait for the approver's decision and for the end of
        the call (see `_look`).

        Raises:
            RpcError: `requestState` names no call of this client with this tool and these
                arguments.
        """
        call_id, _, digest = str(params["requestState"]).partition(".")
        if digest != _digest(name, arguments, client):
            raise RpcError(INVALID_PARAMS, NO_STATE)
        approval = await self._engine.approvals.of_call(call_id, client.principal)
        if approval is None or not _is_of(approval, name, client):
            raise RpcError(INVALID_PARAMS, NO_STATE)
        responses = params.get("inputResponses")
        answered = responses.get(QUESTION) if isinstance(responses, dict) else None
        is_accepted = _is_accepted(answered)
        waiting = RequiresHumanApproval(
            "The call still waits for a human's approval. It runs once it is approved.",
            extra={"approval_id": approval.id},
        )
        refusal = self._engine.refusal(waiting, tool=name)
        metadata = refusal.metadata.model_copy(update={"call_id": call_id})
        envelope = refusal.model_copy(update={"metadata": metadata})
        return result_of(await self._look(envelope, client, exchange) if is_accepted else envelope)

    async def _look(self, waiting: Envelope, client: Client, exchange: Exchange) -> Envelope:
        """Wait for an approver's decision on a call, at most `LOOK_S` seconds. If the call is or
        was approved, also wait until it ends.

        `waiting` is the envelope of the call so far: it waits for approval, or runs after an
        approval. Return the envelope of the call's final answer. If no approver decides in time, or
        the engine stops, return `waiting`.
        """
        approvals, call_id = self._engine.approvals, waiting.metadata.call_id or ""
        deadline = anyio.current_time() + LOOK_S
        seen = -1
        while not self._engine.is_draining:
            seen = await approvals.next_change(seen, within_s=CHANGES_S)
            answer = await approvals.answer_of(call_id, client.principal)
            if answer is not None:
                exchange.on_sent = lambda: approvals.fetched(call_id)
                return answer
            approval = await approvals.of_call(call_id, client.principal)
            runs = approval is not None and approval.state in _DECIDED
            if not runs and anyio.current_time() >= deadline:
                break
        return waiting

    # -- resources -----------------------------------------------------------------------

    async def _list_none(
        self, kind: str, _: JsonObject, client: Client, __: Exchange
    ) -> JsonObject:
        return {kind: [], **(UNCACHED if client.is_modern else {})}

    async def _read_resource(self, params: JsonObject, client: Client, _: Exchange) -> JsonObject:
        uri = params.get("uri")
        missing = INVALID_PARAMS if client.is_modern else RESOURCE_MISSING
        try:
            link = parse_blob_url(str(uri).removeprefix(LINK_PREFIX))
            blob, file = await self._engine.blobs.open_blob(
                link.blob_id, client.principal.id, link.expires, link.signature
            )
        except (ValueError, ResourceNotFound) as error:
            raise RpcError(missing, str(error)) from None
        with file:
            if blob.size > MAX_BODY_BYTES:
                words = f"The resource is over {MAX_BODY_BYTES >> 20} MB. Fetch it over HTTP: "
                raise RpcError(INVALID_PARAMS, words + blob.url)
            content = await self._engine.blobs.read(file)
        read: JsonObject = {"uri": uri, "mimeType": blob.content_type}
        try:
            is_text = blob.content_type.startswith(("text/", "application/json"))
            read |= {"text": content.decode()} if is_text else {"blob": _base64(content)}
        except UnicodeDecodeError:
            read["blob"] = _base64(content)
        return {"contents": [read], **(UNCACHED if client.is_modern else {})}

    # -- notifications of changes ----------------------------------------------------------

    async def _listen(
        self, params: JsonObject, client: Client, exchange: Exchange, request_id: str | int = ""
    ) -> JsonObject:
        wanted = params.get("notifications")
        follows = isinstance(wanted, dict) and wanted.get("toolsListChanged") is True
        meta = {SUBSCRIPTION_KEY: request_id}
        honored = {"toolsListChanged": True} if follows else {}
        said = {"notifications": honored, "_meta": meta}
        await exchange.send(encode_call("notifications/subscriptions/acknowledged", said))
        await self._tell_changes(client, exchange, {"_meta": meta}, is_followed=follows)
        return {"_meta": meta}

    async def _tell_changes(
        self, client: Client, exchange: Exchange, params: JsonObject | None, *,
        is_followed: bool = True,
    ) -> None:  # fmt: skip
        known = self._state(client)
        tokens, token_id = self._engine.tokens, client.principal.token_id
        while not self._engine.is_draining:
            await anyio.sleep(CHANGES_S)
            if token_id and tokens.principal_of_id(token_id, self._engine.now()) is None:
                return  # the client's token has expired or was revoked
            now = self._state(client)
            if now != known and is_followed:
                await exchange.send(encode_call(TOOLS_CHANGED, params))
            known = now

    def _state(self, client: Client) -> Any:
        try:
            return self._engine.tools_state(client.principal, client.agent_id)
        except EngineError:
            return None  # the agent was removed, which also counts as a change


_DECIDED = frozenset({ApprovalState.APPROVED, ApprovalState.STARTED})
"""The states of an approval whose call is running or about to run."""


def _named(params: JsonObject) -> tuple[str, JsonObject]:
    """Return the name of the tool and the arguments, from the parameters of a call.

    Raises:
        RpcError: the name or the arguments are invalid.
    """
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TOOL_CHARACTERS:
        raise RpcError(INVALID_PARAMS, "`name` must be the name of a tool.")
    if arguments is not None and not isinstance(arguments, dict):
        raise RpcError(INVALID_PARAMS, "`arguments` must be an object.")
    return name, arguments or {}


class _Progress:
    """Sends the progress of one call to the client. Only increasing values are sent.

    The call itself never waits for the client. `CallHandle` limits how many reports wait to be
    sent.
    """

    def __init__(self, exchange: Exchange, token: str | int) -> None:
        self.handle = CallHandle(begun=lambda: self._add(0, STARTED), progress=self._add)
        self._exchange = exchange
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._reports: asyncio.Queue[tuple[float, str] | None] = asyncio.Queue()

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send the reports of the call as they arrive. When the `async with` block ends, send the
        reports that were not sent yet.
        """
        task = asyncio.create_task(self._send_all())
        try:
            yield
        finally:
            self._put(None)
            await task

    def _add(self, percent: float, message: str) -> None:
        self._put((percent, message))

    def _put(self, report: tuple[float, str] | None) -> None:
        """Add a report to the queue. None marks the end of the reports. Any thread may call this
        method.
        """
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._reports.put_nowait, report)

    async def _send_all(self) -> None:
        last = -1.0
        while (report := await self._reports.get()) is not None:
            percent, message = report
            if percent > last:
                last = percent
                told = {"progressToken": self._token, "progress": percent, "total": 100}
                await self._exchange.send(
                    encode_call("notifications/progress", {**told, "message": message})
                )


def _waiting_call(envelope: Envelope) -> str | None:
    """Return the id of the approval for which a call waits, or None if it does not wait. `envelope`
    is the answer so far.
    """
    error = envelope.error
    if error is None or error.code != RequiresHumanApproval.code:
        return None
    return error.approval_id if envelope.metadata.call_id is not None else None


def _is_underway(envelope: Envelope) -> bool:
    """Return whether a call was approved and is still running. `envelope` is the answer so far."""
    error = envelope.error
    return error is not None and error.code == CallInProgress.code and error.approval_id is not None


def _question(name: str, envelope: Envelope) -> JsonObject:
    """Return a question for the client's user: should the server look for the approver's decision
    now? The user's answer is never a decision on the call.

    `name` is the name of the tool. `envelope` is the answer so far, which says that the call waits
    for approval.
    """
    message = (
        f"The call of {name} waits for approval {_waiting_call(envelope)}. An approver decides on "
        "it, not this dialogue. Accept to look for the decision now."
    )
    # Some clients cannot show a form without fields. All of them can show a field for a boolean.
    field = {
        "type": "boolean",
        "title": "Look for the decision now",
        "description": "This answer approves and denies nothing.",
        "default": True,
    }
    schema = {"type": "object", "properties": {LOOK: field}}
    return {"mode": "form", "message": message, "requestedSchema": schema}


def _is_accepted(answer: Any) -> bool:
    """Return whether the client's user has answered "accept", so that the server looks for the
    approver's decision.
    """
    if not isinstance(answer, dict) or answer.get("action") != "accept":
        return False
    content = answer.get("content")
    return not isinstance(content, dict) or content.get(LOOK) is not False


def _digest(name: str, arguments: JsonObject, client: Client) -> str:
    """Return a digest of the tool, the arguments, the agent and the session of a call.

    A `requestState` contains this digest, so that it cannot be used for another call.
    """
    bound = [name, arguments, client.agent_id, client.session_id]
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


def _is_of(approval: Approval, name: str, client: Client) -> bool:
    """Return whether an approval belongs to a call of this tool by the client's agent in the
    client's session.
    """
    found = (approval.tool, approval.agent_id, approval.session_id)
    return found == (name.partition("@")[0], client.agent_id, client.session_id)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


# -- results: JSON without the bytes of files for the model, and the data for programs -------


def result_of(envelope: Envelope) -> JsonObject:
    """Return an envelope as the result of a `tools/call`."""
    document = envelope.model_dump(mode="json")
    data = document.pop("data")
    error = document["error"]
    shown = data if error is None else error.get("details") or {}
    text = _readable(data) if error is None else _failure(error, shown, document["metadata"])
    result: JsonObject = {
        "content": [{"type": "text", "text": text}, *_figures(shown), *_links(shown)],
        "isError": error is not None,
        "_meta": {ENVELOPE_KEY: document},
    }
    if error is None:
        result["structuredContent"] = data
    return result


def plain_result(data: JsonObject) -> JsonObject:
    """Return the result for a call of a tool that the MCP server itself provides. `data` is the
    output of this tool.
    """
    text = {"type": "text", "text": _readable(data)}
    return {"content": [text], "structuredContent": data, "isError": False}


def _readable(data: JsonObject) -> str:
    lists = {key: without_contents(data[key]) for key in FILE_LISTS if data.get(key)}
    return json.dumps({**data, **lists}, ensure_ascii=False)


def _failure(error: JsonObject, details: JsonObject, metadata: JsonObject) -> str:
    """Return an error as text for the model: its code and message, the ids of approval and call,
    and the traceback and output of the program.
    """
    parts = [f"{error['code']}: {error['message']}"]
    if error.get("approval_id") is not None:
        parts.append(f"Approval: {error['approval_id']}. Call: {metadata['call_id']}.")
    exception, stderr = details.get("exception"), details.get("stderr")
    words = {"stderr": stderr, "stdout": details.get("stdout")}
    traceback = exception.get("traceback") if isinstance(exception, dict) else None
    if isinstance(traceback, str) and traceback.strip() not in str(stderr):  # as Python's is
        words = {"traceback": traceback, **words}
    parts += [f"{name}:\n{said}" for name, said in words.items() if said and isinstance(said, str)]
    return "\n".join(parts)


def _figures(shown: JsonObject) -> Iterator[JsonObject]:
    for item in _items(shown, "images"):
        content, kind = item.get(FILE_CONTENT), item.get("content_type")
        if isinstance(content, str) and isinstance(kind, str) and kind.startswith("image/"):
            yield {"type": "image", "data": content, "mimeType": kind}


def _links(shown: JsonObject) -> Iterator[JsonObject]:
    """Yield a resource link for each blob that `shown` mentions. `shown` is the data of a call that
    succeeded, or the error's details of a call that failed.
    """
    for name in FILE_LISTS:
        for item in _items(shown, name):
            yield from _link(item.get("url"), item.get("filename"), item.get("content_type"))
    notes = shown.get("truncation_info")
    for field in _items(notes, "fields") if isinstance(notes, dict) else ():
        yield from _link(field.get("resource_url"), field.get("field"), "text/plain")


def _link(url: Any, name: Any, media_type: Any) -> Iterator[JsonObject]:
    if isinstance(url, str) and isinstance(name, str):
        uri = LINK_PREFIX + url
        yield {"type": "resource_link", "uri": uri, "name": name, "mimeType": str(media_type)}


def _items(holder: JsonObject, name: str) -> Iterator[JsonObject]:
    listed = holder.get(name)
    return (
        (item for item in listed if isinstance(item, dict))
        if isinstance(listed, list)
        else iter(())
    )
