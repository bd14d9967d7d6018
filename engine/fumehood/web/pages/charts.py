"""Charts of calls over time: counts, failures, latency and cost.

The calls can be limited to a tool, an agent or a caller. Each column of a chart links to its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Literal

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.core.call_log import CallStep
from fumehood.web.figures import Chart, chart_of
from fumehood.web.view import Page, View, get, in_words, query_of

PERIODS = {"24": "last day, by hour", "168": "last 7 days, by hour", "720": "last 30 days, by day"}
BY_DAY_FROM = 720
FILTERS = ("tool", "agent", "principal")
NOTHING = CallStep(at="", calls=0, failed=0, p50_ms=0, p95_ms=0, cost=0)


async def show(view: View) -> Response:
    """Show the charts for the chosen period and filters."""
    given = {name: view.query.get(name).strip() for name in FILTERS}
    hours = view.query.one_of("hours", PERIODS)
    by: Literal["hour", "day"] = "day" if int(hours) >= BY_DAY_FROM else "hour"
    filters = {name: value for name, value in given.items() if value}
    error, is_partial = "", False
    steps: tuple[CallStep, ...] = ()
    try:
        found = await view.control.series(int(hours), by=by, **filters)
        steps, is_partial = found.items, found.is_partial
    except Refused as refused:
        if refused.code != "INVALID_PARAMS":
            raise
        error = in_words(refused)
    charts = _charts(_filled(view.now, int(hours), by, steps), by, filters)
    return view.render(
        "charts.html", charts=charts if steps else (), steps=steps, given=given, hours=hours,
        periods=PERIODS, error=error, is_partial=is_partial, by=by,
        calls=sum(one.calls for one in steps), failed=sum(one.failed for one in steps),
    )  # fmt: skip


def _filled(now: datetime, hours: int, by: str, steps: Sequence[CallStep]) -> list[CallStep]:
    """Return one step for each hour of the last `hours` hours or, if `by` is "day", for each day.
    Hours and days that are not in `steps` get a step without calls.
    """
    known = {one.at: one for one in steps}
    length = timedelta(days=1) if by == "day" else timedelta(hours=1)
    form = "%Y-%m-%d" if by == "day" else "%Y-%m-%dT%H"
    at, names = now - timedelta(hours=hours) + length, []
    while at <= now:
        names.append(at.strftime(form))
        at += length
    return [known.get(name, NOTHING.model_copy(update={"at": name})) for name in names]


def _charts(steps: Sequence[CallStep], by: str, filters: dict[str, str]) -> list[Chart]:
    def rows(
        whole: Callable[[CallStep], float], inner: Callable[[CallStep], float]
    ) -> list[tuple[str, str, float, float]]:
        return [(_name(s.at), _address(s.at, by, filters), whole(s), inner(s)) for s in steps]

    calls = rows(lambda one: one.calls, lambda one: one.failed)
    times = rows(lambda one: one.p95_ms, lambda one: one.p50_ms)
    charts = [
        chart_of("Calls", "calls", "of them failed", calls, "{:,.0f}".format),
        chart_of("Time", "95 % within", "half within", times, "{:,.0f} ms".format),
    ]
    if any(one.cost for one in steps):
        costs = rows(lambda one: one.cost, lambda one: 0.0)
        charts.append(chart_of("Cost", "cost", "", costs, "{:,.4f}".format))
    return charts


def _name(at: str) -> str:
    return f"{at.replace('T', ' ')}:00" if "T" in at else at


def _address(at: str, by: str, filters: dict[str, str]) -> str:
    begin = datetime.fromisoformat(f"{at}:00+00:00" if by == "hour" else f"{at}T00:00+00:00")
    return calls_from(begin, timedelta(hours=1) if by == "hour" else timedelta(days=1), **filters)


def calls_from(begin: datetime, length: timedelta, **filters: str) -> str:
    """Return the address of the page with the calls from `begin` to `begin + length`. `filters` are
    further filters of the list of calls.
    """
    since, until = begin.isoformat(), (begin + length).isoformat()
    return f"/calls?{query_of(since=since, until=until, **filters)}"


PAGE = Page("Charts", "/charts", (get("/charts", show),))
