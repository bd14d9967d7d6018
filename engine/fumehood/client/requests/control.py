"""The requests of the control socket, each as a function that makes one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from fumehood.answers import (
    AgentAnswer,
    AgentDetails,
    AgentList,
    ApproverAnswer,
    ApproverList,
    AuditPage,
    BindingAnswer,
    BindingList,
    ChangedTools,
    ChangeList,
    Deleted,
    TokenAnswer,
    TokenList,
    ToolWithSource,
)
from fumehood.audit.model import AuditRotation, AuditVerdict
from fumehood.client.api_request import ApiRequest, address, data_of, encode, listed
from fumehood.core.identity import Scope
from fumehood.core.json_types import JsonObject
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

VERIFY_S = 600.0
"""For some ten million rows."""


def create_agent(
    agent_id: str, *, description: str, principals: Iterable[str], is_enabled: bool
) -> ApiRequest[Agent]:
    """Make an agent."""
    body: JsonObject = {
        "id": agent_id,
        "description": description,
        "principals": listed(principals),
        "is_enabled": is_enabled,
    }
    return ApiRequest("POST", address("agents"), _agent, encode(body))


def list_agents() -> ApiRequest[tuple[Agent, ...]]:
    """Every agent."""
    read = data_of(AgentList)
    return ApiRequest("GET", address("agents"), lambda raw: read(raw).items)


def show_agent(agent_id: str) -> ApiRequest[AgentDetails]:
    """One agent with its tools."""
    return ApiRequest("GET", address("agents", agent_id), data_of(AgentDetails))


def update_agent(
    agent_id: str,
    *,
    description: str | None = None,
    principals: Iterable[str] | None = None,
    is_enabled: bool | None = None,
) -> ApiRequest[Agent]:
    """Change what is given."""
    given: JsonObject = {
        "description": description,
        "principals": None if principals is None else listed(principals),
        "is_enabled": is_enabled,
    }
    body = {name: value for name, value in given.items() if value is not None}
    return ApiRequest("PATCH", address("agents", agent_id), _agent, encode(body))


def delete_agent(agent_id: str) -> ApiRequest[None]:
    """Remove an agent with its bindings."""
    return ApiRequest("DELETE", address("agents", agent_id), _deleted)


def list_bindings(agent_id: str) -> ApiRequest[tuple[Binding, ...]]:
    """An agent's tools."""
    read = data_of(BindingList)
    return ApiRequest("GET", address("agents", agent_id, "tools"), lambda raw: read(raw).items)


def bind(
    agent_id: str,
    tool: str,
    *,
    sort_order: int,
    fixed: JsonObject | None,
    defaults: JsonObject | None,
    is_enabled: bool,
) -> ApiRequest[Binding]:
    """Give an agent a tool, or change how it has it."""
    body: JsonObject = {
        "sort_order": sort_order,
        "fixed": fixed if fixed is not None else {},
        "defaults": defaults if defaults is not None else {},
        "is_enabled": is_enabled,
    }
    read = data_of(BindingAnswer)
    path = address("agents", agent_id, "tools", tool)
    return ApiRequest("PUT", path, lambda raw: read(raw).binding, encode(body))


def unbind(agent_id: str, tool: str) -> ApiRequest[None]:
    """Take a tool from an agent."""
    return ApiRequest("DELETE", address("agents", agent_id, "tools", tool), _deleted)


def add_tool(document: JsonObject) -> ApiRequest[ToolWithSource]:
    """Register one version of a REST or MCP tool."""
    return ApiRequest("POST", address("tools"), _one_tool, encode(document))


def replace_tool(reference: str, document: JsonObject) -> ApiRequest[ToolWithSource]:
    """Put another definition in place of a registered one."""
    return ApiRequest("PUT", address("tools", reference), _one_tool, encode(document))


def remove_tool(reference: str) -> ApiRequest[None]:
    """Forget a registered version."""
    return ApiRequest("DELETE", address("tools", reference), _deleted)


def switch_tool(reference: str, *, is_active: bool) -> ApiRequest[tuple[ToolWithSource, ...]]:
    """Switch one version, or every one, on or off."""
    read = data_of(ChangedTools)
    verb = "activate" if is_active else "deactivate"
    return ApiRequest("POST", address("tools", reference, verb), lambda raw: read(raw).items)


