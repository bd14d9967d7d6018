"""Alerts: six thresholds for the recent calls of the whole engine and of each tool.

Host side. The counters are in memory, so after a restart the windows are empty and no alert is
firing. Invariants: each alert is reported once when it starts to fire and once when it is resolved;
it is resolved only when its value is better than the threshold by `BAND`, or when the window has no
calls; a window takes the same memory at any rate of calls, and the number of tools with a window is
bounded.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

import anyio

from fumehood.core.status import Alert, AlertList, AlertName
from fumehood.observe.clock import Window
from fumehood.observe.ended_call import EndedCall
from fumehood.observe.log import Logger, log_fault
from fumehood.sight.metrics import MAX_TOOLS
from fumehood.sight.settings import AlertSettings

BAND = 0.1
"""An alert is resolved only once its value is better than the threshold by this fraction of the
threshold or, if the threshold is a minimum, of the distance between the threshold and 1."""

LEAST_CALLS_OF_P99 = 100
"""Minimum number of calls in a window before the alert on the 99th percentile can fire."""

LOOK_S = 5.0
"""Seconds between two checks of the thresholds."""


class Totals(NamedTuple):
    """Sums over the calls in one window, the period whose calls count for alerts."""

    calls: float
    successes: float
    faults: float
    retries: float
    slow: float
    total_s: float
    misused: float


@dataclass(frozen=True, slots=True)
class Rule:
    """A threshold for one value. Values above the threshold are bad. If `is_least` is True, values
    below the threshold are bad instead.
    """

    value: Callable[[Totals], float]
    threshold: float
    message: str
    """A template with placeholders for the value and the threshold."""
    limit: float | None = None
    """The number that the value is compared with, or None to compare the value with the
    threshold."""
    is_least: bool = False
    least_calls: int = 0
    """Minimum number of calls in a window for the alert to fire."""
    is_grave: bool = False
    """Whether one call in a window is enough for the alert to fire."""

    def is_crossed(self, value: float, *, by: float = 0.0) -> bool:
        """Return whether the value is bad. `by` makes the rule stricter: a value that is better
        than the threshold, but by less than the fraction `by`, is also bad.
        """
        limit = self.threshold if self.limit is None else self.limit
        if self.is_least:
            return value < limit + by * (1 - limit)
        return value > limit * (1 - by)


def rules_of(settings: AlertSettings) -> Mapping[AlertName, Rule]:
    """Return the rule of each alert, by the alert's name. The thresholds come from `settings`."""
    return MappingProxyType(
        {
            "success_rate": Rule(
                lambda t: t.successes / t.calls,
                settings.min_success_rate,
                "{value:.1%} of the calls succeeded (at least {threshold:.1%}).",
                is_least=True,
            ),
            "mean_duration": Rule(
                lambda t: t.total_s * 1e3 / t.calls,
                settings.max_mean_ms,
                "Calls took {value:.0f} ms on average (at most {threshold:.0f} ms).",
            ),
            "p99_duration": Rule(
                lambda t: t.slow / t.calls,
                settings.max_p99_ms,
                "{value:.1%} of the calls took longer than {threshold:.0f} ms (at most 1%).",
                limit=0.01,
                least_calls=LEAST_CALLS_OF_P99,
            ),
            "error_rate": Rule(
                lambda t: t.faults / t.calls,
                settings.max_error_rate,
                "{value:.1%} of the calls failed by a program, the engine or another service (at "
                "most {threshold:.1%}).",
            ),
            "retry_rate": Rule(
                lambda t: t.retries / t.calls,
                settings.max_retry_rate,
                "There were {value:.1%} as many retries as calls (at most {threshold:.1%}).",
            ),
            "secret_misuse": Rule(
                lambda t: t.misused,
                0,
                "{value:.0f} requests of programs had the placeholder of a secret where it must "
                "not be (at most {threshold:.0f}).",
                is_grave=True,
            ),
        }
    )


