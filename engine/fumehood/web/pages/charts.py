"""Charts of the calls over time: counts, failures, latency and cost, for a tool, an agent or a
caller. Each step leads to its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from starlette.responses import Response

from fumehood.client.api_request import Refused
from fumehood.core.call_log import CallStep
from fumehood.web.figures import part_of
from fumehood.web.view import Page, View, get, in_words, query_of

PERIODS = {"24": "last day, by hour", "168": "last 7 days, by hour", "720": "last 30 days, by day"}
BY_DAY_FROM = 720
FILTERS = ("tool", "agent", "principal")
NOTHING = CallStep(at="", calls=0, failed=0, p50_ms=0, p95_ms=0, cost=0)


@dataclass(frozen=True, slots=True)
class Column:
    """One step of a chart. Places and heights are percentages of the chart."""

    name: str
    address: str
    left: float
    width: float
    whole: float
    """Height of the column."""
    inner: float
    """Height of the part of it that is drawn in another way, from below."""
    words: str
    """The values, as text."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its columns, and what they and their inner parts are."""

    title: str
    of_whole: str
    of_inner: str
    most: str
    """The value of the highest column, as text."""
    columns: tuple[Column, ...]


async def show(view: View) -> Response:
    """Show the charts."""
    given = {name: view.query.get(name).strip() for name in FILTERS}
    hours = view.query.get("hours", "24")
    hours = hours if hours in PERIODS else "24"
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
    """Return a step for each hour or day of the time."""
    known = {one.at: one for one in steps}
    length = timedelta(days=1) if by == "day" else timedelta(hours=1)
    form = "%Y-%m-%d" if by == "day" else "%Y-%m-%dT%H"
    at, names = now - timedelta(hours=hours) + length, []
    while at <= now:
        names.append(at.strftime(form))
        at += length
    return [known.get(name, NOTHING.model_copy(update={"at": name})) for name in names]


def _charts(steps: Sequence[CallStep], by: str, filters: dict[str, str]) -> list[Chart]:
    charts = [
        _chart(
            "Calls", "calls", "of them failed", steps, by, filters,
            lambda one: one.calls, lambda one: one.failed, "{:,.0f}".format,
        ),
        _chart(
            "Time", "95 % within", "half within", steps, by, filters,
            lambda one: one.p95_ms, lambda one: one.p50_ms, lambda value: f"{value:,.0f} ms",
        ),
    ]  # fmt: skip
    if any(one.cost for one in steps):
        charts.append(
            _chart(
                "Cost", "cost", "", steps, by, filters,
                lambda one: one.cost, lambda one: 0.0, "{:,.4f}".format,
            )
        )  # fmt: skip
    return charts


def _chart(
    title: str, of_whole: str, of_inner: str, steps: Sequence[CallStep], by: str,
    filters: dict[str, str], whole: Callable[[CallStep], float],
    inner: Callable[[CallStep], float], shown: Callable[[float], str],
) -> Chart:  # fmt: skip
    most = max(map(whole, steps), default=0.0)
    width = 100 / max(len(steps), 1)
    columns = []
    for number, one in enumerate(steps):
        words = f"{shown(whole(one))} {of_whole}"
        words += f", {shown(inner(one))} {of_inner}" if of_inner else ""
        columns.append(
            Column(
                name=_name(one.at), address=_address(one.at, by, filters),
                left=round(number * width + width * 0.1, 3), width=round(width * 0.8, 3),
                whole=part_of(whole(one), most), inner=part_of(inner(one), most), words=words,
            )
        )  # fmt: skip
    return Chart(title, of_whole, of_inner, shown(most), tuple(columns))


def _name(at: str) -> str:
    return f"{at.replace('T', ' ')}:00" if "T" in at else at


def _address(at: str, by: str, filters: dict[str, Any]) -> str:
    """Return the address of the calls of one step."""
    begin = datetime.fromisoformat(f"{at}:00+00:00" if by == "hour" else f"{at}T00:00+00:00")
    end = begin + (timedelta(hours=1) if by == "hour" else timedelta(days=1))
    return f"/calls?{query_of(since=begin.isoformat(), until=end.isoformat(), **filters)}"


PAGE = Page("Charts", "/charts", (get("/charts", show),))
