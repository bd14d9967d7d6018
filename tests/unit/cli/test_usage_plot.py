"""`fumehood usage --plot`: the bars are as long as the figures say."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fumehood.budgets.model import BudgetStanding, UsageRow, UsageTable
from fumehood.budgets.model import Unit as BudgetUnit
from fumehood.cli.usage_plot import amount, show_plot

pytestmark = pytest.mark.row("E4")


def row(name: str | None, calls: int = 1, cost: str = "0.000000", *, by: str = "tool") -> UsageRow:
    group: Any = {by: name}
    return UsageRow(
        group=group, calls=calls, errors=0, input_tokens=calls, output_tokens=0, tokens_used=0,
        cost={"USD": cost},
    )  # fmt: skip


def table(
    *rows: UsageRow, by: str = "tool", budgets: tuple[BudgetStanding, ...] = ()
) -> UsageTable:
    groups: Any = (by,)
    return UsageTable(by=groups, items=rows, total=row(None), has_more=False, budgets=budgets)


def budget(
    name: str, spent: int, held: int = 0, limit: int = 100, unit: BudgetUnit = BudgetUnit.CALLS
) -> BudgetStanding:
    return BudgetStanding(
        budget=name, subject={}, period="day", unit=unit, limit=limit, spent=spent,
        held=held, left=0, resets_at=None,
    )  # fmt: skip


@pytest.fixture
def plotted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def plot(*tables: UsageTable, columns: int = 80) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        show_plot(tables)
        return capsys.readouterr().out.splitlines()

    return plot


def line(lines: list[str], name: str) -> str:
    (found,) = (each for each in lines if each.startswith(name))
    return found


def test_bars_are_as_long_as_the_figures_and_the_largest_comes_first(plotted: Any) -> None:
    lines = plotted(table(row("half", 5), row("tiny", 1), row("full", 1000, "1.250000")))
    assert [each.split()[0] for each in lines if each] == ["tool", "full", "half", "tiny"]
    assert line(lines, "full").split()[-1] == "1,000"
    assert "1.25" in line(lines, "full")
    assert "▏" in line(lines, "tiny")
    equal = plotted(table(row("a", 10), row("b", 5)))
    assert line(equal, "a").count("█") == pytest.approx(2 * line(equal, "b").count("█"), abs=2)


def test_what_costs_nothing_has_no_column(plotted: Any) -> None:
    assert "USD" not in plotted(table(row("a")))[0]
    assert "USD" in plotted(table(row("a", cost="0.000001")))[0]


def test_days_without_calls_are_there(plotted: Any) -> None:
    days = [row(day, by="day") for day in ("2026-02-27", "2026-03-02")]
    lines = plotted(table(*days, by="day"))
    names = [each.split()[0] for each in lines[1:] if each]
    assert names == ["2026-02-27", "2026-02-28", "2026-03-01", "2026-03-02"]
    many = plotted(table(row("2020-01-01", by="day"), row("2026-03-02", by="day"), by="day"))
    assert (len(many), many[1][:10]) == (22, "2026-02-11")


def test_many_groups_are_cut_to_the_largest(plotted: Any) -> None:
    lines = plotted(table(*(row(f"tool-{number:02}", number + 1) for number in range(25))))
    assert line(lines, "tool-24")
    assert not [each for each in lines if each.startswith("tool-04")]
    assert any("5 smaller ones are not shown." in each for each in lines)


def test_budgets_are_bars_of_what_is_spent_and_held(plotted: Any) -> None:
    budgets = (budget("half", 40, 10), budget("over", 250), budget("nothing", 0, 0, 0))
    lines = plotted(table(budgets=budgets))
    assert lines[0] == "There are no calls."
    assert "50%" in line(lines, "half")
    assert "250%" in line(lines, "over")
    assert line(lines, "over").count("█") == 2 * line(lines, "half").count("█")
    assert "100%" in line(lines, "nothing")
    assert line(lines, "half").endswith("100 calls")


def test_budget_of_money_names_the_currency(plotted: Any) -> None:
    money = table(budgets=(budget("daily", 1, limit=5, unit=BudgetUnit.MONEY),))
    lines = plotted(money.model_copy(update={"currency": "CHF"}))
    assert line(lines, "daily").endswith("5 CHF")


@given(
    st.lists(
        st.tuples(st.text(max_size=40), st.integers(0, 2**63), st.integers(0, 10**12)),
        min_size=1, max_size=5, unique_by=lambda drawn: drawn[0],
    ),
    st.integers(50, 120),
)  # fmt: skip
def test_any_usage_fits_its_terminal_and_writes_nothing_but_text(
    rows: list[tuple[str, int, int]], columns: int
) -> None:
    import io
    from contextlib import redirect_stdout

    written = io.StringIO()
    made = [row(name, calls, f"{Decimal(cost) / 10**6:.6f}") for name, calls, cost in rows]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written):
        patch.setenv("COLUMNS", str(columns))
        show_plot([table(*made)])
    lines = written.getvalue().split("\n")
    assert all(cell_len(each) <= columns for each in lines)
    assert all(char.isprintable() for each in lines for char in each)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("1.250000", "1.25"), ("0.000000", "0"), (100, "100"), ("0.000001", "0.000001"), (1_000_000, "1,000,000")],
)  # fmt: skip
def test_figures_are_short(value: Any, shown: str) -> None:
    assert amount(value) == shown
