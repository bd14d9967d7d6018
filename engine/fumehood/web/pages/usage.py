"""Usage: calls, tokens and money by day, agent or tool, and the remaining budgets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from starlette.responses import Response

from fumehood.budgets.model import BudgetStanding, UsageRow, UsageTable
from fumehood.web.figures import columns_of, share
from fumehood.web.view import Page, View, get

PERIODS = {"7": "7 days", "30": "30 days"}
GROUPS = {"tool": "tool", "agent": "agent", "principal": "caller"}
NOBODY = "without one"
"""The name of the group of calls that have no agent."""


async def show(view: View) -> Response:
    """Show plots by day, a table of sums, and every budget. Needs `admin`."""
    days = view.query.get("days", "7")
    days = days if days in PERIODS else "7"
    group = view.query.get("by", "tool")
    group = group if group in GROUPS else "tool"
    values: dict[str, Any] = {
        "days": days, "group": group, "periods": PERIODS, "groups": GROUPS, "table": None,
    }  # fmt: skip
    if not view.login.can_administer:
        return view.render("usage.html", **values)
    today = view.now.replace(hour=0, minute=0, second=0, microsecond=0)
    first = today - timedelta(days=int(days) - 1)
    by_day = await view.control.usage(["day", group], since=first)
    table = await view.control.usage([group], since=first)
    names = [f"{first + timedelta(days=n):%Y-%m-%d}" for n in range(int(days))]
    currency = _currency(table)
    rows = sorted(table.items, key=lambda row: -row.calls)
    return view.render(
        "usage.html",
        **{**values, "table": table},
        rows=[(_name(row, group), row, _money(row, currency)) for row in rows[:50]],
        names=names, currency=currency, money=_money(table.total, currency),
        plots=[
            ("Calls", "", columns_of(names, _cells(by_day.items, group, lambda row: row.calls))),
            ("Tokens", "", columns_of(names, _cells(by_day.items, group, _tokens))),
            (
                "Money",
                f" {currency}",
                columns_of(names, _cells(by_day.items, group, lambda r: _money(r, currency))),
            ),
        ],
        budgets=[(one, _spent(one)) for one in table.budgets[:100]],
    )  # fmt: skip


def _cells(rows: Any, group: str, amount: Any) -> list[tuple[str, str, float]]:
    return [(str(row.group["day"]), _name(row, group), float(amount(row))) for row in rows]


def _name(row: UsageRow, group: Any) -> str:
    return row.group.get(group) or NOBODY


def _tokens(row: UsageRow) -> int:
    return row.input_tokens + row.output_tokens + row.tokens_used


def _currency(table: UsageTable) -> str:
    """Return the currency of the largest amount: different currencies cannot be added."""
    cost = table.total.cost
    return max(cost, key=lambda name: float(cost[name]), default=table.currency)


def _money(row: UsageRow, currency: str) -> float:
    return float(row.cost.get(currency, "0"))


def _spent(one: BudgetStanding) -> tuple[float, float]:
    """Return the amount spent, and the amount spent or reserved, as percentages of the limit."""
    return share(float(one.spent), float(one.limit)), share(
        float(one.spent) + float(one.held), float(one.limit)
    )


PAGE = Page("Usage", "/usage", (get("/usage", show),))
