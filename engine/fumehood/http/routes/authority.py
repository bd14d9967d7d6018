"""Authority, on the control socket: tokens, approvers, recorded changes, agents and the policy."""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request

from fumehood.answers import (
    AgentDetails,
    Deleted,
    Whoami,
)
from fumehood.core.errors import (
    IdempotencyConflict,
    InvalidParams,
    ResourceNotFound,
    StateUnavailable,
    ToolDeprecated,
    ToolDisabled,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.answers import engine_of
from fumehood.http.bodies import parse_body
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import As, Given, Method, Needs, endpoint
from fumehood.http.routes.tools import ToolName
from fumehood.identity.model import (
    Agent,
    AgentFields,
    ApproverInfo,
    Binding,
    BindingFields,
    Change,
    MadeApprover,
    MadeToken,
    NewApprover,
    NewToken,
    TokenInfo,
)
from fumehood.policy.model import (
    ExplainWish,
    Explanation,
    NewPolicy,
    PolicyStatus,
    PolicyText,
)
from fumehood.storage import changes


@endpoint("GET", "/v1/tokens", Needs.ADMIN, client="tokens.list")
async def list_tokens(
    engine: Engine,
) -> Annotated[tuple[TokenInfo, ...], As("items", "TokenList", "All tokens, oldest first.")]:
    """List all tokens, without their secrets."""
    now = engine.now()
    return tuple(token.info(now) for token in engine.tokens.all())


@endpoint("POST", "/v1/tokens", Needs.ADMIN, client="tokens.new")
async def new_token(engine: Engine, caller: Principal, body: NewToken) -> MadeToken:
    """Create a token. Only this answer contains its secret."""
    now = engine.now()
    token, text = await engine.tokens.new(
        body.name,
        principal_id=body.principal_id or f"token:{body.name}",
        scopes=body.scopes,
        agents=body.agents,
        expires_at=body.expires_at,
        by=caller,
        now=now,
    )
    return MadeToken(token=token.info(now), secret=text)


@endpoint(
    "DELETE",
    "/v1/tokens/{token_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="tokens.revoke",
)
async def revoke_token(
    engine: Engine,
    caller: Principal,
    token_id: Annotated[str, "The token's id, as shown in the list of tokens."],
) -> Annotated[TokenInfo, As("token", "TokenAnswer", "The current state of a token.")]:
    """Revoke a token. The token stops working immediately."""
    now = engine.now()
    token = await engine.tokens.revoke(token_id, by=caller, now=now)
    return token.info(now)


@endpoint("GET", "/v1/approvers", Needs.ADMIN, client="approvers.list")
async def list_approvers(
    engine: Engine,
) -> Annotated[
    tuple[ApproverInfo, ...],
    As("items", "ApproverList", "The current approvers, oldest first."),
]:
    """List the current approvers."""
    return tuple(approver.info for approver in engine.approvers.current())


@endpoint(
    "POST", "/v1/approvers", Needs.ADMIN, errors=[IdempotencyConflict], client="approvers.add"
)
async def add_approver(engine: Engine, caller: Principal, body: NewApprover) -> MadeApprover:
    """Create an approver. Only this answer contains the credential."""
    made, text = await engine.approvers.add(body.name, body.scopes, by=caller, now=engine.now())
    return MadeApprover(approver=made.info, secret=text)


@endpoint(
    "DELETE",
    "/v1/approvers/{approver}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client=Method("approvers.remove", renamed={"approver": "name"}),
)
async def remove_approver(
    engine: Engine, caller: Principal, approver: Annotated[str, "The approver's name."]
) -> Annotated[ApproverInfo, As("approver", "ApproverAnswer", "The current state of an approver.")]:
    """Remove an approver. The approver's credential stops working immediately."""
    removed = await engine.approvers.remove(approver, by=caller, now=engine.now())
    return removed.info


@endpoint("GET", "/v1/whoami", Needs.APPROVER, authorize=require_authority)
async def whoami(caller: Principal) -> Whoami:
    """Show the principal and the scopes of the request's credential.

    Needs the scope `approve` or `admin`.
    """
    return Whoami(principal_id=caller.id, scopes=tuple(sorted(caller.scopes)))


@endpoint("GET", "/v1/changes", Needs.APPROVER, authorize=require_authority, client="changes")
async def list_changes(
    engine: Engine,
) -> Annotated[tuple[Change, ...], As("items", "ChangeList", "Changes, newest first.")]:
    """List the newest 100 administrative changes, such as new tokens and replaced tools.

    Needs the scope `approve` or `admin`.
    """
    rows = await engine.database.read(lambda c: changes.list_changes(c, 100))
    return tuple(Change.model_validate(row) for row in rows)


AgentAnswer = Annotated[Agent, As("agent", "AgentAnswer", "The current state of an agent.")]
AgentId = Annotated[str, "The agent's id."]


def _known(request: Request, _: Principal) -> Agent:
    return engine_of(request).agents.get(request.path_params["agent_id"])


KnownAgent = Annotated[Agent, Given(_known, {"agent_id": "The agent's id."})]


@endpoint("GET", "/v1/agents", Needs.ADMIN, client="agents.list")
async def list_agents(
    engine: Engine,
) -> Annotated[tuple[Agent, ...], As("items", "AgentList", "All agents, sorted by id.")]:
    """List all agents."""
    return tuple(engine.agents.all())


@endpoint(
    "POST",
    "/v1/agents",
    Needs.ADMIN,
    errors=[IdempotencyConflict],
    client=Method("agents.create", renamed={"id": "agent_id"}),
)
async def create_agent(engine: Engine, caller: Principal, body: Agent) -> AgentAnswer:
    """Create an agent."""
    await engine.agents.create(body, by=caller, now=engine.now())
    return body


@endpoint(
    "GET", "/v1/agents/{agent_id}", Needs.ADMIN, errors=[ResourceNotFound], client="agents.show"
)
async def show_agent(engine: Engine, agent: KnownAgent) -> AgentDetails:
    """Show one agent with its tools."""
    return AgentDetails(agent=agent, tools=tuple(engine.agents.bindings(agent.id)))


@endpoint("PUT", "/v1/agents/{agent_id}", Needs.ADMIN, errors=[ResourceNotFound], client=None)
async def replace_agent(
    engine: Engine, caller: Principal, agent: KnownAgent, body: AgentFields
) -> AgentAnswer:
    """Replace all fields of an agent. The agent's tools stay."""
    return await _change(engine, caller, agent, body, is_whole=True)


@endpoint(
    "PATCH",
    "/v1/agents/{agent_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client=Method("agents.update", renamed={"id": "agent_id"}),
)
async def update_agent(
    engine: Engine, caller: Principal, agent: KnownAgent, body: AgentFields
) -> AgentAnswer:
    """Change the given fields of an agent. The agent's other fields and its tools stay."""
    return await _change(engine, caller, agent, body, is_whole=False)


@endpoint(
    "DELETE",
    "/v1/agents/{agent_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.delete",
)
async def delete_agent(engine: Engine, caller: Principal, agent_id: AgentId) -> Deleted:
    """Delete an agent and its bindings."""
    await engine.agents.delete(agent_id, by=caller, now=engine.now())
    return Deleted(deleted=agent_id)


@endpoint(
    "GET",
    "/v1/agents/{agent_id}/tools",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.bindings",
)
async def list_bindings(
    engine: Engine, agent_id: AgentId
) -> Annotated[
    tuple[Binding, ...],
    As(
        "items",
        "BindingList",
        "An agent's bindings in the agent's order, including disabled ones.",
    ),
]:
    """List an agent's bindings, in the agent's order, including disabled ones."""
    return tuple(engine.agents.bindings(agent_id))


@endpoint(
    "PUT",
    "/v1/agents/{agent_id}/tools/{tool}",
    Needs.ADMIN,
    errors=[ResourceNotFound, ToolNotFound],
    client="agents.bind",
)
async def bind_tool(
    engine: Engine, agent_id: AgentId, tool: ToolName, caller: Principal, body: BindingFields
) -> Annotated[Binding, As("binding", "BindingAnswer", "The current state of a binding.")]:
    """Bind a tool to an agent, or change its binding."""
    if body.tool not in (None, tool):
        raise InvalidParams("The tools in the address and in the body differ.", fields=["tool"])
    binding = parse_body(Binding, {**dict(body), "tool": tool})
    engine.tool(binding.tool)  # a missing tool cannot be bound
    await engine.agents.bind(agent_id, binding, by=caller, now=engine.now())
    return binding


@endpoint(
    "DELETE",
    "/v1/agents/{agent_id}/tools/{tool}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="agents.unbind",
)
async def unbind_tool(
    engine: Engine, agent_id: AgentId, tool: ToolName, caller: Principal
) -> Deleted:
    """Unbind a tool from an agent."""
    name = tool.partition("@")[0]
    await engine.agents.unbind(agent_id, name, by=caller, now=engine.now())
    return Deleted(deleted=name)


async def _change(
    engine: Engine, by: Principal, known: Agent, fields: AgentFields, *, is_whole: bool
) -> AgentAnswer:
    if fields.id not in (None, known.id):
        raise InvalidParams("An agent's id cannot be changed.", fields=["id"])
    given = fields.model_dump(exclude={"id"}, exclude_unset=not is_whole)
    agent = parse_body(Agent, {**dict(known), **given})
    await engine.agents.update(agent, by=by, now=engine.now())
    return agent


@endpoint("GET", "/v1/policy", Needs.APPROVER, authorize=require_authority, client="policy.show")
async def show_policy(engine: Engine) -> PolicyStatus:
    """Show the current policy rules, their version, and how often shadow rules matched.

    Needs the scope `approve` or `admin`.
    """
    return engine.policy.status()


@endpoint(
    "POST",
    "/v1/policy/explain",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound, ToolNotFound, ToolDisabled, ToolDeprecated],
    client="policy.explain",
)
async def explain_call(engine: Engine, body: ExplainWish) -> Explanation:
    """Explain the policy's decision for a call, rule by rule. The tool does not run.

    Needs the scope `approve` or `admin`. The explanation assumes that no budget is exceeded.
    """
    return engine.policy.explain(body)


