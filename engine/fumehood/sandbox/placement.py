"""Placement: where a tool runs follows from its executor and `sandboxed`, from nothing else.

Host side, a pure function. Invariant: no case leads to a weaker wall than the definition
asks for; what has no wall in this version has no case.
"""

from __future__ import annotations

from dataclasses import dataclass

from fumehood.model.errors import SandboxUnavailable
from fumehood.model.tool import ToolDefinition


@dataclass(frozen=True, slots=True)
class Placement:
    """Where, and the sentence that a dry run shows."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a process of its own, whatever the call asks for."""


_EXPRESSION = Placement(
    "interpreter",
    "interpreter",
    "the executor 'expression' always runs in the interpreter: a separate, limited process "
    "behind a system-call filter",
)
_RESTRICTED_PROGRAM = Placement(
    "interpreter",
    "interpreter",
    "the executor 'restricted_python' always runs in the interpreter: a separate, limited "
    "process behind a system-call filter, made for this call and ended with it",
    fresh=True,
)
_HOST_FUNCTION = Placement(
    "host",
    "host",
    "the executor 'function' with sandboxed=false is trusted code in the engine's process, or in "
    "a worker process of its own where it is synchronous",
)
_SANDBOXED_FUNCTION = Placement(
    "jail",
    "jail",
    "the executor 'function' with sandboxed=true always runs in the jail: a separate, limited "
    "process behind a system-call filter, which sees its own import path and no other file",
)


def place(tool: ToolDefinition) -> Placement:
    """The placement of a tool.

    Raises:
        SandboxUnavailable: this version has no wall for its executor.
    """
    if tool.executor == "expression":
        return _EXPRESSION
    if tool.executor == "restricted_python":
        return _RESTRICTED_PROGRAM
    if tool.executor == "function":
        return _SANDBOXED_FUNCTION if tool.sandboxed else _HOST_FUNCTION
    if tool.executor in ("http", "mcp"):
        raise SandboxUnavailable(
            f"This version has no executor {tool.executor!r}: the tool {tool.name} is registered, "
            "and cannot be called yet. Do not retry.",
            retryable=False,
        )
    raise SandboxUnavailable(
        f"This version has no sandbox for the executor {tool.executor!r}, and uses no weaker one "
        "instead.",
        retryable=False,
    )
