"""Escape misleading characters in untrusted text that people read on a terminal or in a browser.

All text that an interface does not write itself is escaped with this module: answers, program
output, names, reasons, files. Invariant: no character in the escaped text moves the cursor, changes
colour, is invisible, overlaps another or changes the text direction. Such a character is always
replaced by an escape in one form, for example `\\u{202e}`, also within JSON.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any

MAX_MARKS_IN_A_ROW = 3
"""Combining marks allowed on one letter, as languages need. More would overlap other lines."""

_MARKS = ("Mn", "Me")

_SHOW_NOTHING = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0}
    | set(range(0x180B, 0x1810))
    | set(range(0xFE00, 0xFE10))
    | set(range(0xE0000, 0xE1000))
)
"""Characters that count as printable but show nothing. *Source*: Unicode's
Default_Ignorable_Code_Point among letters and marks, and the blank braille pattern."""

_JSON_ESCAPE = re.compile(r"\\(u00([01][0-9a-f])|.)", re.DOTALL)
_SHORT_ESCAPES = {r"\b": r"\u{0008}", r"\f": r"\u{000c}", r"\r": r"\u{000d}"}


def visible(text: str) -> str:
    """Escape untrusted text for display on one line. Line ends and tabs are also escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(shown for _, shown in escapes(text, breaks=False))


def printable(text: str) -> str:
    """Escape untrusted text for display on several lines. Line ends and tabs are kept."""
    return "\n".join(map(_printable_line, text.split("\n")))


def aligned(text: str) -> str:
    """Escape an untrusted diff for display on a terminal.

    Line ends are kept. Tabs are replaced by spaces up to the next multiple of 8 columns.
    """
    # At the right edge, a tab does not move a terminal's cursor, so later characters could
    # overwrite text.
    return printable(text).expandtabs(8)


def misleading_in(text: str) -> Counter[str]:
    """Count the characters in `text` that `printable` would escape. Return each of these characters
    with its number of occurrences.
    """
    found: Counter[str] = Counter()
    for line in text.split("\n"):
        if not _is_harmless(line):
            found.update(char for char, shown in escapes(line, breaks=True) if shown != char)
    return found


def indented(text: str) -> str:
    """Escape untrusted text, and indent all lines except the first.

    The indentation shows which lines are untrusted, so that no line can imitate the interface's own
    output.
    """
    return printable(text).replace("\n", "\n    ")


def json_line(value: Any) -> str:
    """Format a value as JSON on one line, with the escapes of `visible`, for display to people."""
    return visible(_one_style(json.dumps(value, ensure_ascii=False, allow_nan=False)))


def json_lines(value: Any) -> str:
    """Format a value as indented JSON, with the escapes of `printable`, for display to people."""
    return printable(_one_style(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)))


def json_document(value: Any) -> str:
    """Format a value as valid JSON that is also safe on a terminal."""
    document = json.dumps(value, ensure_ascii=False, indent=2)
    if printable(document) == document:  # nearly always true, and many times faster
        return document
    return "".join(
        char if shown == char else json.dumps(char)[1:-1]
        for char, shown in escapes(document, breaks=True)
    )


def escapes(text: str, *, breaks: bool) -> Iterator[tuple[str, str]]:
    """Yield each character of a text with its escaped form. The two are equal if the character need
    not be escaped. If `breaks` is True, line ends and tabs are not escaped.
    """
    marks = 0
    can_carry = False
    for char in text:
        is_mark = unicodedata.category(char) in _MARKS
        marks = marks + 1 if is_mark else 0
        paints_over = is_mark and (not can_carry or marks > MAX_MARKS_IN_A_ROW)
        if (char in "\n\t" and breaks) or (_is_seen(char) and not paints_over):
            yield char, char
        else:
            yield char, f"\\u{{{ord(char):04x}}}"
        can_carry = char.isalpha() or (is_mark and can_carry)


def _printable_line(line: str) -> str:
    if _is_harmless(line):
        return line
    return "".join(shown for _, shown in escapes(line, breaks=True))


def _is_harmless(line: str) -> bool:
    """Whether a line has nothing to escape. If this is False, the line must be examined character
    by character.
    """
    if line.isascii() and line.isprintable():
        return True
    return all(_is_seen(char) and unicodedata.category(char) not in _MARKS for char in set(line))


def _is_seen(char: str) -> bool:
    """Whether a character is visible when it is displayed.

    Control, format, private-use and separator characters are not visible, and neither are
    characters that are displayed as a blank.
    """
    return char.isprintable() and ord(char) not in _SHOW_NOTHING


def _one_style(document: str) -> str:
    """Rewrite the escapes of invisible characters in a JSON document from JSON's form to the form
    that `visible` uses.
    """

    def ours(found: re.Match[str]) -> str:
        if found[2] is not None:
            return f"\\u{{00{found[2]}}}"
        return _SHORT_ESCAPES.get(found[0], found[0])

    return _JSON_ESCAPE.sub(ours, document)