@endpoint("GET", "/v1/policy/file", Needs.ADMIN, errors=[ResourceNotFound], client="policy.text")
async def read_policy_file(engine: Engine, caller: Principal) -> PolicyText:
    """Read the policy file."""
    return await engine.policy.text()


@endpoint(
    "PUT",
    "/v1/policy/file",
    Needs.ADMIN,
    errors=[ResourceNotFound, InvalidParams, IdempotencyConflict, StateUnavailable],
    client="policy.replace",
)
async def replace_policy_file(engine: Engine, caller: Principal, body: NewPolicy) -> PolicyStatus:
    """Replace the policy file, and use the new policy immediately.

    If the new file is invalid, the error is INVALID_PARAMS, and the old file and policy stay. The
    audit chain records the replacement as an administrative change.
    """
    return await engine.policy.replace(body, caller)


@endpoint("POST", "/v1/policy/reload", Needs.ADMIN, errors=[InvalidParams], client="policy.reload")
async def reload_policy(engine: Engine, caller: Principal) -> PolicyStatus:
    """Reload the policy file.

    If the file is invalid, the error is INVALID_PARAMS, and the old rules stay in force.
    """
    return await engine.policy.reload(caller)


OPERATIONS = [
    list_tokens,
    new_token,
    revoke_token,
    list_approvers,
    add_approver,
    remove_approver,
    whoami,
    list_changes,
    list_agents,
    create_agent,
    show_agent,
    replace_agent,
    update_agent,
    delete_agent,
    list_bindings,
    bind_tool,
    unbind_tool,
    show_policy,
    explain_call,
    read_policy_file,
    replace_policy_file,
    reload_policy,
]
