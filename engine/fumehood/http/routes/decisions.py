"""`POST /v1/decisions`: may a caller run a tool that is not this engine's?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fumehood.core.decision import Decision, DecisionBody, decided
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.caller import principal_of
from fumehood.http.endpoint import Needs, endpoint
from fumehood.http.routes.calls import CALL_ERRORS, run_plainly


@endpoint(
    "POST",
    "/v1/decisions",
    Needs.CALLER,
    authorize=principal_of,
    errors=CALL_ERRORS,
    data=Decision,
    client=None,
)
async def decide(
    request: Request, engine: Engine, body: DecisionBody, caller: Principal | None
) -> Response:
    """Decide about a call of a tool that is not this engine's, and run nothing.

    The caller may run the tool only if the decision is `allow`, and then once. A denial is an
    answer, too; with an error nothing was decided, and the tool must not run.
    """
    tool = body.reference
    return await run_plainly(
        request, engine, tool, body.call, caller, lambda envelope: decided(envelope, tool)
    )


OPERATIONS = [decide]
