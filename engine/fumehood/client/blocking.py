"""`Client` and `ControlClient`: the requests as methods that wait for their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

from fumehood.client import authority, callers
from fumehood.client.blocking_sessions import SessionMethods
from fumehood.client.saving import new_file
from fumehood.client.transport import (
    ANSWER_GRACE_S,
    CONNECT_TIMEOUT_S,
    BlockingTransport,
    Place,
    Write,
)
from fumehood.model.agent import Agent, Binding
from fumehood.model.answers import AgentDetails, AgentTools, ToolDetails, ToolList, ToolWithSource
from fumehood.model.authority import ApproverInfo, Change, MadeApprover, MadeToken, TokenInfo
from fumehood.model.call_log import CallPage, CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.events import Event
from fumehood.model.identity import Scope
from fumehood.model.json_types import JsonObject
from fumehood.model.status import Health, Readiness
from fumehood.model.tool import ToolDefinition


class _AnyClient:
    """What both sockets answer."""

    def __init__(
        self,
        socket_path: Path | str,
        *,
        credential: str | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """Nothing is sent yet.

        `credential` is a token, or on the control socket an approver's credential. An answer
        is waited for as long as the engine may work on it and `grace_s` on top.

        Raises:
            ValueError: a credential that can be none, or a time that is none.
        """
        place = Place(Path(socket_path), credential, connect_timeout_s, grace_s)
        self._transport = BlockingTransport(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; the client cannot be used again."""
        self._transport.close()

    def health(self) -> Health:
        """The process answers."""
        return self._transport.send(callers.health())

    def ready(self) -> Readiness:
        """Whether calls are served, and what each wall enforces."""
        return self._transport.send(callers.ready())

    def openapi(self) -> JsonObject:
        """The OpenAPI document of this socket."""
        return self._transport.send(callers.openapi())

    def request(self, method: str, path: str, body: JsonObject | None = None) -> Envelope:
        """Any address that answers with an envelope.

        Raises:
            ValueError: the body is not JSON, so nothing was sent.
        """
        return self._transport.send(callers.request(method, path, body))


