"""A call that has ended, as subscribers receive it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fumehood.core.call import TraceParent
from fumehood.core.envelope import NetworkReport

UNKNOWN = "(unknown)"
"""The label for unknown tools. A tool's name cannot contain parentheses."""


@dataclass(frozen=True, slots=True)
class EndedStage:
    """One stage of a call. Its times are in seconds since 1970."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """The data for the spans of one call. `parent_span` is the id of the parent of the call's span,
    or None.
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
    """The facts about an ended call that subscribers count. `tool` is None if the tool was not
    found.
    """

    tool: str | None
    code: str
    duration_s: float
    """Seconds that the call took, without the wait for a human's approval."""
    is_fault: bool = False
    """Whether the call failed because of its program, the engine or another service, rather than
    because of the caller or a rule."""
    retries: int = 0
    ended_by: str | None = None
    approval_s: float | None = None
    network: NetworkReport | None = None
    trace: Callable[[], EndedTrace] | None = None
    """Makes the data for the call's spans, which only some subscribers need."""
