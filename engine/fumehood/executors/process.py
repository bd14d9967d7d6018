"""The executor of tools for the processes of a session, which run beside its calls.

Host side, between `pipeline/execute` and the processes of a lease. The guest starts a process as
the user of the session's programs, with their filter and limits.
"""

from __future__ import annotations

from datetime import UTC, datetime

from fumehood.core.errors import EndedBy
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import A_SESSION, Executor, Placement, ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.observe.clock import timestamp
from fumehood.sandbox.session_use import SessionLease

_PLACEMENT = Placement(
    "container",
    "container",
    "processes run in the guest, in the container of the call's session, as its unprivileged user",
    isolations=A_SESSION,
    is_of_session=True,
)


class ProcessExecutor(Executor):
    """One action on the processes of a session: start, list, read, write or stop."""

    def __init__(self, action: str) -> None:
        self._action = action

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        assert isinstance(run.lease, SessionLease)
        assert run.lease.processes is not None
        given = {name: value for name, value in run.arguments.items() if value is not None}
        data = await run.lease.processes({"do": self._action, **given})
        if self._action == "read":
            data = data["output"]
        for one in [*data.get("processes", ()), *filter(None, [data.get("process")])]:
            one["started_at"] = timestamp(datetime.fromtimestamp(one["started_at"], UTC))
        session = {"id": run.domain.session_id, "state": None, "variables_bytes": None}
        return Outcome(EndedBy.OK, "session", data={**data, "session": session})
