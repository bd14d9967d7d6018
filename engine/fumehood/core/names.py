"""Names: the pattern of a tool's name, and the known names that are near a misspelt one.

It loads next to nothing, so that a command can look at a name cheaply.
"""

from __future__ import annotations

from collections.abc import Iterable

NAME_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_-]{0,63}$"

MAX_COMPARED = 1000
"""Names of about the same length that are looked at: each one costs tens of microseconds."""

MAX_NAMED = 3


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence that names what may have been meant, with a space before it; else nothing."""
    from difflib import get_close_matches

    given = given[:80]
    compared = [name for name in known if _is_near_in_length(name, given)][:MAX_COMPARED]
    near = get_close_matches(given, compared, n=MAX_NAMED)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _is_near_in_length(one: str, other: str) -> bool:
    """Whether they could be near at all: three fifths of both together have to be common."""
    shorter, longer = sorted((len(one), len(other)))
    return shorter * 7 >= longer * 3
