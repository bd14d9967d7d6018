"""Retry: whether a failed attempt is repeated, and when. `execute` runs the attempts.

Only failures of other services are repeated, and only if that is harmless: the tool is idempotent,
or no byte was sent. All attempts of a call share its deadline. Invariants: a call never has more
retries than the definition's `retry_count` and `MOST_RETRIES` allow; within a minute, a tool never
has more retries than `FREE_RETRIES` plus a tenth of its calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fumehood.core.call import CallOptions
from fumehood.core.errors import (
    EngineError,
    NetworkError,
    RateLimited,
    ToolError,
    UpstreamTimeout,
)
from fumehood.core.tool import ToolDefinition
from fumehood.observe.clock import Clock, Window
from fumehood.registry.arguments import arguments_of

MOST_RETRIES: Mapping[type[EngineError], int] = MappingProxyType(
    {NetworkError: 3, UpstreamTimeout: 2, RateLimited: 3, ToolError: 3}
)
"""Retryable error of an attempt → maximum number of retries."""

BASE_S = 0.2
"""Maximum delay in seconds before the first retry. It doubles with each retry."""

CAP_S = 10.0
"""Maximum random delay in seconds before a retry. A delay that the service requests is added."""

LEAST_ATTEMPT_S = 0.05
"""Seconds that must be left for another attempt to start."""

WINDOW_S = 60.0
"""Length in seconds of the time window in which a tool's calls and retries are counted."""

FREE_RETRIES = 10
"""Number of retries that a tool may have in the window, however few calls it has."""

RETRIED_SHARE = 0.1
"""Further retries that a tool may have in the window, as a share of its calls in the window."""

BUDGET_SPENT = (
    "retries: stopped, because too many calls of this tool were repeated in the last minute"
)
CIRCUIT_OPENED = "retries: stopped, because calls to this service are suspended"


@dataclass(slots=True)
class Attempts:
    """How often one call has been retried so far. If retries have stopped, also why there is no
    further retry.
    """

    retry_count: int = 0
    max_retries: int | None = None
    """The maximum number of retries, set once all are used."""
    warning: str | None = None
    """The reason why retries stopped early, or None."""


def is_of_service(tool: ToolDefinition) -> bool:
    """Whether a tool can call a service outside the engine. Tools that run programs or work on
    session files cannot.
    """
    return arguments_of(tool.executor) is None


def may_retry(tool: ToolDefinition, options: CallOptions) -> bool:
    """Whether failed attempts of this call are repeated at all."""
    return tool.retry_count > 0 and options.enable_retry and is_of_service(tool)


def is_passing(error: EngineError) -> bool:
    """Whether the error is a temporary failure of another service."""
    return error.may_retry and isinstance(error, tuple(MOST_RETRIES))


def is_harmless(tool: ToolDefinition, error: EngineError) -> bool:
    """Whether the call can safely be repeated after this error: the tool is idempotent, or the
    failed attempt sent nothing.
    """
    return tool.idempotent or not error.was_sent


def most_retries(tool: ToolDefinition, error: EngineError) -> int:
    """Return the maximum number of retries after this error, or 0 if it must not be retried."""
    if not is_passing(error) or not is_harmless(tool, error):
        return 0
    by_error = next(most for kind, most in MOST_RETRIES.items() if isinstance(error, kind))
    return min(by_error, tool.retry_count)


def delay_s(
    retry: int, retry_after_ms: int | None, left_s: float, uniform: Callable[[float, float], float]
) -> float | None:
    """Return the seconds until the next attempt, or None if the attempt would come too late.

    `retry` is the number of earlier retries. `retry_after_ms` is the delay that the service
    requests, or None. `left_s` is the number of seconds until the call's deadline. `uniform`
    returns a random number between two limits.

    The result is the requested delay plus a random time. The upper limit of the random time grows
    with `retry`. *Source*: AWS Architecture Blog, "Exponential Backoff and Jitter" ("full jitter").
    """
    asked_s = max(0, retry_after_ms or 0) / 1000
    # Calls that were refused at the same time must not be repeated at the same time.
    delay = asked_s + uniform(0, min(CAP_S, BASE_S * 2**retry))
    return delay if delay + LEAST_ATTEMPT_S <= left_s else None


class Retries:
    """Decides whether and when the calls of one engine are retried. For this, it counts the recent
    calls and retries of each tool, in memory only.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._clock = clock
        self._uniform = uniform
        self._recent: dict[str, Window] = {}

    def begin(self, tool: ToolDefinition) -> None:
        """Count a new call of this tool. The number of its recent calls limits the number of its
        retries.
        """
        self._of(tool).add(self._clock.monotonic(), 1, 0)

    def next_delay_s(
        self, tool: ToolDefinition, error: EngineError, attempts: Attempts, left_s: float
    ) -> float | None:
        """Return the seconds until the next attempt, or None if there is no further attempt.
        `left_s` are the seconds until the call's deadline.

        If there is a further attempt, count it as a retry of the tool. Otherwise, record in
        `attempts` that all retries are used or that the tool had too many retries. Record nothing
        if the error must not be retried, or if the time is too short.
        """
        most = most_retries(tool, error)
        if attempts.retry_count >= most:
            attempts.max_retries = most or None
            return None
        delay = delay_s(attempts.retry_count, error.retry_after_ms, left_s, self._uniform)
        if delay is None:
            return None
        now, recent = self._clock.monotonic(), self._of(tool)
        calls, retries = recent.totals(now)
        if retries >= FREE_RETRIES + RETRIED_SHARE * calls:
            attempts.warning = BUDGET_SPENT
            return None
        recent.add(now, 0, 1)
        return delay

    def _of(self, tool: ToolDefinition) -> Window:
        return self._recent.setdefault(tool.name, Window(WINDOW_S))
