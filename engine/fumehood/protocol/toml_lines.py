"""In which line of a TOML text each table and key stands, which `tomllib` does not tell.

Host side, asked by `plain_values` for a text that was parsed without a fault. What is inside
inline tables and arrays has the line of the key that they are given to.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str | int, ...]
Lines = dict[Path, int]
"""From where a value lies in a document to the line of its key, counted from 1."""

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_KEY})[ \t]*\]")
_PAIR = re.compile(rf"[ \t]*({_KEY})[ \t]*=")
_PARTS = re.compile(_PART)
_TOKEN = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"""+'
    r"|'''(?:[^']|'(?!''))*'''+"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)
"""What may hold a line break or a bracket that means nothing, and the brackets that do. Each
alternative is decided by its first characters, so it takes linear time."""


def lines_of(text: str) -> Lines:
    """The line of every table and every key of a sound text."""
    lines: Lines = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for number, statement in _statements(text):
        if header := _HEADER.match(statement):
            table = _resolved(_parts(header[2]), counts, is_new=header[1] == "[[")
            lines[table] = number
        elif pair := _PAIR.match(statement):
            path = table + _parts(pair[1])
            for length in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:length], number)
    return lines


def line_of(lines: Lines, path: Path) -> int | None:
    """The line of what lies there, or of the nearest that holds it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _statements(text: str) -> list[tuple[int, str]]:
    """What is not blank and stands outside of every string and bracket, with its line."""
    found: list[tuple[int, str]] = []
    begin = depth = 0
    line = first = 1
    for token in _TOKEN.finditer(text + "\n"):
        sign = token[0]
        if sign == "\n" and depth <= 0:
            found.append((first, text[begin : token.start()]))
            begin, depth, first = token.end(), 0, line + 1
        elif sign in "[{":
            depth += 1
        elif sign in "]}":
            depth -= 1
        line += sign.count("\n")
    return found


def _parts(key: str) -> Path:
    """A dotted key's parts; how a quoted one is read, the parser knows."""
    return tuple(
        next(iter(tomllib.loads(f"{part} = 0"))) if part[0] in "\"'" else part
        for part in _PARTS.findall(key)
    )


def _resolved(key: Path, counts: dict[Path, int], *, is_new: bool) -> Path:
    """A header's path with the number of each array's table that it is in."""
    path: Path = ()
    for position, part in enumerate(key):
        path += (part,)
        if is_new and position == len(key) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path += (counts[path],)
    return path
