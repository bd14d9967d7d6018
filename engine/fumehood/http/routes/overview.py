"""All principals' calls, sessions and metrics on the control socket, and the engine's own state.

Requests for calls, sessions and metrics need `approve` or `admin`. Only `admin` may see a session's
files and the output of its processes, or end the session or its processes. These rights give
administrators no additional access, because they could create a token for the session's owner.

The state of the engine: health, readiness, the OpenAPI document and usage, on both sockets.
"""

from __future__ import annotations

from typing import Annotated

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.answers import (
    CallDetails,
    CallList,
    CancelledCall,
    Pagination,
    ProcessOutput,
    SessionFileList,
    SessionProcess,
)
from fumehood.core.call_log import (
    AllCallsQuery,
    CallSeries,
    FiguresQuery,
    RulesToTry,
    SeriesQuery,
    ToolFiguresList,
    TriedRules,
)
from fumehood.core.errors import (
    InvalidParams,
    PermissionDenied,
    RateLimited,
    ResourceNotFound,
)
from fumehood.core.identity import Principal
from fumehood.core.session import TURN_S, OwnedSession
from fumehood.core.status import EngineSummary, Health, Readiness
from fumehood.core.usage_table import AllUsageQuery, UsageQuery, UsageTable
from fumehood.engine import Engine
from fumehood.executors.session_files import SessionFiles
from fumehood.http.answers import engine_of, envelope_response
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import ANY_MEDIA, As, Given, Needs, endpoint
from fumehood.http.routes.calls import BlobQuery, sent_blob
from fumehood.http.routes.sessions import (
    FILE_ERRORS,
    SESSION,
    FileListQuery,
    FilePath,
    ProcessAnswer,
    ProcessName,
    SessionId,
    StopQuery,
    sent_file,
)

CallId = Annotated[str, "The `call_id` of an envelope."]


def _files(request: Request, _: Principal) -> SessionFiles:
    engine = engine_of(request)
    session = engine.overview.session(request.path_params["session_id"])
    return engine.session_files(session.id, Principal(session.principal_id))


OwnedSessionAnswer = Annotated[
    OwnedSession,
    As("session", "OwnedSessionAnswer", "The current state of a session, with its owner."),
]
Files = Annotated[SessionFiles, Given(_files, {"session_id": SESSION})]


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
    page = await engine.overview.calls(query, caller)
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
    """Show one call of any principal, with everything that is kept of it.

    Needs the scope `approve` or `admin`. If the call needed no approval, its arguments and answer
    are shown only with `admin`.
    """
    return await engine.overview.call(call_id, caller)


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
    await engine.overview.cancel(call_id, caller)
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
    blob, file = await engine.overview.open_blob(
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
    return envelope_response(await engine.overview.repeat_as_dry_run(call_id))


@endpoint("GET", "/v1/figures", Needs.APPROVER, authorize=require_authority, client="figures")
async def show_figures(engine: Engine, query: FiguresQuery) -> ToolFiguresList:
    """Show the success and latency of each tool's calls in the last `hours` hours.

    Needs the scope `approve` or `admin`. The metrics are computed from the call log.
    """
    return await engine.overview.figures(query.hours)


@endpoint("GET", "/v1/figures/series", Needs.APPROVER, authorize=require_authority, client="series")
async def show_series(engine: Engine, query: SeriesQuery) -> CallSeries:
    """Show the number, failures, latency and cost of calls by hour or day.

    Needs the scope `approve` or `admin`. The metrics are computed from the call log.
    """
    return await engine.overview.series(query)


@endpoint("GET", "/v1/engine", Needs.APPROVER, authorize=require_authority, client="engine")
async def show_engine(engine: Engine) -> EngineSummary:
    """Show the engine's version, walls, containers, sessions, circuits and number of running calls.

    Needs the scope `approve` or `admin`.
    """
    return engine.overview.summary(engine.ready())


@endpoint(
    "GET", "/v1/sessions", Needs.APPROVER, authorize=require_authority, client="sessions.list"
)
async def list_all_sessions(
    engine: Engine,
) -> Annotated[
    tuple[OwnedSession, ...],
    As(
        "items",
        "OwnedSessionList",
        "The sessions of all principals: active ones, then recently ended ones, newest first.",
    ),
]:
    """List the sessions of all principals: active ones, then those that ended in the last day.

    Needs the scope `approve` or `admin`.
    """
    return engine.overview.sessions()


@endpoint(
    "GET",
    "/v1/sessions/{session_id}",
    Needs.APPROVER,
    authorize=require_authority,
    errors=[ResourceNotFound],
    client="sessions.show",
)
async def show_any_session(engine: Engine, session_id: SessionId) -> OwnedSessionAnswer:
    """Show one session of any principal. Needs the scope `approve` or `admin`."""
    return engine.overview.session(session_id)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}",
    Needs.ADMIN,
    errors=[ResourceNotFound],
    work_s=TURN_S,
    client="sessions.end",
)
async def end_any_session(
    engine: Engine, caller: Principal, session_id: SessionId
) -> OwnedSessionAnswer:
    """End a session of any principal and everything that runs in it, and delete its files.

    The audit chain records this as an administrative change. A session that has already ended is
    not changed.
    """
    return await engine.overview.end_session(session_id, caller)


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes",
    Needs.APPROVER,
    authorize=require_authority,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.processes",
)
async def list_processes_of_session(
    engine: Engine, session_id: SessionId
) -> Annotated[
    tuple[SessionProcess, ...],
    As("items", "ProcessList", "Running processes, and the last ended ones."),
]:
    """List the background processes of any principal's session: running and last ended ones.

    Needs the scope `approve` or `admin`. A stopped session has no processes, and the processes of a
    paused session cannot be listed. Listing processes does not extend the session's idle time.
    """
    found = await engine.overview.processes(session_id).ask({"do": "list"})
    return tuple(map(SessionProcess.model_validate, found["processes"]))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes/{process}/output",
    Needs.ADMIN,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.process_output",
)
async def read_process_of_session(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName
) -> ProcessOutput:
    """Read the end of the output of a process in any principal's session, at most 64 KB.

    `skipped` is the number of output bytes before the returned text.
    """
    return ProcessOutput.model_validate(
        await engine.overview.processes(session_id).read_end(process)
    )


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}/processes/{process}",
    Needs.ADMIN,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.stop_process",
)
async def stop_process_of_session(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName, query: StopQuery
) -> ProcessAnswer:
    """End a process in any principal's session, and everything that the process has started.

    The audit chain records this as an administrative change. A process that has already ended is
    not changed.
    """
    stopped = await engine.overview.stop_process(session_id, process, query.grace_s, caller)
    return SessionProcess.model_validate(stopped)


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files",
    Needs.ADMIN,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.files",
)
async def list_files_of_session(
    caller: Principal, files: Files, query: FileListQuery
) -> SessionFileList:
    """List the files of any principal's session, sorted by path, one page at a time."""
    page = await files.page(
        query.path, recursive=query.recursive, limit=query.limit, cursor=query.cursor
    )
    return SessionFileList(items=page.items, pagination=Pagination(**page.pagination))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/files/{path:path}",
    Needs.ADMIN,
    errors=FILE_ERRORS | {RateLimited},
    media=ANY_MEDIA,
    client=None,
)
async def get_file_of_session(
    request: Request, engine: Engine, caller: Principal, files: Files, path: FilePath
) -> Response:
    """Download a file of any principal's session.

    The engine's log records who downloaded the file.
    """
    response = await sent_file(request, engine, files, path)
    engine.log.info("session.file_read", session_id=files.session_id, by=caller.id)
    return response


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
    return await engine.overview.try_rules(body, caller)


