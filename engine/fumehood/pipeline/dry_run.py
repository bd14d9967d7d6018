"""Dry run: describe what a call would do, without running it or using it up (mission P12).

Takes a `PermittedCall`, returns an `Outcome` that describes what would happen and why. Faults in
the request itself are refused as in a real call before this is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from fumehood.core.call import CallOptions, CallRequest
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    InvalidParams,
    QuotaExceeded,
    RateLimited,
    RequiresHumanApproval,
)
from fumehood.core.identity import Principal, Scope
from fumehood.core.json_types import JsonObject
from fumehood.core.usage import money
from fumehood.executors.outcome import Outcome
from fumehood.identity.agents import Agents
from fumehood.pipeline.authorize import PermittedCall, facts_of
from fumehood.pipeline.context import PipelineServices
from fumehood.pipeline.plan import Plan, plan_now
from fumehood.pipeline.resolve import resolve
from fumehood.pipeline.result import shortened
from fumehood.pipeline.validate import validate
from fumehood.policy.model import CallFacts, ExplainWish, Verdict
from fumehood.registry.index import ToolIndex


def facts_to_explain(
    query: ExplainWish, registry: ToolIndex, agents: Agents, now: Callable[[], datetime]
) -> CallFacts:
    """Resolve and validate a call whose policy decision is to be explained. Ignores budgets.

    Raises:
        EngineError: as for a real call, before its policy decision.
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
    return facts_of(validated, principal.id, lambda: False)


async def dry_run(permitted: PermittedCall, services: PipelineServices) -> Outcome:
    """Return an outcome that describes what the call would do, without doing it."""
    tool = permitted.tool.definition
    exceeded = services.exceeded(permitted.validated)
    over_rate = services.rate_exceeded(permitted.validated)
    decision = permitted.decision
    asks = decision.verdict is Verdict.ASK
    refusal: str | None = RequiresHumanApproval.code if asks else None
    if exceeded is not None and not decision.may_exceed_budget:
        refusal = QuotaExceeded.code
    if over_rate is not None:
        refusal = RateLimited.code
    plan: JsonObject = {"placement": None, "limits": None, "session": None}
    try:
        made = await plan_now(permitted, services.walls, services.sessions)
        plan = {
            "placement": {
                "kind": made.placement.kind,
                "why": made.placement.why,
                **({"image": made.image} if made.image is not None else {}),
            },
            "limits": {
                "timeout_seconds": made.limits.wall_s,
                "memory_mb": made.limits.memory_mb,
                "output_bytes": made.limits.output_bytes,
                "enforced": sorted(made.wall.status.enforced),
            },
            "session": _session(made),
        }
        circuit = services.circuits.of(made.upstream)
        if circuit is not None:
            circuit.require_passable()
    except EngineError as error:
        refusal = refusal or error.code
        if plan["placement"] is None:
            plan["placement"] = {"kind": None, "why": error.message}
    answer: dict[str, Any] = {
        "dry_run": True,
        "would_run": refusal is None,
        "refused_with": refusal,
        **plan,
        "approval": {
            "required": asks,
            **({"approvers": list(decision.approvers), "quorum": decision.quorum} if asks else {}),
        },
        "policy": {
            "rule": decision.rule,
            "reason": decision.reason,
            "version": decision.policy_version,
        },
        "budget": None
        if exceeded is None
        else {
            "exceeded": exceeded.budget,
            "unit": exceeded.unit.value,
            "left": exceeded.left,
        },
        "rate_limit": None
        if over_rate is None
        else {**over_rate.limit.details, "retry_after_ms": over_rate.retry_after_ms},
        "requires_auth": tool.requires_auth,
        "cost": {"per_use": money(tool.cost_per_use)},
        "arguments": shortened(permitted.validated.shown_arguments),
    }
    return Outcome(EndedBy.OK, "none", data=answer, is_dry_run=True)


def _session(plan: Plan) -> JsonObject | None:
    if plan.session is None:
        return None
    shown = plan.session.model_dump(mode="json", include={"id", "image", "expires_at", "is_busy"})
    return {**shown, "runs_in_it": plan.placement.is_of_session}
