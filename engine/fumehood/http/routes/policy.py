"""`/v1/policy`, on the control socket: show the rules, explain a call, reload."""

from __future__ import annotations

from fumehood.core.errors import (
    InvalidParams,
    ResourceNotFound,
    ToolDeprecated,
    ToolDisabled,
    ToolNotFound,
)
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import Needs, endpoint
from fumehood.policy.model import ExplainWish, Explanation, PolicyStatus


@endpoint("GET", "/v1/policy", Needs.APPROVER, authorize=require_authority, client="policy.show")
async def show_policy(engine: Engine) -> PolicyStatus:
    """Show the current rules, their version, and how often shadow rules matched.

    Needs `approve` or `admin`.
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
    """Explain the policy's decision for a call, rule by rule. Nothing is called.

    Needs `approve` or `admin`. Budgets are assumed to suffice.
    """
    return engine.policy.explain(body)


@endpoint("POST", "/v1/policy/reload", Needs.ADMIN, errors=[InvalidParams], client="policy.reload")
async def reload_policy(engine: Engine, caller: Principal) -> PolicyStatus:
    """Reload the policy file. A faulty one is INVALID_PARAMS, and the old rules stay."""
    return await engine.policy.reload(caller)


OPERATIONS = [show_policy, explain_call, reload_policy]
