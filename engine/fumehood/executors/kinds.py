"""The table of executors: one row for each kind of tool that this version can run.

Host side. Executors of a few lines are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fumehood.core.decision import ALLOWED
from fumehood.core.errors import ApprovalExpired, EndedBy
from fumehood.core.languages import LANGUAGES
from fumehood.core.tool import DECISION, NET_EXECUTOR
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.expression import ExpressionExecutor, RestrictedPythonExecutor
from fumehood.executors.fetch import FetchExecutor
from fumehood.executors.function import FunctionExecutor
from fumehood.executors.mcp import McpExecutor
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import ProgramExecutor
from fumehood.executors.rest import RestExecutor
from fumehood.executors.workspace import (
    ProcessExecutor,
    ProjectApplyExecutor,
    ProjectDiffExecutor,
    WorkspaceExecutor,
)


class _DecisionExecutor(Executor):
    """Tools that are not this engine's."""

    place = Placement(
        "external", "host", "the caller runs this tool itself; the engine decides", is_outside=True
    )

    async def run(self, run: ToolRun) -> Outcome:
        return Outcome(EndedBy.OK, "none", data=ALLOWED)


class _NetExecutor(Executor):
    """Sends a program's request that a human has approved, once, unless its program has ended.

    The request itself is in memory, with the program that waits for its answer.
    """

    place = Placement(
        "host", "host", "the gateway sends a program's requests from the engine's own process"
    )

    async def run(self, run: ToolRun) -> Outcome:
        send = run.upstreams.gateway.held.pop(run.request.call_id, None)
        if send is None:
            raise ApprovalExpired(
                "The program that wanted to send this request has ended, so nothing was sent."
            )
        error = await send()
        data = {"sent": True} if error is None else None
        return Outcome(EndedBy.OK, "none", data=data, error=error)


EXECUTORS: Mapping[str, Executor] = MappingProxyType(
    {
        "expression": ExpressionExecutor(),
        "restricted_python": RestrictedPythonExecutor(),
        "function": FunctionExecutor(),
        DECISION: _DecisionExecutor(),
        NET_EXECUTOR: _NetExecutor(),
        "http": RestExecutor(),
        "http:fetch": FetchExecutor(),
        "mcp": McpExecutor(),
        "workspace:read": WorkspaceExecutor("read"),
        "workspace:write": WorkspaceExecutor("write"),
        "workspace:list": WorkspaceExecutor("list"),
        "workspace:delete": WorkspaceExecutor("delete"),
        "workspace:diff": ProjectDiffExecutor(),
        "workspace:apply": ProjectApplyExecutor(),
        **{
            f"process:{action}": ProcessExecutor(action)
            for action in ("start", "list", "read", "write", "stop")
        },
        **{language.executor: ProgramExecutor(language) for language in LANGUAGES.values()},
    }
)
"""`executor` of a definition → its implementation."""
