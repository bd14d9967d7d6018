"""HTTP routes for all principals' calls, the engine's state, and tries of policy rules.

On the control socket. Each request needs the scope `approve` or `admin`. The routes give
administrators no additional access, because they could create a token for each caller.
"""

from __future__ import annotations

from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from fumehood.answers import CallDetails, CallList, CancelledCall, Pagination
from fumehood.core.call_log import CallSeries, ToolFiguresList, TriedRules
from fumehood.core.errors import InvalidParams, PermissionDenied, ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.status import EngineSummary
from fumehood.engine import Engine
from fumehood.http.answers import envelope_response
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import ANY_MEDIA, Needs, endpoint
from fumehood.http.routes.calls import BlobQuery, sent_blob
from fumehood.overview.in_engine import EngineOverview
from fumehood.overview.queries import AllCallsQuery, FiguresQuery, RulesToTry, SeriesQuery

CallId = Annotated[str, "The `call_id` of an envelope."]


@endpoint(
    "GET",
    "/v1/calls",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound, PermissionDenied],
    client="calls.list",
)
async def list_all_calls(engine: Engine, caller: Principal, query: AllCallsQuery) -> CallList:
    """List the calls of all principals, newest first.

    If `state` is `running`, only calls that are running now are listed, oldest first. Needs the
    scope `approve` or `admin`; a search with `text` needs `admin`. A page that is not the last one
    may have fewer items than `limit`.
    """
    page = await engine.part(EngineOverview).view.calls(query, caller)
    return CallList(items=page.items, pagination=Pagination.of(page))


@endpoint(
    "GET",
    "/v1/calls/{call_id}",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound],
    client="calls.show",
)
async def show_any_call(engine: Engine, caller: Principal, call_id: CallId) -> CallDetails:
    """Show one call of any principal, with everything that is stored about it.

    Needs the scope `approve` or `admin`. If the call needed no approval, its arguments and answer
    are shown only with `admin`.
    """
    return await engine.part(EngineOverview).view.call(call_id, caller)


@endpoint(
    "POST",
    "/v1/calls/{call_id}/cancel",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    client="calls.cancel",
)
async def cancel_any_call(engine: Engine, caller: Principal, call_id: CallId) -> CancelledCall:
    """Cancel a running call of any principal, and wait until its program has ended.

    The audit chain records the cancellation as an administrative change.
    """
    await engine.part(EngineOverview).view.cancel(call_id, caller)
    return CancelledCall(call_id=call_id, cancelled=True)


@endpoint(
    "GET",
    "/v1/calls/{call_id}/blobs/{blob_id}",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound, PermissionDenied],
    media=ANY_MEDIA,
    client=None,
)
async def get_blob_of_call(
    request: Request,
    engine: Engine,
    caller: Principal,
    call_id: CallId,
    blob_id: Annotated[str, "The blob's id, `blob_…`."],
    query: BlobQuery,
) -> Response:
    """Download a blob of a call's answer.

    Needs the scope `admin` or, for a call that needed approval, `approve`. `expires` and
    `signature` are the query parameters of the blob's address in the answer.
    """
    blob, file = await engine.part(EngineOverview).view.open_blob(
        call_id, blob_id, caller, expires=query.expires, signature=query.signature
    )
    return sent_blob(request, blob, file)


@endpoint(
    "POST",
    "/v1/calls/{call_id}/dry-run",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound, PermissionDenied],
    has_tool_codes=True,
    client=None,
)
async def repeat_as_dry_run(engine: Engine, call_id: CallId) -> Response:
    """Repeat a call that needed approval as a dry run, with the rights of the call's caller.

    The tool does not run. Needs the scope `approve` or `admin`. The answer is the envelope of the
    dry run.
    """
    return envelope_response(await engine.part(EngineOverview).view.repeat_as_dry_run(call_id))


@endpoint("GET", "/v1/figures", Needs.APPROVER, authorize=require_authority, client="figures")
async def show_figures(engine: Engine, query: FiguresQuery) -> ToolFiguresList:
    """Show the success and latency of each tool's calls in the last `hours` hours.

    Needs the scope `approve` or `admin`. The metrics are computed from the call log.
    """
    return await engine.part(EngineOverview).view.figures(query.hours)


@endpoint("GET", "/v1/figures/series", Needs.APPROVER, authorize=require_authority, client="series")
async def show_series(engine: Engine, query: SeriesQuery) -> CallSeries:
    """Show the number, failures, latency and cost of calls by hour or day.

    Needs the scope `approve` or `admin`. The metrics are computed from the call log.
    """
    return await engine.part(EngineOverview).view.series(query)


@endpoint("GET", "/v1/engine", Needs.APPROVER, authorize=require_authority, client="engine")
async def show_engine(engine: Engine) -> EngineSummary:
    """Show the engine's version, walls, containers, sessions, circuits and number of running calls.

    Needs the scope `approve` or `admin`.
    """
    return engine.part(EngineOverview).view.summary(engine.ready())


@endpoint(
    "POST",
    "/v1/policy/try",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[InvalidParams],
    client="policy.try_rules",
)
async def try_rules(engine: Engine, caller: Principal, body: RulesToTry) -> TriedRules:
    """Try rules against the calls of the last `days` days. The rules in force are not changed.

    Needs the scope `approve` or `admin`. With `admin`, conditions are compared with the stored
    arguments of calls. Otherwise, and for calls whose arguments are not stored, every condition is
    assumed to hold.
    """
    return await engine.part(EngineOverview).view.try_rules(body, caller)


CONTROL_OPERATIONS = [
    list_all_calls,
    show_any_call,
    cancel_any_call,
    get_blob_of_call,
    repeat_as_dry_run,
    show_figures,
    show_series,
    show_engine,
    try_rules,
]
