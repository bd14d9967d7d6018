"""`fumehood usage --plot`: calls, tokens and money as bars, and budgets by how full they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from decimal import Decimal

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fumehood.budgets.model import UsageRow, UsageTable
from fumehood.cli.escaping import visible
from fumehood.cli.overview import NEARLY_FULL, share_of

MAX_BARS = 20
"""The largest ones are shown; of days the last ones."""

NARROWEST, WIDEST = 6, 30
"""Of a bar. Where there is less room, the last columns are left out."""
BETWEEN = 2
"""Characters between two columns."""


_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show_plot(tables: Sequence[UsageTable]) -> None:
    """Print a table of bars for each grouping, and one for the budgets, if there are any."""
    console = Console(highlight=False, markup=False, emoji=False)
    for table in tables:
        if table.items:
            console.print(_bars(table, console.width), "")
    if not any(table.items for table in tables):
        console.print("There are no calls.")
    if tables[0].budgets:
        console.print(_budgets(tables[0], console.width))


def amount(value: Decimal | str | int) -> str:
    """Format a figure without trailing zeros."""
    text = f"{Decimal(value):,f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _bars(table: UsageTable, columns: int) -> Table:
    rows = [(_name(table, row), _figures(row)) for row in table.items]
    found = list(dict.fromkeys(kind for _, figures in rows for kind in figures))
    most = {kind: max(figures.get(kind, Decimal()) for _, figures in rows) for kind in found}
    kinds = [kind for kind in found if most[kind] or kind == "calls"]
    if table.by == ("day",):
        rows = _every_day(rows)
    else:
        rows.sort(key=lambda row: [row[1].get(kind, 0) for kind in kinds], reverse=True)
    shown = rows[:MAX_BARS]
    head = ", ".join(table.by)
    names = min(columns // 3, max(len(name) for name in (head, *(name for name, _ in shown))))
    digits = {kind: max(len(amount(row.get(kind, 0))) for _, row in shown) for kind in kinds}
    while True:
        room = columns - names - sum(digits[k] for k in kinds) - BETWEEN * (2 * len(kinds) + 1)
        if room >= NARROWEST * len(kinds) or len(kinds) == 1:
            break
        kinds.pop()
    grid = _grid(head, names)
    for kind in kinds:
        grid.add_column(kind, no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, min_width=digits[kind])
    bar = max(1, min(WIDEST, room // len(kinds)))
    for name, figures in shown:
        cells = [Text(name)]
        for kind in kinds:
            value = figures.get(kind, Decimal())
            part = value / most[kind] if most[kind] else Decimal()
            cells += [Text(_bar(part, bar), style="cyan"), Text(amount(value))]
        grid.add_row(*cells)
    if len(rows) > MAX_BARS:
        grid.caption = f"{len(rows) - MAX_BARS} smaller ones are not shown."
    return grid


def _budgets(table: UsageTable, columns: int) -> Table:
    names = columns // 3
    grid = _grid("budget", names)
    for head in ("used", "%", "of"):
        grid.add_column(head, no_wrap=True, justify="right" if head == "%" else "left")
    width = max(1, min(WIDEST, columns - names - 30))
    shares = [(share_of(one.spent, one.held, one.limit), one) for one in table.budgets]
    for share, one in sorted(shares, key=lambda pair: pair[0], reverse=True)[:MAX_BARS]:
        style = "red" if share >= 1 else "yellow" if share >= NEARLY_FULL else "green"
        of = ", ".join(one.subject.values())
        grid.add_row(
            Text(visible(f"{one.budget} ({of})" if of else one.budget)),
            Text(_bar(min(share, Decimal(1)), width).ljust(width, "░"), style=style),
            Text(f"{share:.0%}"),
            Text(f"{amount(one.limit)} {one.unit_in(table.currency)}"),
        )
    return grid


def _grid(head: str, width: int) -> Table:
    names = Column(head, max_width=width, no_wrap=True, overflow="ellipsis")
    return Table(names, box=None, pad_edge=False, padding=(0, BETWEEN, 0, 0))


def _name(table: UsageTable, row: UsageRow) -> str:
    return visible(", ".join(row.group.get(name) or "–" for name in table.by))


def _figures(row: UsageRow) -> dict[str, Decimal]:
    tokens = row.input_tokens + row.output_tokens + row.tokens_used
    costs = {currency: Decimal(cost) for currency, cost in row.cost.items()}
    return {**costs, "tokens": Decimal(tokens), "calls": Decimal(row.calls)}


def _every_day(
    rows: Sequence[tuple[str, dict[str, Decimal]]],
) -> list[tuple[str, dict[str, Decimal]]]:
    """Put in the days without calls: without them a bar's neighbour is not the day before."""
    known = dict(rows)
    last = date.fromisoformat(max(known))
    first = max(date.fromisoformat(min(known)), last - timedelta(days=MAX_BARS - 1))
    days = [f"{first + timedelta(days=number)}" for number in range((last - first).days + 1)]
    return [(day, known.get(day, {})) for day in days]


def _bar(part: Decimal, width: int) -> str:
    """Draw a bar; what is not nothing is seen."""
    eighths = max(round(part * width * 8), int(part > 0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
