"""The call log as its readers see it: records, pages, queries, figures, and rules tried against it.

Values only. The fields have the same names as in the envelope. Argument values and results are in
the record of a call, which is kept apart.
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

MAX_RULES_BYTES = 100_000


RUNNING = "RUNNING"
"""The `code` of a call that has not ended."""


class _Record(BaseModel):
    """What the engine tells. A later engine may tell more."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class RunningCall(_Record):
    """How far a call is that has not ended."""

    is_waiting: bool
    """Whether it waits for a human."""
    progress: float | None = None
    """Percent, as its tool has reported it."""
    message: str = ""
    stdout: str | None = None
    """The end of what it has printed; null in lists."""
    stderr: str | None = None


class CallRecord(_Record):
    """The log row of one call. `code` is `OK`, or the error's; of a call that runs `RUNNING`."""

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
    network: NetworkReport | None = Field(default=None, exclude_if=lambda network: network is None)
    """What its program sent through the gateway."""
    running: RunningCall | None = Field(default=None, exclude_if=lambda running: running is None)
    """How far it is, if it has not ended. `timestamp` is then its start."""


class CallPage(_Record):
    """Some records, newest first. `total_count` is null where counting was not worth it."""

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


_NO_WORD = re.compile(r"[\W_]+")


def only_words(text: str) -> str:
    """Return the words of a text, with one space between two. Databases divide texts into words in
    different ways; they agree about this one.
    """
    return _NO_WORD.sub(" ", text).strip()


def words_in(text: str) -> list[str]:
    """Return the words and phrases of a search. A phrase is in quotes, or a word with signs in
    it.
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
    """What to list. Absent filters hold nothing back."""

    since: Moment | None = None
    until: Moment | None = None
    """The first moment that is too late."""

    agent: Id | None = None
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    """`name`, or `name@version`."""

    code: str | None = Field(default=None, pattern="^[A-Z][A-Z0-9_]{1,63}$")
    state: Literal["running"] | None = None
    """`running`: calls that run now, all in one page, oldest first; only filters by name apply."""

    text: Annotated[str, AfterValidator(_with_words)] | None = Field(default=None, max_length=200)
    """Words that the arguments or the answer of a call have, all of them, as far as they are kept;
    `"a phrase"` in quotes.
    """

    limit: int = Field(default=DEFAULT_PAGE, ge=1, le=MAX_PAGE)
    cursor: Id | None = None
    """`next_cursor` of the page before."""


# -- for administrators and approvers ------------------------------------------------------


class AllCallsQuery(CallQuery):
    """Which calls of all principals to list. Absent filters hold nothing back."""

    principal: str | None = Field(default=None, min_length=1, max_length=200)
    session: Id | None = None
    trace: Id | None = None
    parent: Id | None = None
    """Only calls that this call's program made."""


class FiguresQuery(Value):
    """The hours until now that are looked at."""

    hours: int = Field(default=24, ge=1, le=24 * 31)


class SeriesQuery(Value):
    """The calls whose figures are shown over time, and in which steps."""

    hours: int = Field(default=24, ge=1, le=24 * 31)
    by: Literal["hour", "day"] = "hour"
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    agent: Id | None = None
    principal: str | None = Field(default=None, min_length=1, max_length=200)


class CallStep(Value):
    """How the calls of one hour or day went, as in `ToolFigures`. `at` is its beginning, such as
    `2026-01-31T09`, or its day.
    """

    at: str
    calls: int
    failed: int
    """Calls that a program, the engine or a service failed."""
    p50_ms: float
    p95_ms: float
    cost: float


class CallSeries(Value):
    """The steps that have calls, oldest first. `is_partial` says that only the newest calls of the
    time were looked at.
    """

    items: tuple[CallStep, ...]
    is_partial: bool


class ToolFigures(Value):
    """How the calls of one tool went. `tool` may be a name that no tool has.

    Times are in milliseconds, without the wait for a human's approval; half and 95 of 100 were not
    slower.
    """

    tool: str
    calls: int
    succeeded: int
    failed: int
    """Calls that a program, the engine or a service failed; not refused, denied or invalid ones."""
    mean_ms: float
    p50_ms: float
    p95_ms: float
    last_at: str


class ToolFiguresList(Value):
    """One entry for each name, the most called first.

    `is_partial` says that only the newest calls of the time were looked at, or that there were
    more names.
    """

    items: tuple[ToolFigures, ...]
    is_partial: bool


class RulesToTry(Value):
    """Rules as in a policy file."""

    rules: str = Field(min_length=1, max_length=MAX_RULES_BYTES)
    """TOML: one or more `[[rules]]`."""

    days: int = Field(default=7, ge=1, le=31, strict=True)


class MatchedCalls(Value):
    """Calls in the log that a rule is about."""

    tool: str
    principal_id: str
    agent_id: str | None
    calls: int


class TriedRule(Value):
    """One rule and the past calls that it is about.

    Conditions are compared with the arguments of calls that have a record, for administrators. Of
    other calls `unknown` names the conditions that were taken to hold.
    """

    id: str
    decision: str
    calls: int
    """At most so many."""

    at_least: int
    """So many match for certain."""

    groups: tuple[MatchedCalls, ...]
    """The largest ones."""

    unknown: tuple[str, ...]


class TriedRules(Value):
    """Rules, and the calls of the log that they were tried against.

    `skipped` calls named a tool that the engine does not have, or not in that version.
    """

    items: tuple[TriedRule, ...]
    calls: int
    skipped: int
    is_partial: bool