class Client(SessionMethods, _AnyClient):
    """A client of the callers' socket. A context manager; threads may share it.

    It connects when it is first asked, and again after the daemon was started anew.

    Raises:
        DaemonUnavailable: from every method, where nobody answers or not in time.
    """

    def call(self, tool: str, arguments: JsonObject | None = None, **options: Any) -> Envelope:
        """Call a tool (`name` or `name@version`); the answer is always an envelope.

        `options` are those of `CallOptions`. Once its bytes are on their way a call is never
        sent a second time by itself: `DaemonUnavailable.may_have_acted` says that it may have
        run.

        Raises:
            ValueError: the arguments or options are not JSON, or the name can be none, so
                nothing was sent.
        """
        return self._transport.send(callers.call(tool, arguments, options))

    def stream(
        self, tool: str, arguments: JsonObject | None = None, **options: Any
    ) -> Iterator[Event]:
        """Call a tool as `call` does; yields its events as they come, its answer as the last.

        A refusal is an `ErrorEvent`, too. Closing the iterator closes the connection, which
        leaves the call to itself; with `cancel_on_disconnect` it ends it.

        Raises:
            ValueError: as `call`.
            DaemonUnavailable: also where the events end before the answer.
        """
        yield from self._transport.follow(callers.stream(tool, arguments, options))

    def cancel(self, call_id: str) -> None:
        """End a running call of one's own; returns when its program is gone.

        Raises:
            Refused: no such call, or it is over.
        """
        self._transport.send(callers.cancel(call_id))

    def tools(self, **filters: str) -> list[ToolDefinition]:
        """The preferred version of every tool, or of those of a `category`, `tag` or `type`.

        Raises:
            Refused: the engine knows no such caller, or no such filter.
        """
        return [tool for tool, _ in self.tools_and_sources(**filters)]

    def tools_and_sources(self, **filters: str) -> list[tuple[ToolDefinition, str]]:
        """The same, each with where it comes from. Raises Refused as `tools`."""
        return self._transport.send_all(callers.all_tools(**filters))

    def tools_page(self, **query: Any) -> ToolList:
        """One page: `limit`, `cursor`, `category`, `tag`, `type` as in the HTTP reference.

        Raises:
            Refused: the query is wrong, or its cursor is of another list.
        """
        return self._transport.send(callers.tools_page(**query))

    def agent_tools(
        self,
        agent_id: str,
        *,
        categories: Iterable[str] | None = None,
        exclude_dangerous: bool = True,
        max_cost: Decimal | None = None,
        at_most: int | None = None,
    ) -> AgentTools:
        """An agent's tools in its order, as it sees them, and why others were left out.

        Raises:
            Refused: no such agent, or not this caller's to speak for.
        """
        ask = callers.agent_tools(
            agent_id,
            categories=categories,
            exclude_dangerous=exclude_dangerous,
            max_cost=max_cost,
            at_most=at_most,
        )
        return self._transport.send(ask)

    def calls(self, **query: Any) -> CallPage:
        """A page of this caller's own calls, newest first.

        `query` is that of `CallQuery`: since, until, agent, tool, code, limit, cursor.

        Raises:
            Refused: the query is wrong, or its cursor is too old.
        """
        return self._transport.send(callers.calls(**query))

    def call_record(self, call_id: str) -> CallRecord:
        """One call of this caller's own.

        Raises:
            Refused: no such call, somebody else's, or no longer kept.
        """
        return self._transport.send(callers.call_record(call_id))

    def tool(self, reference: str) -> ToolDetails:
        """One tool by `name` or `name@version`, with its other versions.

        Raises:
            Refused: TOOL_NOT_FOUND, or the engine knows no such caller.
        """
        return self._transport.send(callers.tool(reference))

    def blob(self, url: str) -> bytes:
        """The whole of a blob, by the `url` or `resource_url` of an answer.

        Raises:
            ValueError: this is no address of a blob, so nothing was sent.
            Refused: no such blob of this caller's, or it has expired.
        """
        content = bytearray()
        self._transport.download(callers.blob(url), content.extend)
        return bytes(content)

    def save_blob(self, url: str, path: Path | str) -> None:
        """A blob into a new file, piece by piece; nothing is left where it fails.

        Raises:
            FileExistsError: there is such a file already.
            ValueError, Refused: as `blob`.
        """
        ask = callers.blob(url)
        with new_file(Path(path)) as write:
            self._transport.download(ask, write)

    def download_blob(self, url: str, write: Write) -> None:
        """A blob to `write`, piece by piece, in order. Raises as `blob`, and what `write` does."""
        self._transport.download(callers.blob(url), write)


