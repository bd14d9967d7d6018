"""Decisions: tools that their callers run themselves. The engine decides, and runs nothing.

Host side. A run is the end of a call that every gate let through: its caller may now run the tool.
"""

from __future__ import annotations

from fumehood.core.decision import ALLOWED
from fumehood.core.errors import EndedBy
from fumehood.core.tool import ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.outcome import Outcome

_PLACEMENT = Placement(
    "external", "host", "the caller runs this tool itself; the engine decides", is_outside=True
)


class DecisionExecutor(Executor):
    """Tools that are not this engine's."""

    def placement(self, tool: ToolDefinition, *, in_session: bool) -> Placement:
        return _PLACEMENT

    async def run(self, run: ToolRun) -> Outcome:
        return Outcome(EndedBy.OK, "none", data=ALLOWED)
