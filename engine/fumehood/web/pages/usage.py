"""Usage by day, agent or tool: calls, tokens and money. Also the remaining budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any

from starlette.responses import Response

from fumehood.core.usage_table import BudgetStanding, UsageRow, UsageTable
from fumehood.web.figures import Chart, chart_of, figure, share
from fumehood.web.pages.charts import calls_from
from fumehood.web.view import Page, View, get

PERIODS = {"7": "7 days", "30": "30 days"}
GROUPS = {"tool": "tool", "agent": "agent", "principal": "caller"}
NOBODY = "without one"
"""The label of the group of calls that were made without an agent."""


async def show(view: View) -> Response:
    """Show administrators charts by day, a table of totals, and every budget. For other users, the
    page contains none of these.
    """
    days = view.query.one_of("days", PERIODS)
    group: Any = view.query.one_of("by", GROUPS)
    values: dict[str, Any] = {
        "days": days, "group": group, "periods": PERIODS, "groups": GROUPS, "table": None,
    }  # fmt: skip
    if not view.login.can_administer:
        return view.render("usage.html", **values)
    today = view.now.replace(hour=0, minute=0, second=0, microsecond=0)
    first = today - timedelta(days=int(days) - 1)
    by_day = await view.control.usage(["day"], since=first)
    table = await view.control.usage([group], since=first)
    currency = _currency(table)
    rows = sorted(table.items, key=lambda row: -row.calls)
    return view.render(
        "usage.html",
        **{**values, "table": table},
        rows=[(row.group.get(group) or NOBODY, row, _money(row, currency)) for row in rows[:50]],
        charts=_charts([first + timedelta(days=n) for n in range(int(days))], by_day, currency),
        currency=currency, money=_money(table.total, currency),
        budgets=[(one, _spent(one)) for one in table.budgets[:100]],
    )  # fmt: skip


def _charts(days: Iterable[datetime], table: UsageTable, currency: str) -> list[Chart]:
    """Return a chart of the calls, a chart of the tokens and a chart of the money, each by day."""
    known = {row.group["day"]: row for row in table.items}
    found = [(f"{day:%Y-%m-%d}", calls_from(day, timedelta(days=1))) for day in days]

    def steps(amount: Callable[[UsageRow], float]) -> list[tuple[str, str, float, float]]:
        return [
            (day, address, amount(known[day]) if day in known else 0.0, 0.0)
            for day, address in found
        ]

    return [
        chart_of("Calls", "calls", "", steps(lambda row: row.calls), figure),
        chart_of("Tokens", "tokens", "", steps(_tokens), figure),
        chart_of("Money", currency, "", steps(lambda row: _money(row, currency)), figure),
    ]


def _tokens(row: UsageRow) -> int:
    return row.input_tokens + row.output_tokens + row.tokens_used


def _currency(table: UsageTable) -> str:
    """Return the currency in which the largest amount was spent. If nothing was spent, return the
    table's own currency.
    """
    # The charts show only one currency, because different currencies cannot be added.
    cost = table.total.cost
    return max(cost, key=lambda name: float(cost[name]), default=table.currency)


def _money(row: UsageRow, currency: str) -> float:
    return float(row.cost.get(currency, "0"))


def _spent(one: BudgetStanding) -> tuple[float, float]:
    """Return two percentages of a budget's limit: the spent amount, and the sum of the spent and
    the reserved amount.
    """
    return share(float(one.spent), float(one.limit)), share(
        float(one.spent) + float(one.held), float(one.limit)
    )


PAGE = Page("Usage", "/usage", (get("/usage", show),))
