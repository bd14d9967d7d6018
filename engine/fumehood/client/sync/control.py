# Made by scripts/make_sync_client.py from client/async_control.py. Do not edit it here.
"""`ControlClient`: the requests of the control socket, in one part for each subject."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Unpack

from fumehood.answers import (
    AgentAnswer,
    AgentDetails,
    AgentList,
    ApproverAnswer,
    ApproverList,
    AuditPage,
    BindingAnswer,
    BindingList,
    CallDetails,
    CallList,
    ChangedTools,
    ChangeList,
    Deleted,
    SessionFileList,
    TokenAnswer,
    TokenList,
    ToolWithSource,
    Whoami,
)
from fumehood.audit.model import AuditRotation, AuditVerdict
from fumehood.budgets.model import UsageTable
from fumehood.cache.model import CacheStatus, ClearedCache
from fumehood.client.api_request import (
    ANSWER_GRACE_S,
    CONNECT_TIMEOUT_S,
    ApiRequest,
    Refused,
    address,
    ask,
    ask_for_bytes,
    listed,
    query_text,
    without_none,
)
from fumehood.client.exchange import Write
from fumehood.client.sync.approvals import ControlledApprovals
from fumehood.client.sync.client import TURN_S, BaseClient, usage_request
from fumehood.client.sync.transport import Transport
from fumehood.core.call_log import CallPage
from fumehood.core.envelope import Envelope
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.keywords import AllCallsKeywords, AllUsageKeywords, checked, show_keywords
from fumehood.core.overview import (
    EngineSummary,
    OwnedSession,
    OwnedSessionAnswer,
    OwnedSessionList,
    ToolFiguresList,
    TriedRules,
)
from fumehood.core.status import AlertList
from fumehood.identity.model import (
    Agent,
    ApproverInfo,
    Binding,
    Change,
    MadeApprover,
    MadeToken,
    TokenInfo,
)
from fumehood.policy.model import Explanation, PolicyStatus
from fumehood.protocol.blob_urls import parse_blob_url

VERIFY_S = 600.0
"""For some ten million rows."""


@show_keywords
class ControlClient(BaseClient):
    """A client of the control socket: approvals, agents, tools, tokens, approvers, audit, cache.

    Raises:
        DaemonUnavailable: from every method, if no server answers in time.
        Refused: from every method that the engine refuses, such as for want of `admin`.
        ValueError: from every method, where a name or id can be none; nothing was sent.
    """

    _is_control = True

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        credential: str,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        grace_s: float = ANSWER_GRACE_S,
    ) -> None:
        """As `Client`, but a credential is required."""
        super().__init__(
            socket_path,
            credential=credential,
            connect_timeout_s=connect_timeout_s,
            grace_s=grace_s,
        )
        self.agents = ControlledAgents(self._transport)
        self.tools = ControlledTools(self._transport)
        self.tokens = ControlledTokens(self._transport)
        self.policy = ControlledPolicy(self._transport)
        self.approvers = ControlledApprovers(self._transport)
        self.approvals = ControlledApprovals(self._transport)
        self.audit = ControlledAudit(self._transport)
        self.cache = ControlledCache(self._transport)
        self.calls = ControlledCalls(self._transport)
        self.sessions = ControlledSessions(self._transport)

    def usage(
        self, by: str | Iterable[str] | None = None, **query: Unpack[AllUsageKeywords]
    ) -> UsageTable:
        """The total usage of all principals, and the remaining amount of every budget.

        As a caller's `usage`; `query` may have a `principal`, too.
        """
        return self._transport.send(usage_request(by, query))

    def engine(self) -> EngineSummary:
        """How the engine is: version, walls, containers, sessions, circuits, running calls."""
        return self._transport.send(ask("GET", EngineSummary, "engine"))

    def figures(self, hours: int = 24) -> ToolFiguresList:
        """How the calls of each tool went in the last hours: success and latency."""
        query = {"hours": hours}
        return self._transport.send(ask("GET", ToolFiguresList, "figures", query=query))

    def whoami(self) -> Whoami:
        """The principal of this client's credential, and its scopes."""
        return self._transport.send(ask("GET", Whoami, "whoami"))

    def changes(self) -> tuple[Change, ...]:
        """The newest 100 changes of authority, of agents and of the registry."""
        found = self._transport.send(ask("GET", ChangeList, "changes"))
        return found.items

    def alerts(self) -> AlertList:
        """The alerts of the engine with their present values, and those of tools that are firing.

        Needs an approver's or admin credential.
        """
        return self._transport.send(ask("GET", AlertList, "alerts"))


