"""HTTP routes for processes: of the caller's own sessions, or on the control socket of any.

To start a process or write to it, clients call a tool (`start_process`, `write_process`), so that
gates decide on it and the call log records it. On the control socket, only `admin` may see the
output of a process or end it. This gives administrators no additional access, because they could
create a token for the session's owner.
"""

from __future__ import annotations

from typing import Annotated

import anyio
from pydantic import Field

from fumehood.answers import ProcessOutput, SessionProcess
from fumehood.core.errors import ResourceNotFound
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.session import TURN_S, OwnedSession
from fumehood.core.value import Value
from fumehood.engine import Engine
from fumehood.http.caller import require_authority
from fumehood.http.endpoint import As, Needs, endpoint
from fumehood.http.routes.sessions import FILE_ERRORS, SessionId
from fumehood.processes.in_engine import ProcessesPart
from fumehood.processes.service import SessionProcesses

MAX_WAIT_S = 30.0
LOOK_S = 0.1
"""Seconds between checks for new output while a request waits for it."""


class OutputQuery(Value):
    """The query parameters that say which output of a process is read, and how long the engine
    waits for output.
    """

    after: int = Field(
        default=0,
        ge=0,
        lt=1 << 53,
        description="`data.offset` of the previous answer, to continue from there.",
    )
    wait_seconds: float = Field(
        default=0,
        ge=0,
        le=MAX_WAIT_S,
        description="Seconds to wait for output if there is none yet.",
    )


class StopQuery(Value):
    """The query parameters that say how a process is ended."""

    grace_s: float = Field(
        default=5, ge=0, le=30, description="Seconds between SIGTERM and SIGKILL."
    )


ProcessName = Annotated[str, "The process's name."]
ProcessAnswer = Annotated[
    SessionProcess, As("process", "ProcessAnswer", "The current state of a process.")
]


def _processes(engine: Engine, caller: Principal, session_id: str) -> SessionProcesses:
    return SessionProcesses(engine.sessions.access(caller, session_id))


def _any_processes(engine: Engine, session_id: str) -> tuple[OwnedSession, SessionProcesses]:
    """Return a session of any principal, and its processes. Requests to these processes do not
    extend the session's idle time.

    Raises:
        ResourceNotFound: the session does not exist.
    """
    session = engine.overview.session(session_id)
    owner = Principal(session.principal_id)
    return session, SessionProcesses(engine.sessions.access(owner, session.id, is_use=False))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="processes",
)
async def list_session_processes(
    engine: Engine, caller: Principal, session_id: SessionId
) -> Annotated[
    tuple[SessionProcess, ...],
    As("items", "ProcessList", "Running processes, and the last ended ones."),
]:
    """List the background processes of a session: running ones, and the last ended ones.

    A stopped session has no processes.
    """
    found = await _processes(engine, caller, session_id).ask({"do": "list"})
    return tuple(map(SessionProcess.model_validate, found["processes"]))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes/{process}",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="process",
)
async def show_session_process(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName
) -> ProcessAnswer:
    """Show one background process of a session."""
    found = await _processes(engine, caller, session_id).ask({"do": "list"})
    for known in found["processes"]:
        if known["name"] == process:
            return SessionProcess.model_validate(known)
    raise ResourceNotFound("This session has no such process.", fields=["process"])


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes/{process}/output",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S + MAX_WAIT_S,
    client="process_output",
)
async def read_session_process(
    engine: Engine,
    caller: Principal,
    session_id: SessionId,
    process: ProcessName,
    query: OutputQuery,
) -> ProcessOutput:
    """Read the output of a process (stdout and stderr together), at most 64 KB.

    To follow the output, repeat the request with `after` set to the answer's `offset`, and with
    `wait_seconds`.
    """
    processes = _processes(engine, caller, session_id)
    asked: JsonObject = {"do": "read", "name": process, "after": query.after}
    give_up = anyio.current_time() + query.wait_seconds
    while True:
        piece = ProcessOutput.model_validate((await processes.ask(asked))["output"])
        if piece.text or piece.ended or anyio.current_time() >= give_up:
            return piece
        await anyio.sleep(LOOK_S)


@endpoint(
    "DELETE",
    "/v1/sessions/{session_id}/processes/{process}",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="stop_process",
)
async def stop_session_process(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName, query: StopQuery
) -> ProcessAnswer:
    """End a process and everything that it has started. The output can still be read."""
    asked: JsonObject = {"do": "stop", "name": process, "grace_s": query.grace_s}
    answer = await _processes(engine, caller, session_id).ask(asked)
    return SessionProcess.model_validate(answer["process"])


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
    found = await _any_processes(engine, session_id)[1].ask({"do": "list"})
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
        await _any_processes(engine, session_id)[1].read_end(process)
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
    session, processes = _any_processes(engine, session_id)
    part = engine.part(ProcessesPart)
    stopped = await part.stop(processes, session, process, query.grace_s, caller)
    return SessionProcess.model_validate(stopped)


OPERATIONS = [
    list_session_processes,
    show_session_process,
    read_session_process,
    stop_session_process,
]
CONTROL_OPERATIONS = [
    list_processes_of_session,
    read_process_of_session,
    stop_process_of_session,
]
