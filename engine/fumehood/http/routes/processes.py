"""`/v1/sessions/{id}/processes`: what runs beside the calls of a caller's own session.

A process is started, and written to, by a call of a tool (`start_process`, `write_process`): so it
is decided on and recorded as a call. Only the owner has access.
"""

from __future__ import annotations

from typing import Annotated

import anyio
from pydantic import BaseModel, ConfigDict, Field

from fumehood.answers import ProcessOutput, SessionProcess
from fumehood.core.errors import InvalidParams, ResourceNotFound, SandboxUnavailable
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.session import TURN_S
from fumehood.engine import Engine
from fumehood.http.endpoint import As, Needs, endpoint
from fumehood.http.routes.sessions import SessionId

MAX_WAIT_S = 30.0
LOOK_S = 0.1
"""Seconds between looks for new output, while a request waits for it."""

ERRORS = frozenset({InvalidParams, ResourceNotFound, SandboxUnavailable})

ProcessName = Annotated[str, "The process's name."]
ProcessAnswer = Annotated[SessionProcess, As("process", "ProcessAnswer", "A process as it is now.")]


class OutputQuery(BaseModel):
    """Which output to read."""

    model_config = ConfigDict(extra="forbid")

    after: int = Field(
        default=0, ge=0, lt=1 << 53, description="`data.offset` of the previous answer."
    )
    wait_seconds: float = Field(
        default=0, ge=0, le=MAX_WAIT_S, description="How long to wait for more than nothing."
    )


class StopQuery(BaseModel):
    """How to end a process."""

    model_config = ConfigDict(extra="forbid")

    grace_s: float = Field(
        default=5, ge=0, le=30, description="Seconds between SIGTERM and SIGKILL."
    )


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes",
    Needs.CALLER,
    errors=ERRORS,
    work_s=TURN_S,
    client="processes",
)
async def list_session_processes(
    engine: Engine, caller: Principal, session_id: SessionId
) -> Annotated[
    tuple[SessionProcess, ...], As("items", "ProcessList", "Running ones, and the last ended ones.")
]:
    """List the processes that run in a session beside its calls, and the last ended ones.

    A stopped session has none.
    """
    found = await engine.sessions.processes(caller, session_id).ask({"do": "list"})
    return tuple(map(SessionProcess.model_validate, found["processes"]))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes/{process}",
    Needs.CALLER,
    errors=ERRORS,
    work_s=TURN_S,
    client="process",
)
async def show_session_process(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName
) -> ProcessAnswer:
    """Show one process of a session."""
    found = await engine.sessions.processes(caller, session_id).ask({"do": "list"})
    for one in found["processes"]:
        if one["name"] == process:
            return SessionProcess.model_validate(one)
    raise ResourceNotFound("This session has no such process.", fields=["process"])


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/processes/{process}/output",
    Needs.CALLER,
    errors=ERRORS,
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
    """Read what a process has printed, both streams together, at most 64 KB.

    To follow it, ask again with the answer's `offset`, and wait.
    """
    processes = engine.sessions.processes(caller, session_id)
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
    errors=ERRORS,
    work_s=TURN_S,
    client="stop_process",
)
async def stop_session_process(
    engine: Engine, caller: Principal, session_id: SessionId, process: ProcessName, query: StopQuery
) -> ProcessAnswer:
    """End a process and everything that it has started. Its output can still be read."""
    asked: JsonObject = {"do": "stop", "name": process, "grace_s": query.grace_s}
    answer = await engine.sessions.processes(caller, session_id).ask(asked)
    return SessionProcess.model_validate(answer["process"])


OPERATIONS = [
    list_session_processes,
    show_session_process,
    read_session_process,
    stop_session_process,
]
