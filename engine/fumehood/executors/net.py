"""The executor of `net`: it sends a request that a human has approved.

Host side. The request itself is in memory, with the program that waits for its answer. Invariant: a
request whose program has ended is never sent, and none is sent twice.
"""

from __future__ import annotations

from fumehood.core.errors import ApprovalExpired, EndedBy
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.outcome import Outcome

_PLACEMENT = Placement(
    "host", "host", "the gateway sends a program's requests from the engine's own process"
)


class NetExecutor(Executor):
    """Requests of programs."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        send = run.upstreams.gateway.held.pop(run.request.call_id, None)
        if send is None:
            raise ApprovalExpired(
                "The program that wanted to send this request has ended, so nothing was sent."
            )
        error = await send()
        data = {"sent": True} if error is None else None
        return Outcome(EndedBy.OK, "none", data=data, error=error)
