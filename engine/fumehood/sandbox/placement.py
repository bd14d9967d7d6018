"""Placement: where a tool runs follows from its executor and `sandboxed`, and from whether the
call names a session; from nothing else.

Host side, a pure function. Invariant: no case leads to a weaker wall than the definition
asks for; what has no wall in this version has no case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fumehood.core.errors import SandboxUnavailable
from fumehood.core.tool import ToolDefinition


@dataclass(frozen=True, slots=True)
class Placement:
    """Where, and the sentence that a dry run shows."""

    kind: str
    wall: str
    why: str
    fresh: bool = False
    """Whether every call gets a process of its own, whatever the call asks for."""
    isolations: Mapping[str, bool] = field(default_factory=lambda: MappingProxyType({}))
    """What a call may ask for as its `isolation` here, and whether that needs a place in which
    nothing has run before. What is not among them could not be enforced."""

    is_of_session: bool = False
    """Whether it is the place of the call's session, which a call must name then."""

    def needs_fresh_place(self, isolation: str | None) -> bool:
        """Whether the place must be new for a call with this option."""
        return self.fresh or (isolation is not None and self.isolations[isolation])


_A_PROCESS_A_CALL = MappingProxyType({"call": True})
_A_SESSION = MappingProxyType({"session": False})
_A_RESET_OR_A_CONTAINER_A_CALL = MappingProxyType({"call": False, "container_per_call": True})

_EXPRESSION = Placement(
    "interpreter",
    "interpreter",
    "the executor 'expression' always runs in the interpreter: a separate, limited process "
    "behind a system-call filter",
    isolations=_A_PROCESS_A_CALL,
)
_RESTRICTED_PROGRAM = Placement(
    "interpreter",
    "interpreter",
    "the executor 'restricted_python' always runs in the interpreter: a separate, limited "
    "process behind a system-call filter, made for this call and ended with it",
    fresh=True,
    isolations=_A_PROCESS_A_CALL,
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
    isolations=_A_PROCESS_A_CALL,
)
_CODE = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user: one that only this caller's calls of the same agent have used, reset "
    "after each of them, or with isolation=container_per_call one made for this call",
    isolations=_A_RESET_OR_A_CONTAINER_A_CALL,
)
_CODE_IN_A_SESSION = Placement(
    "container",
    "container",
    "executors 'code:…' always run in a container without network, with a read-only root and an "
    "unprivileged user: with a session_id in the session's own, which no other call ever used and "
    "which keeps the files of its workspace from call to call",
    isolations=_A_SESSION,
    is_of_session=True,
)
_WORKSPACE = Placement(
    "container",
    "container",
    "executors 'workspace:…' are always carried out by the guest in the container of the call's "
    "session, as its unprivileged user",
    isolations=_A_SESSION,
    is_of_session=True,
)


def place(tool: ToolDefinition, *, in_session: bool = False) -> Placement:
    """The placement of a tool, for a call that names a session or none.

    Raises:
        SandboxUnavailable: this version has no wall for its executor.
    """
    if tool.executor == "expression":
        return _EXPRESSION
    if tool.executor == "restricted_python":
        return _RESTRICTED_PROGRAM
    if tool.executor == "function":
        return _SANDBOXED_FUNCTION if tool.sandboxed else _HOST_FUNCTION
    if tool.executor.startswith("code:"):
        return _CODE_IN_A_SESSION if in_session else _CODE
    if tool.executor.startswith("workspace:"):
        return _WORKSPACE
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


def language_of(tool: ToolDefinition) -> str | None:
    """The language that the place of a tool must have; None where it needs none."""
    kind, _, language = tool.executor.partition(":")
    return language if kind == "code" else None
