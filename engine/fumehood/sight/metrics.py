"""Metrics: counters of ended calls, and all metrics as text for Prometheus.

Host side. `CallMetrics` counts calls. Metrics of other parts are read on request and passed to
`exposition`, which imports Prometheus' library. Invariant: the number of series is bounded,
whatever names and codes callers and tools invent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fumehood.observe.ended_call import UNKNOWN, EndedCall
from fumehood.observe.figures import Figure

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Upper bounds of the buckets for durations, in seconds. 0.5 and 2 are default thresholds of
alerts."""

APPROVAL_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 86_400.0)
"""Upper bounds of the buckets for waits for approval, in seconds."""

OTHER = "(other)"
"""The label of all tools beyond `MAX_TOOLS`, and of all codes beyond `MAX_CODES`."""

MAX_TOOLS = 200
"""Maximum number of tools that have their own counters."""

MAX_CODES = 60
"""Maximum number of codes that are counted separately for one tool: enough for all codes of the
engine and some of the tool."""


class Histogram:
    """Counts durations by bucket, and sums them up."""

    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...] = BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the upper bound and the cumulative count of each bucket, in Prometheus' form."""
        found, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class ToolMetrics:
    """The counters of one tool."""

    __slots__ = ("codes", "durations", "retries")

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.durations = Histogram()
        self.retries = 0

    def add(self, call: EndedCall) -> None:
        is_new = call.code not in self.codes and len(self.codes) >= MAX_CODES
        self.codes[OTHER if is_new else call.code] += 1
        self.durations.add(call.duration_s)
        self.retries += call.retries


class CallMetrics:
    """The counters of one engine, since its start."""

    def __init__(self) -> None:
        self.tools: dict[str, ToolMetrics] = {}
        self.endings: Counter[str] = Counter()
        self.approvals = Histogram(APPROVAL_BUCKETS_S)

    def add(self, call: EndedCall) -> None:
        """Count one call. This method runs for every call, so it must be fast."""
        name = call.tool or UNKNOWN
        tool = self.tools.get(name)
        if tool is None:
            if len(self.tools) >= MAX_TOOLS and name is not UNKNOWN:
                name = OTHER
            tool = self.tools.setdefault(name, ToolMetrics())
        tool.add(call)
        if call.ended_by is not None:
            self.endings[call.ended_by] += 1
        if call.approval_s is not None:
            self.approvals.add(call.approval_s)


def exposition(calls: CallMetrics, figures: Sequence[Figure]) -> tuple[bytes, str]:
    """Return all metrics as a text in Prometheus' format, and the media type of this text.

    The text contains the counters `calls` of the engine's calls, the metrics `figures` of the
    engine's parts, and metrics of this process.
    """
    from prometheus_client import (
        CONTENT_TYPE_PLAIN_0_0_4,
        CollectorRegistry,
        ProcessCollector,
        generate_latest,
    )

    class All:
        def collect(self) -> Iterator[Metric]:
            yield from _of_calls(calls)
            yield from map(_family, figures)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _of_calls(calls: CallMetrics) -> Iterable[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    ended = CounterMetricFamily(
        "fumehood_tool_calls", "Calls that have ended, by tool and code.", labels=["tool", "code"]
    )
    durations = HistogramMetricFamily(
        "fumehood_tool_call_duration_seconds",
        "Duration of calls, without the wait for approval.",
        labels=["tool"],
    )
    retries = CounterMetricFamily(
        "fumehood_tool_call_retries", "Repeated attempts of calls.", labels=["tool"]
    )
    for name, tool in list(calls.tools.items()):  # calls may end meanwhile
        for code, count in list(tool.codes.items()):
            ended.add_metric([name, code], count)
        durations.add_metric([name], tool.durations.cumulative(), tool.durations.total_s)
        retries.add_metric([name], tool.retries)
    endings = CounterMetricFamily(
        "fumehood_sandbox_runs", "Runs in a sandbox, by how they ended.", labels=["ended_by"]
    )
    for how, count in list(calls.endings.items()):
        endings.add_metric([how], count)
    waits: Any = HistogramMetricFamily(
        "fumehood_approval_wait_seconds",
        "Time that decided calls have waited for approval.",
        buckets=calls.approvals.cumulative(),
        sum_value=calls.approvals.total_s,
    )
    return ended, durations, retries, endings, waits


def _family(figure: Figure) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    labels = [figure.label] if figure.label is not None else []
    family: Any = kind(f"fumehood_{figure.name}", figure.help, labels=labels)
    if isinstance(figure.value, Mapping):
        for name, value in figure.value.items():
            family.add_metric([name], value)
    else:
        family.add_metric([], figure.value)
    return family  # type: ignore[no-any-return]
