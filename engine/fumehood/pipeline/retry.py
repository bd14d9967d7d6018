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
    """The retries of one call so far."""

    retry_count: int = 0
    max_retries: int | None = None
    """The maximum number of retries, set once all are used."""
    warning: str | None = None
    """The reason why retries stopped early, or None."""


def is_of_service(tool: ToolDefinition) -> bool:
    """Whether a tool can call another service. Programs and tools on session files cannot."""
    return arguments_of(tool.executor) is None


def may_retry(tool: ToolDefinition, options: CallOptions) -> bool:
    """Whether failed attempts of this call are repeated at all."""
    return tool.retry_count > 0 and options.enable_retry and is_of_service(tool)


def is_passing(error: EngineError) -> bool:
    """Whether the error is a temporary failure of another service."""
    return error.may_retry and isinstance(error, tuple(MOST_RETRIES))


def is_harmless(tool: ToolDefinition, error: EngineError) -> bool:
    """Whether repeating the action after this error is safe."""
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
    """Return the seconds until the next attempt, or None if it does not fit into `left_s`.

    `retry` counts from 0. The delay is the one that the service requests plus a random one ("full
    jitter"), so that callers who were refused together do not return together.
    *Source*: AWS Architecture Blog, "Exponential Backoff and Jitter".
    """
    asked_s = max(0, retry_after_ms or 0) / 1000
    delay = asked_s + uniform(0, min(CAP_S, BASE_S * 2**retry))
    return delay if delay + LEAST_ATTEMPT_S <= left_s else None


class Retries:
    """Decides on the retries of one engine. The counters are in memory only."""

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
        """Count a call of a tool that has retries."""
        self._of(tool).add(self._clock.monotonic(), 1, 0)

    def next_delay_s(
        self, tool: ToolDefinition, error: EngineError, attempts: Attempts, left_s: float
    ) -> float | None:
        """Return the seconds until the next attempt, or None if there is no further attempt.

        Count the retry, or record in `attempts` why there is none.
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
