"""The call log as its readers see it: records, pages, queries, metrics, and trials of rules.

Values only. The fields have the same names as in the envelope. A record contains neither argument
values nor results. They are stored separately, and the details of a call contain them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fumehood.core.call import Id
from fumehood.core.envelope import NetworkReport
from fumehood.core.pages import DEFAULT_PAGE, MAX_PAGE
from fumehood.core.value import Value

RUNNING = "RUNNING"
"""The `code` of a call that has not ended."""


class _Record(BaseModel):
    """A value that the engine sends to clients. Unknown fields are ignored, because a later engine
    may send more fields.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class RunningCall(_Record):
    """The progress of a call that has not ended."""

    is_waiting: bool
    """Whether the call is waiting for human approval."""
    progress: float | None = None
    """Percent, as reported by the tool."""
    message: str = ""
    stdout: str | None = None
    """The end of the program's output so far; null in lists."""
    stderr: str | None = None


class CallRecord(_Record):
    """The log row of one call.

    `code` is `OK`, an error code or, for a call that has not ended, `RUNNING`.
    """

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
    """Whether the call was answered from the result cache."""
    parent_id: str | None = Field(default=None, exclude_if=lambda parent_id: parent_id is None)
    """The call whose program made this call."""
    network: NetworkReport | None = Field(default=None, exclude_if=lambda network: network is None)
    """What the call's program sent through the gateway."""
    running: RunningCall | None = Field(default=None, exclude_if=lambda running: running is None)
    """The progress of a call that has not ended; `timestamp` is then its start."""


class CallPage(_Record):
    """One page of records, newest first. `total_count` is null if the calls were not counted."""

    items: tuple[CallRecord, ...]
    has_more: bool
    next_cursor: str | None
    total_count: int | None


def _moment(value: Any) -> datetime:
    """Parse a time and convert it to UTC.

    Raises:
        ValueError: the time is invalid or has no time zone.
    """
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


_NO_WORD = re.compile(r"[\W_]+")


def only_words(text: str) -> str:
    """Return a text with everything except its words replaced by single spaces.

    The call log stores and searches texts in this form, because databases divide texts with
    punctuation into words in different ways.
    """
    return _NO_WORD.sub(" ", text).strip()


def words_in(text: str) -> list[str]:
    """Return the words and phrases of a search query, without duplicates.

    Words in quotation marks are one phrase. A word that contains punctuation is also a phrase.
    """
    parts = [
        part
        for number, piece in enumerate(text.split('"'))
        for part in ([piece] if number % 2 else piece.split())
    ]
    found = dict.fromkeys(words for part in parts if (words := only_words(part)))
    return list(found)


def _with_words(text: str) -> str:
    if not words_in(text):
        raise ValueError("needs a word to search for")
    return text


class CallQuery(Value):
    """Filters for a list of calls. An absent filter excludes nothing."""

    since: Moment | None = None
    until: Moment | None = None
    """The end of the time range, exclusive."""

    agent: Id | None = None
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    """The called tool, as `name` or `name@version`."""

    code: str | None = Field(default=None, pattern="^[A-Z][A-Z0-9_]{1,63}$")
    state: Literal["running"] | None = None
    """`running`: only calls that are running now, all on one page, oldest first. `since`, `until`,
    `code` and `text` are then ignored."""

    text: Annotated[str, AfterValidator(_with_words)] | None = Field(default=None, max_length=200)
    """Words that must all occur in a call's stored arguments or answer. A phrase is written in
    quotation marks: `"a phrase"`.
    """

    limit: int = Field(default=DEFAULT_PAGE, ge=1, le=MAX_PAGE)
    cursor: Id | None = None
    """`next_cursor` of the previous page."""


# -- for administrators and approvers ------------------------------------------------------


class CallStep(Value):
    """The metrics of all calls in one hour or day. The fields mean the same as in `ToolFigures`.

    `at` is the hour, such as `2026-01-31T09`, or the day, such as `2026-01-31`.
    """

    at: str
    calls: int
    failed: int
    """Calls that failed because of a program, the engine or a service."""
    p50_ms: float
    p95_ms: float
    cost: float


class CallSeries(Value):
    """The hours or days that have calls, oldest first.

    `is_partial` is true if only the newest calls in the time range were counted.
    """

    items: tuple[CallStep, ...]
    is_partial: bool


class ToolFigures(Value):
    """The metrics of one tool's calls. `tool` may be a name that no tool has.

    Durations are in milliseconds, without the wait for human approval. `p50_ms` is the median, and
    `p95_ms` the 95th percentile.
    """

    tool: str
    calls: int
    succeeded: int
    failed: int
    """Calls that failed because of a program, the engine or a service. Refused, denied and invalid
    calls are not counted."""
    mean_ms: float
    p50_ms: float
    p95_ms: float
    last_at: str


class ToolFiguresList(Value):
    """The metrics of each tool, sorted by the number of calls, highest first.

    `is_partial` is true if only the newest calls in the time range were counted, or if the list
    omits some tools.
    """

    items: tuple[ToolFigures, ...]
    is_partial: bool


class MatchedCalls(Value):
    """A group of past calls that a rule can match: the tool, principal and agent that all of them
    have, and the number of calls in the log.
    """

    tool: str
    principal_id: str
    agent_id: str | None
    calls: int


class TriedRule(Value):
    """One rule and the past calls that it can match.

    If the reader is an administrator, conditions on arguments are tested on the calls whose
    arguments are stored. A condition that cannot be tested is assumed to hold. `unknown` names
    these conditions.
    """

    id: str
    decision: str
    calls: int
    """The maximum number of calls that the rule can match."""

    at_least: int
    """The number of calls that certainly match."""

    groups: tuple[MatchedCalls, ...]
    """The largest groups of matching calls."""

    unknown: tuple[str, ...]


class TriedRules(Value):
    """The rules that were tried, and the number of past calls that were compared with them.

    `skipped` is the number of calls of a tool, or of a version of a tool, that the engine does not
    have.
    """

    items: tuple[TriedRule, ...]
    calls: int
    skipped: int
    is_partial: bool
