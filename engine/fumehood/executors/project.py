"""The executor of tools for the project of a session: what has changed in it, and its way back.

Host side, between `pipeline/execute` and the project of a lease. No code of the caller runs.
Invariant: `apply` writes only what its approval shows, whose digest is `ToolRun.expected`.
"""

from __future__ import annotations

from fumehood.core.errors import EndedBy, InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import MAX_DATA_BYTES, Outcome
from fumehood.sandbox.session_use import Project, SessionLease
from fumehood.sandbox.wall import Lease

_PLACEMENT = Placement(
    "container",
    "container",
    "the changed files are read in the container of the call's session; the engine itself compares "
    "them with the project directory, and writes there",
    isolations=A_SESSION,
    is_of_session=True,
)


def project_of(lease: Lease) -> Project:
    """Return the project of a leased session. Raises InvalidParams."""
    project = lease.project if isinstance(lease, SessionLease) else None
    if project is None:
        raise InvalidParams(
            "This session was not made from a project directory.", fields=["options.session_id"]
        )
    return project


class ProjectDiffExecutor(Executor):
    """Tells what has changed."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        return _outcome(run, await project_of(run.lease).difference(run.lease))


class ProjectApplyExecutor(Executor):
    """Writes what has changed into the project directory."""

    has_preview = True

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        effect: Effect = await project_of(lease).effect(lease)
        return effect

    async def run(self, run: ToolRun) -> Outcome:
        if run.expected is None:
            raise InvalidParams("A project is written only after a human has seen the changes.")
        return _outcome(run, await project_of(run.lease).apply(run.lease, run.expected))


def _outcome(run: ToolRun, data: JsonObject) -> Outcome:
    session = {"id": run.domain.session_id, "state": None, "variables_bytes": None}
    return Outcome(
        EndedBy.OK, "session", data={**data, "session": session}, max_data_bytes=MAX_DATA_BYTES
    )
