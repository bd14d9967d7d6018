"""Batches as they are sent, and as they are answered."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fumehood.core.envelope import Envelope
from fumehood.core.tool import Seconds
from fumehood.core.value import StrictValue, Value

MAX_CALLS = 1000
"""Maximum number of calls in one batch, or in one assistant message."""


class BatchOptions(StrictValue):
    """Options of a batch. `timeout_seconds` is the time limit for all its calls together."""

    max_parallel: int = Field(default=8, ge=1, le=32)
    timeout_seconds: Seconds | None = None
    parallel_tool_calls: bool = True


class RawBatch(StrictValue):
    """A batch of calls that are not parsed yet. An invalid call therefore does not make the other
    calls fail.
    """

    calls: list[Any] = Field(min_length=1, max_length=MAX_CALLS)
    options: BatchOptions = Field(default_factory=BatchOptions)


class BatchAnswer(Value):
    """The envelopes of a batch's calls, in the order of the calls."""

    results: tuple[Envelope, ...]
