"""The table of executors: one row for each kind of tool that this version can run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.languages import LANGUAGES
from fumehood.core.tool import DECISION, ToolDefinition
from fumehood.executors.base import Executor, Placement
from fumehood.executors.decision import DecisionExecutor
from fumehood.executors.expression import ExpressionExecutor, RestrictedPythonExecutor
from fumehood.executors.fetch import FetchExecutor
from fumehood.executors.function import FunctionExecutor
from fumehood.executors.mcp import McpExecutor
from fumehood.executors.program import ProgramExecutor
from fumehood.executors.rest import RestExecutor
from fumehood.executors.workspace import WorkspaceExecutor

EXECUTORS: Mapping[str, Executor] = MappingProxyType(
    {
        "expression": ExpressionExecutor(),
        "restricted_python": RestrictedPythonExecutor(),
        "function": FunctionExecutor(),
        DECISION: DecisionExecutor(),
        "http": RestExecutor(),
        "http:fetch": FetchExecutor(),
        "mcp": McpExecutor(),
        "workspace:read": WorkspaceExecutor("read"),
        "workspace:write": WorkspaceExecutor("write"),
        "workspace:list": WorkspaceExecutor("list"),
        "workspace:delete": WorkspaceExecutor("delete"),
        **{language.executor: ProgramExecutor(language) for language in LANGUAGES.values()},
    }
)
"""`executor` of a definition → its implementation."""


def executor_of(tool: ToolDefinition) -> Executor:
    """The executor of a tool.

    Raises:
        SandboxUnavailable: this version has none.
    """
    executor = EXECUTORS.get(tool.executor)
    if executor is not None:
        return executor
    raise SandboxUnavailable(
        f"This version has no sandbox for the executor {tool.executor!r}, and never falls back "
        "to a weaker one.",
        retryable=False,
    )


def place(tool: ToolDefinition, *, in_session: bool = False) -> Placement:
    """Where a tool runs, in a call that names a session or none.

    Raises:
        SandboxUnavailable: this version has no executor for it.
    """
    return executor_of(tool).placement(tool, in_session=in_session)