class Alerts:
    """The alerts of one engine."""

    def __init__(
        self,
        settings: AlertSettings,
        monotonic: Callable[[], float],
        now: Callable[[], datetime],
        log: Logger,
    ) -> None:
        self._settings = settings
        self._rules = rules_of(settings)
        self._slow_s = settings.max_p99_ms / 1e3
        self._monotonic = monotonic
        self._now = now
        self._log = log
        self._windows: dict[str | None, Window] = {None: self._window()}
        self._firing: dict[tuple[str | None, AlertName], datetime] = {}
        self._owed: list[Alert] = []

    def add(self, call: EndedCall) -> None:
        """Count one call that has ended."""
        if not self._settings.enabled:
            return
        now, is_slow = self._monotonic(), call.duration_s > self._slow_s
        misused = call.network.misused if call.network is not None else 0
        values = (
            1, call.code == "OK", call.is_fault, call.retries, is_slow, call.duration_s, misused,
        )  # fmt: skip
        self._windows[None].add(now, *values)
        if call.tool is None or not self._settings.per_tool:
            return
        window = self._windows.get(call.tool)
        if window is None:
            if len(self._windows) > MAX_TOOLS:
                return
            window = self._windows[call.tool] = self._window()
        window.add(now, *values)

    def _window(self) -> Window:
        return Window(self._settings.window_seconds, len(Totals._fields))

    def look(self) -> AlertList:
        """Check all thresholds now, and record which alerts fire or are resolved.

        The returned list contains every alert of the whole engine, firing or not. Of the alerts of
        single tools, it contains only the firing ones.
        """
        settings, now, shown = self._settings, self._monotonic(), []
        for tool, window in list(self._windows.items()):
            totals = Totals(*window.totals(now))
            for name, rule in self._rules.items():
                alert = self._judge(tool, name, rule, totals)
                if tool is None or alert.firing:
                    shown.append(alert)
            if tool is not None and not totals.calls:  # `_judge` has resolved its alerts
                del self._windows[tool]
        return AlertList(
            enabled=settings.enabled,
            window_seconds=settings.window_seconds,
            min_calls=settings.min_calls,
            alerts=tuple(shown),
        )

    async def watch(self, tell: Callable[[Alert], Awaitable[None]]) -> None:
        """Check the thresholds periodically, until this method is cancelled. Pass each alert that
        fires or is resolved to `tell`.

        If a check or `tell` raises an exception, it is logged, and the checks continue.
        """
        while True:
            try:
                self.look()
                while self._owed:
                    await tell(self._owed[0])
                    del self._owed[0]
            except Exception as fault:  # the state may be unwritable for a while
                log_fault(self._log, "alerts.internal_error", fault)
            await anyio.sleep(LOOK_S)

    def _judge(self, tool: str | None, name: AlertName, rule: Rule, totals: Totals) -> Alert:
        """Compare one value with its threshold, and return the alert `name` for it. If the alert
        now begins to fire or is resolved, also record this.

        `rule` computes the value from `totals`, the sums over all calls of `tool`. If `tool` is
        None, they are the sums over the calls of all tools.
        """
        since = self._firing.get((tool, name))
        value = rule.value(totals) if totals.calls else None
        least_calls = 1 if rule.is_grave else max(self._settings.min_calls, rule.least_calls)
        if value is None:
            is_firing = False
        elif since is not None:
            is_firing = rule.is_crossed(value, by=BAND)
        else:
            is_firing = totals.calls >= least_calls and rule.is_crossed(value)
        has_changed = is_firing != (since is not None)
        if has_changed:
            since = self._now() if is_firing else None
        alert = Alert(
            name=name,
            tool=tool,
            firing=is_firing,
            since=since,
            value=None if value is None or not math.isfinite(value) else round(value, 4),
            threshold=rule.threshold,
            calls=int(totals.calls),
            least_calls=least_calls,
            message="There were no calls."
            if value is None
            else rule.message.format(value=value, threshold=rule.threshold),
        )
        if has_changed:
            self._note(alert)
        return alert

    def _note(self, alert: Alert) -> None:
        """Log that an alert has begun to fire or was resolved, and queue the alert for
        notification.
        """
        key = (alert.tool, alert.name)
        if alert.since is not None:
            self._firing[key] = alert.since
        else:
            del self._firing[key]
        log = self._log.warning if alert.firing else self._log.info
        shown = alert.model_dump(mode="json", include={"value", "threshold", "calls", "message"})
        event = "alert.firing" if alert.firing else "alert.resolved"
        log(event, alert=alert.name, tool=alert.tool, **shown)
        self._owed.append(alert)
