"""The call log as its readers see it: one record a call, pages of them, and what to ask for.

Values only. The fields bear the names that they have in the envelope. Argument values and
results are not among them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fumehood.core.call import Id

MAX_PAGE = 100
DEFAULT_PAGE = 10


class CallRecord(BaseModel):
    """The log row of one call. `code` is `OK`, or the error's."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    call_id: str
    timestamp: str
    principal_id: str
    agent_id: str | None
    session_id: str | None
    trace_id: str
    tool_name: str
    tool_version: str | None
    code: str
    ended_by: str | None
    execution_time_ms: float
    cpu_ms: float | None
    cost: str
    currency: str
    input_tokens: int
    output_tokens: int
    tokens_used: int
    cache_hit: bool = False
    """Whether it was answered from the result cache."""
    parent_id: str | None = Field(default=None, exclude_if=lambda parent_id: parent_id is None)
    """The call whose program made it."""


class CallPage(BaseModel):
    """Some records, newest first. `total_count` is null where counting was not worth it."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    items: tuple[CallRecord, ...]
    has_more: bool
    next_cursor: str | None
    total_count: int | None


def _moment(value: Any) -> datetime:
    """A time with its zone, in UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("not a time such as 2026-01-31T09:30:00Z") from None
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError("needs a time with its zone, such as 2026-01-31T09:30:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError("out of range") from None


Moment = Annotated[datetime, BeforeValidator(_moment)]


class CallQuery(BaseModel):
    """What to list. Absent filters hold nothing back."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    since: Moment | None = None
    until: Moment | None = None
    """The first moment that is too late."""

    agent: Id | None = None
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    """`name`, or `name@version`."""

    code: str | None = Field(default=None, pattern="^[A-Z][A-Z0-9_]{1,63}$")
    limit: int = Field(default=DEFAULT_PAGE, ge=1, le=MAX_PAGE)
    cursor: Id | None = None
    """`next_cursor` of the page before."""