def new_token(
    name: str,
    *,
    principal_id: str | None,
    scopes: Iterable[Scope | str],
    agents: Iterable[str],
    expires_at: datetime | None,
) -> ApiRequest[MadeToken]:
    """Make a token. Raises ValueError for a time without a zone."""
    if expires_at is not None and expires_at.tzinfo is None:
        raise ValueError("expires_at needs a time zone.")
    body: JsonObject = {
        "name": name,
        "principal_id": principal_id,
        "scopes": listed(scopes),
        "agents": listed(agents),
        "expires_at": None if expires_at is None else expires_at.isoformat(),
    }
    return ApiRequest("POST", address("tokens"), data_of(MadeToken), encode(body))


def list_tokens() -> ApiRequest[tuple[TokenInfo, ...]]:
    """Every token without its secret."""
    read = data_of(TokenList)
    return ApiRequest("GET", address("tokens"), lambda raw: read(raw).items)


def revoke_token(token_id: str) -> ApiRequest[TokenInfo]:
    """End a token at once."""
    read = data_of(TokenAnswer)
    return ApiRequest("DELETE", address("tokens", token_id), lambda raw: read(raw).token)


def add_approver(name: str, *, scopes: Iterable[Scope | str]) -> ApiRequest[MadeApprover]:
    """Make an approver."""
    body: JsonObject = {"name": name, "scopes": listed(scopes)}
    return ApiRequest("POST", address("approvers"), data_of(MadeApprover), encode(body))


def list_approvers() -> ApiRequest[tuple[ApproverInfo, ...]]:
    """Those who have authority now."""
    read = data_of(ApproverList)
    return ApiRequest("GET", address("approvers"), lambda raw: read(raw).items)


def remove_approver(name: str) -> ApiRequest[ApproverInfo]:
    """Take an approver's authority back at once."""
    read = data_of(ApproverAnswer)
    return ApiRequest("DELETE", address("approvers", name), lambda raw: read(raw).approver)


def changes() -> ApiRequest[tuple[Change, ...]]:
    """The newest changes first."""
    read = data_of(ChangeList)
    return ApiRequest("GET", address("changes"), lambda raw: read(raw).items)


def show_policy() -> ApiRequest[PolicyStatus]:
    """The rules that decide now."""
    return ApiRequest("GET", address("policy"), data_of(PolicyStatus))


def explain(
    tool: str,
    arguments: JsonObject | None,
    *,
    principal_id: str | None,
    agent_id: str | None,
    session_id: str | None,
) -> ApiRequest[Explanation]:
    """What the rules say of a call."""
    given: JsonObject = {
        "tool": tool,
        "arguments": arguments or {},
        "principal_id": principal_id,
        "agent_id": agent_id,
        "session_id": session_id,
    }
    body = {name: value for name, value in given.items() if value is not None}
    return ApiRequest("POST", address("policy", "explain"), data_of(Explanation), encode(body))


def reload_policy() -> ApiRequest[PolicyStatus]:
    """Read the file anew."""
    return ApiRequest("POST", address("policy", "reload"), data_of(PolicyStatus))


def audit_page(*, after: int, limit: int) -> ApiRequest[AuditPage]:
    """Some rows of the audit chain."""
    return ApiRequest("GET", f"{address('audit')}?after={after}&limit={limit}", data_of(AuditPage))


def verify_audit() -> ApiRequest[AuditVerdict]:
    """A walk along the whole chain, which may take a while."""
    return ApiRequest("GET", address("audit", "verify"), data_of(AuditVerdict), work_s=VERIFY_S)


def rotate_audit_key() -> ApiRequest[AuditRotation]:
    """A new key for the chain."""
    return ApiRequest("POST", address("audit", "rotate"), data_of(AuditRotation))


def _agent(raw: bytes) -> Agent:
    return data_of(AgentAnswer)(raw).agent


def _deleted(raw: bytes) -> None:
    data_of(Deleted)(raw)


def _one_tool(raw: bytes) -> ToolWithSource:
    (tool,) = data_of(ChangedTools)(raw).items
    return tool
