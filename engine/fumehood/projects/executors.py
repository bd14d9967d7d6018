"""The executors of the tools that work on a session's project. They run no code of the caller.

Host side. Invariant: `apply` writes only the changes that a human has approved. `ToolRun.expected`
is the digest of these changes.
"""

from __future__ import annotations

from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, ToolRun, in_session, outcome_in_session
from fumehood.executors.effects import Effect
from fumehood.executors.outcome import Outcome
from fumehood.projects.service import project_of
from fumehood.sandbox.wall import Lease


class ProjectDiffExecutor(Executor):
    """Shows the changes that a session has made to its project."""

    place = in_session(
        "the changed files are read in the container of the call's session; the engine itself "
        "compares them with the project directory, and writes there"
    )

    async def run(self, run: ToolRun) -> Outcome:
        return outcome_in_session(run, await project_of(run.lease).difference(run.lease))


class ProjectApplyExecutor(ProjectDiffExecutor):
    """Writes the changes that a human has approved into the project directory on the host. It
    writes no other changes.
    """

    has_preview = True

    async def preview(
        self, tool: ToolDefinition, arguments: JsonObject, limits: Limits, lease: Lease
    ) -> Effect | None:
        return await project_of(lease).effect(lease)

    async def run(self, run: ToolRun) -> Outcome:
        if run.expected is None:
            raise InvalidParams("A project is written only after a human has seen the changes.")
        project, call_id = project_of(run.lease), run.request.call_id
        return outcome_in_session(run, await project.apply(run.lease, run.expected, call_id))
