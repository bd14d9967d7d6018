"""Authorize: may this caller use this tool with these arguments?

Third stage. Takes a `ValidatedCall`, returns a `PermittedCall` with the policy's decision: a denied
call ends here, a call that needs approval continues to `approve`. A principal with the scope `call`
may use any tool that no rule denies. An agent may use only its own tools, which `resolve` has
already checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.errors import InvalidParams, PermissionDenied
from fumehood.core.identity import Principal, Scope, TrustDomain
from fumehood.core.json_types import JsonObject
from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import Grade, strongest
from fumehood.identity.agents import Agents
from fumehood.identity.principals import require_caller, require_credential
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.validate import ValidatedCall, validate
from fumehood.policy.model import CallFacts, Decision, ExplainWish, Verdict
from fumehood.policy.service import PolicyGate
from fumehood.registry.index import RegisteredTool, ToolIndex
from fumehood.sandbox.session import with_env


@dataclass(frozen=True, slots=True)
class PermittedCall:
    """A call that the policy allows, either immediately or once it is approved."""

    validated: ValidatedCall
    principal: Principal
    decision: Decision
    session_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables that the session gives to the call's program. The values may be
    secret."""
    least_grade: Grade | None = None
    """The weakest grade of a container in which the policy has allowed the call, or None."""

    @property
    def request(self) -> CallRequest:
        return self.validated.resolved.request

    def with_request(self, request: CallRequest) -> PermittedCall:
        """Return a copy of this call that has `request` as its request, for example to change
        options.
        """
        resolved = replace(self.validated.resolved, request=request)
        return replace(self, validated=replace(self.validated, resolved=resolved))

    @property
    def tool(self) -> RegisteredTool:
        return self.validated.resolved.tool

    @property
    def arguments(self) -> JsonObject:
        return self.validated.arguments

    @property
    def trust_domain(self) -> TrustDomain:
        """The call's trust domain. Only calls of the same domain may share processes."""
        options = self.request.options
        return TrustDomain(self.principal.id, options.agent_id, options.session_id)


def authorize(
    validated: ValidatedCall,
    policy: PolicyGate,
    exceeds: Callable[[str], bool],
    is_weaker: Callable[[ValidatedCall, Grade], bool],
    env_of: Callable[[Principal, str], Mapping[str, str]] = lambda principal, session_id: {},
) -> PermittedCall:
    """Check the caller's scope and credential, then the policy.

    `exceeds` returns whether the gate with the given key would refuse the call, and `is_weaker`
    whether its container is weaker than a grade (`plan.is_in_weaker_container`). `env_of` returns
    the environment variables that a caller has chosen for a session. Policy rules see these
    variables as if the call had sent them, because a variable such as PATH decides what a command
    runs.

    Raises:
        Unauthorized: the caller is unknown, or presented no token and the tool requires one.
        PermissionDenied: the caller lacks the scope, or a rule denies the call.
    """
    resolved = validated.resolved
    tool = resolved.tool.definition
    principal = require_caller(resolved.request.principal)
    require_credential(principal, tool)
    session_id = resolved.request.options.session_id
    env: Mapping[str, str] = {}
    if session_id is not None and tool.executor in _PROGRAMS:
        env = env_of(principal, session_id)
    bound: list[Grade] = []
    facts = facts_of(validated, principal.id, exceeds, is_weaker, env)
    decision = policy.decide(facts._replace(bind=bound.append))
    if decision.verdict is Verdict.DENY:
        if not resolved.request.options.dry_run:
            policy.count(decision)
        why = f" {decision.reason}" if decision.reason else ""
        raise PermissionDenied(
            f"A policy rule forbids this call of {tool.name}.{why} Do not retry.",
            details={"rule": decision.rule},
        )
    held = resolved.request.held
    if held is not None and held.always_asks and decision.verdict is Verdict.ALLOW:
        decision = replace(decision, verdict=Verdict.ASK, rule=f"{held.needs}: {decision.rule}")
    return PermittedCall(validated, principal, decision, env, strongest(*bound))


_PROGRAMS = frozenset(language.executor for language in LANGUAGES.values())


def facts_of(
    validated: ValidatedCall,
    principal_id: str,
    exceeds: Callable[[str], bool],
    is_weaker: Callable[[ValidatedCall, Grade], bool],
    session_env: Mapping[str, str] | None = None,
) -> CallFacts:
    """Return the data about a call that policy rules test and that explanations show.

    `exceeds` returns whether the gate with the given key would refuse the call, and `is_weaker`
    whether its container is weaker than a grade. `session_env` contains the environment variables
    of the call's session.
    """
    resolved = validated.resolved
    options = resolved.request.options
    arguments = validated.arguments
    if session_env:
        arguments = with_env(session_env, arguments)
    return CallFacts(
        resolved.tool.definition,
        arguments,
        principal_id,
        options.agent_id,
        options.session_id,
        exceeds,
        partial(is_weaker, validated),
    )


def facts_to_explain(
    query: ExplainWish,
    registry: ToolIndex,
    agents: Agents,
    now: Callable[[], datetime],
    is_weaker: Callable[[ValidatedCall, Grade], bool],
) -> CallFacts:
    """Return the data that policy rules test, for the hypothetical call that `query` describes. The
    data says that no budget or other gate would refuse the call.

    Raises:
        EngineError: a real call would be refused with this error before the policy decides on it.
    """
    speaks_for = frozenset({query.agent_id} if query.agent_id is not None else ())
    try:
        options = CallOptions(agent_id=query.agent_id, session_id=query.session_id)
    except ValueError:
        raise InvalidParams(
            "The agent's or the session's id is not valid.", fields=["agent_id", "session_id"]
        ) from None
    principal = Principal(query.principal_id or "", frozenset({Scope.CALL}), speaks_for)
    request = CallRequest(query.tool, query.arguments, options, principal, "explain", "explain", {})
    validated = validate(resolve(request, registry, agents, now))
    return facts_of(validated, principal.id, lambda key: False, is_weaker)
