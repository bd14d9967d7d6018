"""Queries of operators about all principals' calls."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fumehood.core.call import Id
from fumehood.core.call_log import CallQuery
from fumehood.core.value import Value

MAX_RULES_BYTES = 100_000


class AllCallsQuery(CallQuery):
    """Filters for a list of all principals' calls. An absent filter excludes nothing."""

    principal: str | None = Field(default=None, min_length=1, max_length=200)
    session: Id | None = None
    trace: Id | None = None
    parent: Id | None = None
    """Only calls that the program of this call made."""


class FiguresQuery(Value):
    """The time range of tool metrics: the last `hours` hours."""

    hours: int = Field(default=24, ge=1, le=24 * 31)


class SeriesQuery(Value):
    """A query for call metrics over time: the filters that select the calls, and the time step,
    which is an hour or a day (`by`).
    """

    hours: int = Field(default=24, ge=1, le=24 * 31)
    by: Literal["hour", "day"] = "hour"
    tool: str | None = Field(default=None, min_length=1, max_length=160)
    agent: Id | None = None
    principal: str | None = Field(default=None, min_length=1, max_length=200)


class RulesToTry(Value):
    """Rules to try, written as in a policy file."""

    rules: str = Field(min_length=1, max_length=MAX_RULES_BYTES)
    """TOML: one or more `[[rules]]`."""

    days: int = Field(default=7, ge=1, le=31, strict=True)
