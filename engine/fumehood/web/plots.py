"""Figures made on the server: lengths for the templates, as numbers and SVG attributes only.

Text beside a figure is HTML, so that it is read, selected and made larger like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SERIES = 5
"""Named series of a plot. All others are one more, `others`."""

OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Bar:
    """One stage on a time line; `start` and `length` are parts of 100."""

    name: str
    start: float
    length: float
    ms: float


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a column; `top` and `height` are parts of 100."""

    series: int
    top: float
    height: float


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a plot, at `left` of its 100 units."""

    name: str
    total: float
    left: float
    width: float
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """Columns over time, each made of the same series."""

    columns: tuple[Column, ...]
    series: tuple[str, ...]
    most: float
    total: float


def time_line(stages_ms: Mapping[str, float]) -> list[Bar]:
    """One bar for each stage, each behind the one before."""
    total = sum(stages_ms.values()) or 1.0
    bars, passed = [], 0.0
    for name, ms in stages_ms.items():
        bars.append(Bar(name, _part(passed, total), max(_part(ms, total), 0.4), ms))
        passed += ms
    return bars


def share(amount: float, whole: float) -> float:
    """A part of 100, for a bar."""
    return min(_part(max(amount, 0.0), whole), 100.0) if whole > 0 else 0.0


def columns_of(names: Sequence[str], cells: Iterable[tuple[str, str, float]]) -> Plot:
    """A plot of (column, series, amount), with a column for each name."""
    table: dict[str, dict[str, float]] = {name: {} for name in names}
    totals: dict[str, float] = {}
    for column, series, amount in cells:
        if column in table and amount > 0:
            table[column][series] = table[column].get(series, 0.0) + amount
            totals[series] = totals.get(series, 0.0) + amount
    ranked = sorted(totals, key=lambda one: (-totals[one], one))
    # One more series needs no name of its own if it is the only other one.
    shown = ranked if len(ranked) <= SERIES + 1 else [*ranked[:SERIES], OTHERS]
    most = max((sum(row.values()) for row in table.values()), default=0.0)
    step = 100 / max(len(names), 1)
    columns = tuple(
        Column(
            name, sum(table[name].values()), round(at * step + step * 0.12, 3),
            round(step * 0.76, 3), _pieces(table[name], shown, most),
        )
        for at, name in enumerate(names)
    )  # fmt: skip
    return Plot(columns, tuple(shown), most, sum(totals.values()))


def _pieces(row: Mapping[str, float], shown: Sequence[str], most: float) -> tuple[Piece, ...]:
    pieces, top = [], 100.0
    for number, series in enumerate(shown, 1):
        if series == OTHERS:
            amount = sum(value for name, value in row.items() if name not in shown)
        else:
            amount = row.get(series, 0.0)
        height = _part(amount, most) if most else 0.0
        if height:
            top -= height
            pieces.append(Piece(number, round(top, 3), round(height, 3)))
    return tuple(pieces)


def _part(amount: float, whole: float) -> float:
    return round(100 * amount / whole, 3)
