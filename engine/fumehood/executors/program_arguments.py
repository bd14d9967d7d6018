"""Which arguments an executor refuses beyond what a tool's schema says.

Host side, pure, asked by `pipeline/validate`. A tool's own schema may say less than the built-in
one does; what reaches a container has been held against these rules whoever wrote the tool.
"""

from __future__ import annotations

from collections.abc import Iterator

from fumehood.core.json_types import JsonObject
from fumehood.executors.code_arguments import argument_faults
from fumehood.executors.workspace_arguments import workspace_faults


def program_faults(executor: str, arguments: JsonObject) -> Iterator[tuple[str, str]]:
    """Every fault as a dotted path and a clause; executors without such rules have none."""
    kind, _, what = executor.partition(":")
    if kind == "code":
        yield from argument_faults(arguments, what)
    elif kind == "workspace":
        yield from workspace_faults(arguments, what)
