"""Tables that fit the terminal: long cells are folded between words, and what matters least is
left out before a word is broken.
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

from fumehood.cli.escaping import printable

READABLE = 20
"""Characters that are enough to read a cell by; longer ones are folded."""

LONGEST_WORD = 32
"""Characters of a word that a column is made wide enough for; longer ones are folded."""

NARROWEST = 8
"""Characters that a column keeps where its words have to be folded."""

BETWEEN = 3
"""Characters between one column's text and the next one's: padding, rule, padding."""


@dataclass(frozen=True, slots=True)
class Field:
    """One column. Where there is no room the highest `drop` goes first, and 0 never.

    What is to be copied is `whole`: it is not folded.
    """

    head: str
    drop: int = 0
    whole: bool = False


def show_table(fields: Sequence[Field], rows: Sequence[Sequence[str]]) -> None:
    """Rows of text, each as long as `fields`. What they hold cannot move the cursor."""
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
    """The columns that are readable side by side in so many characters."""
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
    """The width that a column needs to keep its words whole, and the one that it could use."""
    cells = [field.head, *(row[index] for row in rows)]
    most = max(cell_len(line) for text in cells for line in text.split("\n"))
    if field.whole:
        return most, most
    word = max((cell_len(word) for text in cells for word in text.split()), default=0)
    return min(word, LONGEST_WORD), most


def _widths(
    bounds: Sequence[tuple[int, int]], whole: Sequence[bool], room: int
) -> list[int | None]:
    """A width for each column: words first, then the rest in turn. Where words do not fit, the
    widest columns fold them. None leaves the width to the table.
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