class ControlClient(_AnyClient):
    """A client of the control socket: agents, tools, tokens, approvers.

    Raises:
        DaemonUnavailable: from every method, where nobody answers or not in time.
        Refused: from every method that the engine refuses, such as for want of `admin`.
        ValueError: from every method, where a name or id can be none; nothing was sent.
    """

    def __init__(
        self,
        socket_path: Path | str,
        *,
        credential: str,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """As `Client`, but nobody administers without a credential."""
        super().__init__(
            socket_path,
            credential=credential,
            connect_timeout_s=connect_timeout_s,
            grace_s=grace_s,
        )
        self.agents = ControlledAgents(self._transport)
        self.tools = ControlledTools(self._transport)
        self.tokens = ControlledTokens(self._transport)
        self.approvers = ControlledApprovers(self._transport)

    def changes(self) -> tuple[Change, ...]:
        """The newest 100 changes of authority, of agents and of the registry."""
        return self._transport.send(authority.changes())


class ControlledAgents:
    """Agents and their tools. A part of `ControlClient`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def create(
        self,
        agent_id: str,
        *,
        description: str = "",
        principals: Iterable[str] = (),
        is_enabled: bool = True,
    ) -> Agent:
        """Make an agent. It has no tools yet, and without principals it is nobody's."""
        ask = authority.create_agent(
            agent_id, description=description, principals=principals, is_enabled=is_enabled
        )
        return self._transport.send(ask)

    def list(self) -> tuple[Agent, ...]:
        """Every agent by id."""
        return self._transport.send(authority.list_agents())

    def show(self, agent_id: str) -> AgentDetails:
        """One agent with its tools."""
        return self._transport.send(authority.show_agent(agent_id))

    def update(
        self,
        agent_id: str,
        *,
        description: str | None = None,
        principals: Iterable[str] | None = None,
    ) -> Agent:
        """Change what is given; all else stays."""
        ask = authority.update_agent(agent_id, description=description, principals=principals)
        return self._transport.send(ask)

    def enable(self, agent_id: str) -> Agent:
        """Let calls be made for an agent again."""
        return self._transport.send(authority.update_agent(agent_id, is_enabled=True))

    def disable(self, agent_id: str) -> Agent:
        """Refuse every call that is made for an agent."""
        return self._transport.send(authority.update_agent(agent_id, is_enabled=False))

    def delete(self, agent_id: str) -> None:
        """Remove an agent with its bindings."""
        self._transport.send(authority.delete_agent(agent_id))

    def bindings(self, agent_id: str) -> tuple[Binding, ...]:
        """An agent's tools in its order, those that are switched off included."""
        return self._transport.send(authority.list_bindings(agent_id))

    def bind(
        self,
        agent_id: str,
        tool: str,
        *,
        sort_order: int = 0,
        fixed: JsonObject | None = None,
        defaults: JsonObject | None = None,
        is_enabled: bool = True,
    ) -> Binding:
        """Give an agent a tool (`name` or `name@version`), or change how it has it."""
        ask = authority.bind(
            agent_id,
            tool,
            sort_order=sort_order,
            fixed=fixed,
            defaults=defaults,
            is_enabled=is_enabled,
        )
        return self._transport.send(ask)

    def unbind(self, agent_id: str, tool: str) -> None:
        """Take a tool from an agent."""
        self._transport.send(authority.unbind(agent_id, tool))


class ControlledTools:
    """What the engine offers. A part of `ControlClient`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def add(self, document: JsonObject) -> ToolWithSource:
        """Register one version of a REST or MCP tool, from a document of its definition."""
        return self._transport.send(authority.add_tool(document))

    def replace(self, reference: str, document: JsonObject) -> ToolWithSource:
        """Put another definition in place of a registered one (`name@version`)."""
        return self._transport.send(authority.replace_tool(reference, document))

    def remove(self, reference: str) -> None:
        """Forget a registered version (`name@version`)."""
        self._transport.send(authority.remove_tool(reference))

    def enable(self, reference: str) -> tuple[ToolWithSource, ...]:
        """Switch one version (`name@version`), or every one (`name`), on."""
        return self._transport.send(authority.switch_tool(reference, is_active=True))

    def disable(self, reference: str) -> tuple[ToolWithSource, ...]:
        """Switch one version, or every one, off: calls are refused."""
        return self._transport.send(authority.switch_tool(reference, is_active=False))


class ControlledTokens:
    """Tokens. A part of `ControlClient`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def new(
        self,
        name: str,
        *,
        principal_id: str | None = None,
        scopes: Iterable[Scope | str] = (Scope.CALL,),
        agents: Iterable[str] = (),
        expires_at: datetime | None = None,
    ) -> MadeToken:
        """Make a token; its `secret` is shown only here. Without `expires_at` it has no end."""
        ask = authority.new_token(
            name, principal_id=principal_id, scopes=scopes, agents=agents, expires_at=expires_at
        )
        return self._transport.send(ask)

    def list(self) -> tuple[TokenInfo, ...]:
        """Every token without its secret, oldest first."""
        return self._transport.send(authority.list_tokens())

    def revoke(self, token_id: str) -> TokenInfo:
        """End a token at once."""
        return self._transport.send(authority.revoke_token(token_id))


class ControlledApprovers:
    """Approvers. A part of `ControlClient`."""

    def __init__(self, transport: BlockingTransport) -> None:
        self._transport = transport

    def add(self, name: str, *, scopes: Iterable[Scope | str] = (Scope.APPROVE,)) -> MadeApprover:
        """Make an approver; the credential, its `secret`, is shown only here."""
        return self._transport.send(authority.add_approver(name, scopes=scopes))

    def list(self) -> tuple[ApproverInfo, ...]:
        """Those who have authority now, oldest first."""
        return self._transport.send(authority.list_approvers())

    def remove(self, name: str) -> ApproverInfo:
        """Take an approver's authority back at once."""
        return self._transport.send(authority.remove_approver(name))
