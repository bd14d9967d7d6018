"""`/v1/policy`, on the control socket: show the rules, explain a call, reload."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.core.errors import (
    InvalidParams,
    ResourceNotFound,
    ToolDeprecated,
    ToolDisabled,
    ToolNotFound,
)
from fumehood.http.answers import answer, engine_of, parse_body, read_json
from fumehood.http.caller import require_admin, require_authority
from fumehood.http.operation import Needs, Operation
from fumehood.policy.model import ExplainWish, Explanation, PolicyStatus


async def show_policy(request: Request) -> Response:
    """Show the current rules, their version, and how often shadow rules matched.

    Needs `approve` or `admin`.
    """
    await require_authority(request)
    return answer(request, engine_of(request).policy.status())


async def explain_call(request: Request) -> Response:
    """Explain the policy's decision for a call, rule by rule. Nothing is called.

    Needs `approve` or `admin`. Budgets are assumed to suffice.
    """
    document = await read_json(request)
    await require_authority(request)
    wish = parse_body(ExplainWish, document)
    return answer(request, engine_of(request).policy.explain(wish))


async def reload_policy(request: Request) -> Response:
    """Reload the policy file. A faulty one is INVALID_PARAMS, and the old rules stay."""
    by = await require_admin(request)
    return answer(request, await engine_of(request).policy.reload(by))


OPERATIONS = [
    Operation("GET", "/v1/policy", show_policy, Needs.APPROVER, data=PolicyStatus),
    Operation(
        "POST",
        "/v1/policy/explain",
        explain_call,
        Needs.APPROVER,
        data=Explanation,
        body=ExplainWish,
        errors=frozenset({ResourceNotFound, ToolNotFound, ToolDisabled, ToolDeprecated}),
    ),
    Operation(
        "POST",
        "/v1/policy/reload",
        reload_policy,
        Needs.ADMIN,
        data=PolicyStatus,
        errors=frozenset({InvalidParams}),
    ),
]
