"""Lines for an approver: folded to the terminal, a stranger's marked as such.

Invariant: what a stranger wrote stands at no line's start, also where a line is folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len

from fumehood.cli.escaping import visible

Kind = Literal["head", "plain", "theirs", "added", "removed", "warning"]

INDENT = "  "
MARK = "  │ "
MIN_COLUMNS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text, safe to print, and how it may be coloured."""

    text: str
    kind: Kind = "plain"


def plain(text: str, columns: int, kind: Kind = "plain") -> Iterator[Line]:
    """Words of ours, in which a stranger's are escaped already."""
    return (Line(piece, kind) for piece in folded(text, columns, indent=MARK))


def warning(text: str, columns: int) -> Iterator[Line]:
    """Words of ours that must not be overlooked."""
    return plain(text, columns, "warning")


def theirs(text: str, columns: int, kind: Kind = "theirs") -> Iterator[Line]:
    """A stranger's text, each of its lines behind the mark."""
    for line in text.split("\n"):
        for piece in folded(visible(line), columns - len(MARK)):
            yield Line(MARK + piece, kind)


def folded(text: str, columns: int, indent: str = "") -> Iterable[str]:
    """Pieces that fit; those after the first begin with `indent`."""
    columns = max(columns, MIN_COLUMNS)
    if len(text) <= columns and cell_len(text) <= columns:
        return [text]
    pieces: list[str] = []
    piece, used = "", 0
    for char in text:
        width = cell_len(char)
        if used + width > columns:
            pieces.append(piece)
            piece, used = indent, cell_len(indent)
        piece += char
        used += width
    return [*pieces, piece]