# -- the engine about itself ----------------------------------------------------------------


@endpoint("GET", "/v1/health", Needs.NOBODY, data=Health, plain=(200,))
async def health() -> Response:
    """Report that the engine's process is running."""
    return JSONResponse(Health().model_dump(mode="json"))


@endpoint("GET", "/v1/ready", Needs.NOBODY, data=Readiness, plain=(200, 503))
async def ready(engine: Engine) -> Response:
    """Show whether calls are served, and the limits that each wall enforces.

    The status is 200 if calls are served, and 503 otherwise.
    """
    readiness = engine.ready()
    status = 200 if readiness.status == "ready" else 503
    return JSONResponse(readiness.model_dump(mode="json"), status_code=status)


@endpoint("GET", "/v1/openapi.json", Needs.NOBODY, plain=(200,), client=None)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of this socket."""
    document = await anyio.to_thread.run_sync(request.app.openapi)
    return JSONResponse(document)


@endpoint("GET", "/v1/usage", Needs.CALLER, client="usage")
async def show_usage(engine: Engine, caller: Principal, query: UsageQuery) -> UsageTable:
    """Show the usage of the caller's own calls, and what is left of the caller's budgets.

    Usage is summed from the call log, which keeps a limited number of calls.
    """
    return await engine.usage_of(caller, query)


@endpoint("GET", "/v1/usage", Needs.ADMIN, client="usage")
async def show_all_usage(engine: Engine, query: AllUsageQuery) -> UsageTable:
    """Show the usage of all principals, and what is left of every budget.

    Usage is summed from the call log, which keeps a limited number of calls of each principal.
    """
    return await engine.all_usage(query)


COMMON = [health, ready, openapi]
OPERATIONS = [show_usage, *COMMON]
CONTROL_OPERATIONS = [
    list_all_calls,
    show_any_call,
    cancel_any_call,
    get_blob_of_call,
    repeat_as_dry_run,
    show_figures,
    show_series,
    show_engine,
    list_all_sessions,
    show_any_session,
    end_any_session,
    list_processes_of_session,
    read_process_of_session,
    stop_process_of_session,
    list_files_of_session,
    get_file_of_session,
    try_rules,
    show_all_usage,
    *COMMON,
]
