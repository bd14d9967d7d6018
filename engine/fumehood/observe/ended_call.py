"""The data about an ended call that subscribers receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fumehood.core.call import TraceParent
from fumehood.core.envelope import NetworkReport

UNKNOWN = "(unknown)"
"""The label that stands for all unknown tools. No tool can have this name, because names cannot
contain parentheses."""


@dataclass(frozen=True, slots=True)
class EndedStage:
    """One stage of a call. Its times are in seconds since 1970."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """The data for the tracing spans of one call and its stages. `parent_span` is the id of the
    span that contains the call's own span, or None.
    """

    tool: str
    call_id: str
    span: TraceParent
    parent_span: str | None
    code: str
    attributes: Mapping[str, str | int | bool]
    stages: Sequence[EndedStage]


@dataclass(frozen=True, slots=True)
class EndedCall:
    """The data about an ended call that subscribers receive, for example for metrics. `tool` is
    None if there is no tool with the name that the caller used.
    """

    tool: str | None
    code: str
    duration_s: float
    """Duration of the call in seconds, without the wait for a human's approval."""
    is_fault: bool = False
    """True if the program, the engine or another service caused the call to fail. False if the call
    succeeded, or if the caller or a rule caused the failure."""
    retries: int = 0
    ended_by: str | None = None
    approval_s: float | None = None
    network: NetworkReport | None = None
    trace: Callable[[], EndedTrace] | None = None
    """Returns the data for the call's spans. It is a function because only some subscribers need
    the data."""
