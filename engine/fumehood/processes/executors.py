"""The executors of the tools for a session's background processes.

Host side. The guest starts the processes, as the same user and with the same system call filter and
limits as the session's programs. None of the caller's code runs in the engine.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

from fumehood.executors.base import Executor, ToolRun, in_session, outcome_in_session
from fumehood.executors.outcome import Outcome
from fumehood.observe.clock import timestamp
from fumehood.processes.service import SessionProcesses
from fumehood.sandbox.session_use import SessionLease


class ProcessExecutor(Executor):
    """The base class of the executors for a session's background processes. Each subclass carries
    out one action, whose name is `action`.
    """

    action: ClassVar[str]
    place = in_session(
        "processes run in the guest, in the container of the call's session, as its unprivileged "
        "user"
    )

    async def run(self, run: ToolRun) -> Outcome:
        assert isinstance(run.lease, SessionLease)
        processes = run.lease.part(SessionProcesses)
        assert processes is not None
        given = {name: value for name, value in run.arguments.items() if value is not None}
        data = await processes.ask({**given, "do": self.action})
        if self.action == "read":
            data = data["output"]
        for process in [*data.get("processes", ()), *filter(None, [data.get("process")])]:
            process["started_at"] = timestamp(datetime.fromtimestamp(process["started_at"], UTC))
        return outcome_in_session(run, data)


class StartExecutor(ProcessExecutor):
    """Starts a process."""

    action = "start"


class ListExecutor(ProcessExecutor):
    """Lists the running processes and those that ended most recently."""

    action = "list"


class ReadExecutor(ProcessExecutor):
    """Reads a process's output."""

    action = "read"


class WriteExecutor(ProcessExecutor):
    """Writes to a process's standard input."""

    action = "write"


class StopExecutor(ProcessExecutor):
    """Ends a process and everything that it has started."""

    action = "stop"