class ControlledAgents:
    """Agents and their tools. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        agent_id: str,
        *,
        description: str = "",
        principals: Iterable[str] = (),
        is_enabled: bool = True,
    ) -> Agent:
        """Make an agent. It has no tools yet, and without principals nobody can use it."""
        body: JsonObject = {
            "id": agent_id,
            "description": description,
            "principals": listed(principals),
            "is_enabled": is_enabled,
        }
        found = self._transport.send(ask("POST", AgentAnswer, "agents", body=body))
        return found.agent

    def list(self) -> tuple[Agent, ...]:
        """Every agent by id."""
        found = self._transport.send(ask("GET", AgentList, "agents"))
        return found.items

    def show(self, agent_id: str) -> AgentDetails:
        """One agent with its tools."""
        return self._transport.send(ask("GET", AgentDetails, "agents", agent_id))

    def update(
        self,
        agent_id: str,
        *,
        description: str | None = None,
        principals: Iterable[str] | None = None,
    ) -> Agent:
        """Change what is given; all else stays."""
        given: JsonObject = {
            "description": description,
            "principals": None if principals is None else listed(principals),
        }
        return self._update(agent_id, given)

    def enable(self, agent_id: str) -> Agent:
        """Let calls be made for an agent again."""
        return self._update(agent_id, {"is_enabled": True})

    def disable(self, agent_id: str) -> Agent:
        """Refuse every call that is made for an agent."""
        return self._update(agent_id, {"is_enabled": False})

    def delete(self, agent_id: str) -> None:
        """Remove an agent with its bindings."""
        self._transport.send(ask("DELETE", Deleted, "agents", agent_id))

    def bindings(self, agent_id: str) -> tuple[Binding, ...]:
        """An agent's tools in its order, those that are switched off included."""
        found = self._transport.send(ask("GET", BindingList, "agents", agent_id, "tools"))
        return found.items

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
        body: JsonObject = {
            "sort_order": sort_order,
            "fixed": fixed if fixed is not None else {},
            "defaults": defaults if defaults is not None else {},
            "is_enabled": is_enabled,
        }
        parts = "agents", agent_id, "tools", tool
        found = self._transport.send(ask("PUT", BindingAnswer, *parts, body=body))
        return found.binding

    def unbind(self, agent_id: str, tool: str) -> None:
        """Take a tool from an agent."""
        self._transport.send(ask("DELETE", Deleted, "agents", agent_id, "tools", tool))

    def _update(self, agent_id: str, given: JsonObject) -> Agent:
        request = ask("PATCH", AgentAnswer, "agents", agent_id, body=without_none(given))
        found = self._transport.send(request)
        return found.agent


