"""Tables that fit the terminal.

Long cells are folded between words; the least important columns are dropped before a word breaks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fumehood.core.escaping import printable

READABLE = 20
"""A cell's readable width in characters; longer cells are folded."""

LONGEST_WORD = 32
"""The longest word in characters that a column is widened for; longer words are folded."""

NARROWEST = 8
"""A column's minimum width if its words have to be folded."""

BETWEEN = 3
"""Characters between the text of two columns: padding, rule, padding."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column. The highest `drop` is dropped first if room is short, 0 never.

    A `whole` column is not folded, so that its cells can be copied.
    """

    head: str
    drop: int = 0
    whole: bool = False


def show_table(fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text, each as long as `fields`. Cells are escaped."""
    console = Console()
    cells = [[printable(cell) for cell in row] for row in rows]
    kept = fitting(fields, cells, console.width)
    widths = _widths(
        [_bounds(fields[index], cells, index) for index in kept],
        [fields[index].whole for index in kept],
        console.width,
    )
    columns = (
        Column(fields[index].head, overflow="fold", no_wrap=fields[index].whole, width=width)
        for index, width in zip(kept, widths, strict=True)
    )
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for row in cells:
        table.add_row(*(Text(row[index]) for index in kept))
    console.print(table)
    left_out = [field.head for index, field in enumerate(fields) if index not in kept]
    if left_out:
        print(f"Hidden columns: {', '.join(left_out)}. See --json.", file=sys.stderr)


def fitting(fields: Sequence[Field], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indexes of the columns that fit into `width` at a readable size."""
    kept = list(range(len(fields)))
    for index in sorted(kept, key=lambda index: -fields[index].drop):
        if fields[index].drop == 0 or _needed(fields, rows, kept) <= width:
            break
        kept.remove(index)
    return kept


def _needed(fields: Sequence[Field], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    return sum(_readable(fields[index], rows, index) + BETWEEN for index in kept) - 1


def _readable(field: Field, rows: Sequence[Sequence[str]], index: int) -> int:
    least, most = _bounds(field, rows, index)
    return max(least, min(most, READABLE))


def _bounds(field: Field, rows: Sequence[Sequence[str]], index: int) -> tuple[int, int]:
    """Return the width that keeps a column's words whole, and its full width."""
    cells = [field.head, *(row[index] for row in rows)]
    most = max(cell_len(line) for text in cells for line in text.split("\n"))
    if field.whole:
        return most, most
    word = max((cell_len(word) for text in cells for word in text.split()), default=0)
    return min(word, LONGEST_WORD), most


def _widths(
    bounds: Sequence[tuple[int, int]], whole: Sequence[bool], room: int
) -> list[int | None]:
    """Return a width for each column: enough for its words, then a share of the rest.

    If words do not fit, the widest columns fold them. None leaves the width to the table.
    """
    widths = [least for least, _ in bounds]
    spare = room - sum(widths) - BETWEEN * len(widths) + 1
    foldable = [index for index, is_whole in enumerate(whole) if not is_whole]
    while spare < 0:
        widest = max(foldable, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= NARROWEST:
            return [None] * len(widths)
        widths[widest] -= 1
        spare += 1
    while spare and any(width < most for width, (_, most) in zip(widths, bounds, strict=True)):
        for index, (_, most) in enumerate(bounds):
            if spare and widths[index] < most:
                widths[index] += 1
                spare -= 1
    return list(widths)
