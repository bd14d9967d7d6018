"""HTTP routes of projects: claims of directories, sessions made from them, and their changes.

The operation that makes sessions replaces the kernel's: a new session can have a project.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from starlette.requests import Request

from fumehood.answers import ProjectDiff
from fumehood.core.call import Id
from fumehood.core.errors import (
    InternalError,
    QuotaExceeded,
    ResourceNotFound,
    SandboxUnavailable,
    ShuttingDown,
)
from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.session import MAKING_S, TURN_S, Project
from fumehood.core.session import NewSession as KernelSession
from fumehood.core.value import StrictValue
from fumehood.engine import Engine
from fumehood.http.caller import require_own_user
from fumehood.http.endpoint import As, Needs, endpoint
from fumehood.http.routes.sessions import (
    FILE_ERRORS,
    SessionAnswer,
    SessionId,
    refuse_while_draining,
)
from fumehood.projects.in_engine import ProjectsPart
from fumehood.projects.service import Projects


def _before_agent(schema: JsonObject) -> None:
    for name in ("agent_id", "preset"):
        schema["properties"][name] = schema["properties"].pop(name)


class NewSession(KernelSession):
    """The body of `POST /v1/sessions`."""

    model_config = ConfigDict(json_schema_extra=_before_agent)

    project: Id | None = Field(
        default=None,
        description="The id of a claimed project directory, whose files are copied into the "
        "session.",
    )


class NewProject(StrictValue):
    """The body of `POST /v1/projects`."""

    directory: str = Field(
        pattern=r"^/[^\x00]*$",
        max_length=4096,
        description="The absolute path of a directory on the engine's host.",
    )
    everything: bool = Field(
        default=False,
        description="Also copy files that the directory's `.gitignore` files exclude.",
    )


def _projects(engine: Engine) -> Projects:
    return engine.part(ProjectsPart).projects


@endpoint(
    "POST",
    "/v1/sessions",
    Needs.CALLER,
    errors=[QuotaExceeded, ResourceNotFound, SandboxUnavailable, ShuttingDown, InternalError],
    work_s=MAKING_S,
    before_reading=refuse_while_draining,
)
async def create_session(engine: Engine, body: NewSession, caller: Principal) -> SessionAnswer:
    """Create a session, which is a container for the caller's calls alone.

    Every field is optional. A call runs in the session if the call's option `session_id` names it.
    """
    return await _projects(engine).create(caller, **body.model_dump(exclude_unset=True))


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/diff",
    Needs.CALLER,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="session_diff",
)
async def show_session_diff(
    engine: Engine, caller: Principal, session_id: SessionId
) -> ProjectDiff:
    """Show the changes in a session since its project was copied into it.

    Waits for the session's running and waiting calls to finish first.
    """
    return ProjectDiff.model_validate(await _projects(engine).difference(caller, session_id))


@endpoint("POST", "/v1/projects", Needs.CALLER)
async def claim_project(
    request: Request, engine: Engine, caller: Principal, body: NewProject
) -> Annotated[Project, As("project", "ProjectAnswer", "The claimed directory.")]:
    """Claim a directory on the engine's host, so that its files can be copied into new sessions.

    Only the engine's own user may claim a directory, over the Unix socket. To prove that it can
    write to the directory, the caller creates an empty file in it, with the name in the answer's
    field `proof`. Then it creates a session whose `project` is the `id` in the answer. The first
    such session removes the file. Only the tool `apply_workspace` writes changes back into the
    directory, after an approval.
    """
    require_own_user(request)
    return _projects(engine).claim(body.directory, everything=body.everything)


@endpoint(
    "GET",
    "/v1/sessions/{session_id}/diff",
    Needs.ADMIN,
    errors=FILE_ERRORS,
    work_s=TURN_S,
    client="sessions.diff",
)
async def show_diff_of_session(
    engine: Engine, caller: Principal, session_id: SessionId
) -> ProjectDiff:
    """Show the changes in any principal's session since its project was copied into it.

    The engine's log records who read the changes.
    """
    session = engine.overview.session(session_id)
    found = await _projects(engine).difference(Principal(session.principal_id), session.id)
    engine.log.info("session.diff_read", session_id=session.id, by=caller.id)
    return ProjectDiff.model_validate(found)


OPERATIONS = [create_session, show_session_diff, claim_project]
CONTROL_OPERATIONS = [show_diff_of_session]