class ControlledTools:
    """The registered tools. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, document: JsonObject) -> ToolWithSource:
        """Register one version of a REST or MCP tool, from a document of its definition."""
        found = self._transport.send(ask("POST", ChangedTools, "tools", body=document))
        return _only(found)

    def replace(self, reference: str, document: JsonObject) -> ToolWithSource:
        """Put another definition in place of a registered one (`name@version`)."""
        request = ask("PUT", ChangedTools, "tools", reference, body=document)
        return _only(self._transport.send(request))

    def remove(self, reference: str) -> None:
        """Forget a registered version (`name@version`)."""
        self._transport.send(ask("DELETE", Deleted, "tools", reference))

    def enable(self, reference: str) -> tuple[ToolWithSource, ...]:
        """Switch one version (`name@version`), or every one (`name`), on."""
        found = self._transport.send(ask("POST", ChangedTools, "tools", reference, "activate"))
        return found.items

    def disable(self, reference: str) -> tuple[ToolWithSource, ...]:
        """Switch one version, or every one, off: calls are refused."""
        request = ask("POST", ChangedTools, "tools", reference, "deactivate")
        found = self._transport.send(request)
        return found.items


class ControlledTokens:
    """Tokens. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
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
        """Make a token; its `secret` is shown only here. Without `expires_at` it has no end.

        Raises:
            ValueError: `expires_at` has no time zone.
        """
        if expires_at is not None and expires_at.tzinfo is None:
            raise ValueError("expires_at needs a time zone.")
        body: JsonObject = {
            "name": name,
            "principal_id": principal_id,
            "scopes": listed(scopes),
            "agents": listed(agents),
            "expires_at": None if expires_at is None else expires_at.isoformat(),
        }
        return self._transport.send(ask("POST", MadeToken, "tokens", body=body))

    def list(self) -> tuple[TokenInfo, ...]:
        """Every token without its secret, oldest first."""
        found = self._transport.send(ask("GET", TokenList, "tokens"))
        return found.items

    def revoke(self, token_id: str) -> TokenInfo:
        """End a token at once."""
        found = self._transport.send(ask("DELETE", TokenAnswer, "tokens", token_id))
        return found.token


class ControlledPolicy:
    """The rules of the engine. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self) -> PolicyStatus:
        """The rules that decide now, and how often those in shadow mode would have."""
        return self._transport.send(ask("GET", PolicyStatus, "policy"))

    def explain(
        self,
        tool: str,
        arguments: JsonObject | None = None,
        *,
        principal_id: str | None = None,
        agent_id: str | None = None,
        session_id: str | None = None,
    ) -> Explanation:
        """The decision for a call, which is not made, and each rule's part in it."""
        given: JsonObject = {
            "tool": tool,
            "arguments": arguments or {},
            "principal_id": principal_id,
            "agent_id": agent_id,
            "session_id": session_id,
        }
        request = ask("POST", Explanation, "policy", "explain", body=without_none(given))
        return self._transport.send(request)

    def reload(self) -> PolicyStatus:
        """Let the engine read the file now; a faulty one is refused and the old rules stay."""
        return self._transport.send(ask("POST", PolicyStatus, "policy", "reload"))

    def try_rules(self, rules: str, *, days: int = 7) -> TriedRules:
        """Which calls of the last days these rules, as in a policy file in TOML, are about.

        The log has no arguments, so that conditions on them are taken to hold.
        """
        body: JsonObject = {"rules": rules, "days": days}
        return self._transport.send(ask("POST", TriedRules, "policy", "try", body=body))


class ControlledApprovers:
    """Approvers. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, name: str, *, scopes: Iterable[Scope | str] = (Scope.APPROVE,)) -> MadeApprover:
        """Make an approver; the credential, its `secret`, is shown only here."""
        body: JsonObject = {"name": name, "scopes": listed(scopes)}
        return self._transport.send(ask("POST", MadeApprover, "approvers", body=body))

    def list(self) -> tuple[ApproverInfo, ...]:
        """Those who have authority now, oldest first."""
        found = self._transport.send(ask("GET", ApproverList, "approvers"))
        return found.items

    def remove(self, name: str) -> ApproverInfo:
        """Take an approver's authority back at once."""
        found = self._transport.send(ask("DELETE", ApproverAnswer, "approvers", name))
        return found.approver


