"""The table of executors: one row for each kind of tool that this version can run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fumehood.core.decision import ALLOWED
from fumehood.core.errors import EndedBy
from fumehood.core.languages import LANGUAGES
from fumehood.core.tool import DECISION, NET_EXECUTOR, ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.expression import ExpressionExecutor, RestrictedPythonExecutor
from fumehood.executors.fetch import FetchExecutor
from fumehood.executors.function import FunctionExecutor
from fumehood.executors.mcp import McpExecutor
from fumehood.executors.net import NetExecutor
from fumehood.executors.outcome import Outcome
from fumehood.executors.process import ProcessExecutor
from fumehood.executors.program import ProgramExecutor
from fumehood.executors.project import ProjectApplyExecutor, ProjectDiffExecutor
from fumehood.executors.rest import RestExecutor
from fumehood.executors.workspace import WorkspaceExecutor

_PLACEMENT = Placement(
    "external", "host", "the caller runs this tool itself; the engine decides", is_outside=True
)


class _DecisionExecutor(Executor):
    """Tools that are not this engine's."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        return Outcome(EndedBy.OK, "none", data=ALLOWED)


EXECUTORS: Mapping[str, Executor] = MappingProxyType(
    {
        "expression": ExpressionExecutor(),
        "restricted_python": RestrictedPythonExecutor(),
        "function": FunctionExecutor(),
        DECISION: _DecisionExecutor(),
        NET_EXECUTOR: NetExecutor(),
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
