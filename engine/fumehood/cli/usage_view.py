"""How usage looks: tables for people, CSV for spreadsheets.

Invariant: the name of a tool that was asked for is the caller's own text. It can neither move
the reader's cursor nor become a formula in the spreadsheet of whoever opens the file.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import TextIO

from fumehood.budgets.model import BudgetStanding
from fumehood.budgets.usage import UsageRow, UsageTable
from fumehood.cli.escaping import visible
from fumehood.cli.tables import Field, show_table

FORMULA_BEGINS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "|", "%")
"""*Source*: OWASP, CSV injection; with the full-width ones that some programs read alike."""

_SUMS = ("calls", "errors", "input_tokens", "output_tokens", "tokens_used")


def show_usage(table: UsageTable) -> None:
    """Two tables: the groups with their total, and the budgets if there are any."""
    heads = [Field(name) for name in table.by]
    heads += [
        Field("calls", whole=True), Field("errors", drop=4), Field("tokens in", drop=3),
        Field("tokens out", drop=2), Field("used", drop=1), Field("cost"),
    ]  # fmt: skip
    rows = [_cells(table, row) for row in table.items]
    total = _cells(table, table.total)
    if table.by:
        total[0] = "total"
    show_table(heads, [*rows, total])
    if table.budgets:
        show_budgets(table.budgets)


def show_budgets(standings: Sequence[BudgetStanding]) -> None:
    """What each budget has left."""
    fields = (
        Field("budget"), Field("of", drop=1), Field("what", whole=True), Field("limit", drop=3),
        Field("spent", drop=4), Field("left", whole=True), Field("resets at (UTC)", drop=2),
    )  # fmt: skip
    show_table(fields, [_standing(one) for one in standings])


def write_csv(table: UsageTable, file: TextIO) -> None:
    """One line a group and currency: money of two currencies is never in one cell."""
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\r\n")
    writer.writerow([*table.by, *_SUMS, "cost", "currency"])
    for row in table.items:
        names = [as_cell(row.group[name] or "") for name in table.by]
        sums = [getattr(row, name) for name in _SUMS]
        for number, (currency, cost) in enumerate(row.cost.items()):
            # The sums are of all of its currencies: they stand on the first line only.
            writer.writerow([*names, *(sums if number == 0 else [0] * len(sums)), cost, currency])


def as_cell(text: str) -> str:
    """A text that a spreadsheet shows as it is, and does not calculate."""
    shown = visible(text)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA_BEGINS) else shown


def _cells(table: UsageTable, row: UsageRow) -> list[str]:
    names = [visible(row.group.get(name) or "–") for name in table.by]
    sums = [str(getattr(row, name)) for name in _SUMS]
    return [*names, *sums, ", ".join(f"{cost} {currency}" for currency, cost in row.cost.items())]


def _standing(one: BudgetStanding) -> tuple[str, ...]:
    return (
        one.budget,
        ", ".join(f"{name} {value}" for name, value in one.subject.items()) or "all",
        one.unit,
        str(one.limit),
        str(one.spent),
        str(one.left),
        "never" if one.resets_at is None else f"{one.resets_at:%Y-%m-%d %H:%M}",
    )