class ControlledAudit:
    """The audit chain. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def page(self, *, after: int = 0, limit: int = 100) -> AuditPage:
        """Rows that follow row `after`, oldest first; at most 1,000 at a time."""
        query = {"after": after, "limit": limit}
        return self._transport.send(ask("GET", AuditPage, "audit", query=query))

    def verify(self) -> AuditVerdict:
        """Let the engine walk along its whole chain."""
        return self._transport.send(ask("GET", AuditVerdict, "audit", "verify", work_s=VERIFY_S))

    def rotate(self) -> AuditRotation:
        """Go on under a new key."""
        return self._transport.send(ask("POST", AuditRotation, "audit", "rotate"))


class ControlledCache:
    """The result cache. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self) -> CacheStatus:
        """How much it holds, and its hits and misses since the engine's start."""
        return self._transport.send(ask("GET", CacheStatus, "cache"))

    def clear(self) -> ClearedCache:
        """Drop every answer, of all principals."""
        return self._transport.send(ask("DELETE", ClearedCache, "cache"))


@show_keywords
class ControlledCalls:
    """Everybody's calls. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, **query: Unpack[AllCallsKeywords]) -> CallPage:
        """A page of calls, newest first; one may have fewer than `limit` and still go on.

        `query` is that of `AllCallsQuery`: since, until, agent, tool, code, principal, session,
        trace, parent, limit, cursor.
        """
        asked = checked(AllCallsKeywords, "list", query)
        found = self._transport.send(ask("GET", CallList, "calls", query=asked))
        return found.page

    def show(self, call_id: str) -> CallDetails:
        """One call with everything that is kept of it."""
        return self._transport.send(ask("GET", CallDetails, "calls", call_id))

    def dry_run(self, call_id: str) -> Envelope:
        """What a call that needed approval would do now, with its caller's rights."""
        path = address("calls", call_id, "dry-run")
        return self._transport.send(ApiRequest("POST", path, _dry_run_answer))

    def blob(self, call_id: str, url: str) -> bytes:
        """The whole of a blob of a call's answer, by its `url` there.

        Raises:
            ValueError: this is no address of a blob, so nothing was sent.
        """
        blob = parse_blob_url(url)
        given = {"expires": blob.expires, "signature": blob.signature}
        path = address("calls", call_id, "blobs", blob.blob_id) + query_text(given)
        content = bytearray()
        self._transport.download(ask_for_bytes(path), content.extend)
        return bytes(content)


class ControlledSessions:
    """Everybody's sessions. A part of `ControlClient`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> tuple[OwnedSession, ...]:
        """The sessions of all principals: active ones, then those that ended lately."""
        found = self._transport.send(ask("GET", OwnedSessionList, "sessions"))
        return found.items

    def show(self, session_id: str) -> OwnedSession:
        """One session."""
        found = self._transport.send(ask("GET", OwnedSessionAnswer, "sessions", session_id))
        return found.session

    def end(self, session_id: str) -> OwnedSession:
        """End a session with whatever runs in it; its files are gone. Needs `admin`."""
        request = ask("DELETE", OwnedSessionAnswer, "sessions", session_id, work_s=TURN_S)
        found = self._transport.send(request)
        return found.session

    def files(
        self,
        session_id: str,
        path: str = "",
        *,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> SessionFileList:
        """A page of what is in a session's workspace, or in one directory of it."""
        query = {"path": path or None, "limit": limit, "cursor": cursor}
        parts = "sessions", session_id, "files"
        request = ask("GET", SessionFileList, *parts, query=query, work_s=TURN_S)
        return self._transport.send(request)

    def download_file(self, session_id: str, path: str, write: Write) -> None:
        """A file of a session to `write`, piece by piece."""
        parts = address("sessions", session_id, "files", *path.split("/"))
        self._transport.download(ask_for_bytes(parts, TURN_S), write)


def _dry_run_answer(raw: bytes) -> Envelope:
    """Raises Refused: this is no answer of a call."""
    from fumehood.protocol.messages import decode_envelope

    envelope = decode_envelope(raw)
    if envelope.metadata.call_id is None:
        raise Refused(envelope)
    return envelope


def _only(found: ChangedTools) -> ToolWithSource:
    (tool,) = found.items
    return tool
