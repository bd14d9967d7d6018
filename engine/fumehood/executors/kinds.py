"""The table of executors: one row for each kind of tool that this version can run.

Host side. This module also defines executors that are too short for a file of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fumehood.core.decision import ALLOWED
from fumehood.core.errors import EndedBy
from fumehood.core.languages import LANGUAGES
from fumehood.core.limits import Grade
from fumehood.core.part import PartError, imported
from fumehood.core.tool import DECISION, ToolDefinition
from fumehood.executors.base import Executor, Placement, ToolRun
from fumehood.executors.function import FunctionExecutor
from fumehood.executors.outcome import Outcome
from fumehood.executors.program import ProgramExecutor
from fumehood.parts import tool_kinds


class _DecisionExecutor(Executor):
    """Answers calls that only ask for the engine's decision. The caller runs the tool itself, so
    this executor runs nothing and reports that the call is allowed.
    """

    place = Placement(
        "external", "host", "the caller runs this tool itself; the engine decides", is_outside=True
    )

    async def run(self, run: ToolRun) -> Outcome:
        return Outcome(EndedBy.OK, "none", data=ALLOWED)


def with_parts(own: Mapping[str, Executor]) -> Mapping[str, Executor]:
    """Return the executors in `own`, together with the executors that parts add.

    Raises:
        PartError: a part adds an executor with a name that already exists, or a type of tools that
            already exists.
    """
    added, types = tool_kinds(), {"BUILTIN", "NATIVE"}
    for name, kind in added.items():
        if name in own or kind.type in types:
            raise PartError(
                f"A part adds the executor {name!r}, but it or its type already exists."
            )
        types |= {kind.type} if kind.type is not None else set()
    made = {name: imported(kind.executor)() for name, kind in added.items()}
    return MappingProxyType({**own, **made})


EXECUTORS = with_parts(
    {
        "function": FunctionExecutor(),
        DECISION: _DecisionExecutor(),
        **{language.executor: ProgramExecutor(language) for language in LANGUAGES.values()},
    }
)
"""Value of the field `executor` in a tool's definition → the executor."""


def is_weaker(
    tool: ToolDefinition, grade: Grade | None, least: Grade, *, in_session: bool = False
) -> bool | None:
    """Return whether a call of the tool would run in a container of a weaker grade than `least`, if
    containers have the grade `grade`. If this grade is None, it is not known, and the result is
    None. The result is False if the call runs in no container.
    """
    executor = EXECUTORS.get(tool.executor)
    if executor is None or executor.placement(tool, in_session=in_session).wall != "container":
        return False
    return None if grade is None else not grade.is_at_least(least)
