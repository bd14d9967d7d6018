"""Tables that fit the terminal: long cells are folded, and what matters least is left out."""

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

BETWEEN = 2
"""Characters between one column's text and the next one's."""


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
    columns = (
        Column(fields[index].head, overflow="fold", no_wrap=fields[index].whole) for index in kept
    )
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, BETWEEN // 2))
    for row in cells:
        table.add_row(*(Text(row[index]) for index in kept))
    console.print(table)
    left_out = [field.head for index, field in enumerate(fields) if index not in kept]
    if left_out:
        print(f"No room for: {', '.join(left_out)}. See --json.", file=sys.stderr)


def fitting(fields: Sequence[Field], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns that are readable side by side in so many characters."""
    kept = list(range(len(fields)))
    for index in sorted(kept, key=lambda index: -fields[index].drop):
        if fields[index].drop == 0 or _needed(fields, rows, kept) <= width:
            break
        kept.remove(index)
    return kept


def _needed(fields: Sequence[Field], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    return sum(_width(fields[index], [row[index] for row in rows]) + BETWEEN for index in kept)


def _width(field: Field, cells: Sequence[str]) -> int:
    widest = max(cell_len(text) for text in (field.head, *cells))
    return widest if field.whole else min(widest, READABLE)
