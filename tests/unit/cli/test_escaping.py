"""One way to show what a terminal would obey, whoever wrote it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fumehood.cli.escaping import indented, json_document, json_line, json_lines, printable, visible

NASTY = "a\x1b[2J\u202e\x9b1m\r\u200b"


def test_line_ends_stay_only_where_lines_are_wanted() -> None:
    assert printable("a\n\tb\r") == "a\n\tb\\u{000d}"
    assert visible("a\n\tb") == "a\\u{000a}\\u{0009}b"


def test_one_style_stands_in_a_line_also_within_json() -> None:
    assert json_line({"a\x1b": "\u202e\r\b\x7f"}) == (
        '{"a\\u{001b}": "\\u{202e}\\u{000d}\\u{0008}\\u{007f}"}'
    )


def test_backslashes_that_somebody_wrote_are_told_from_escapes() -> None:
    assert json_line("\\u001b \\b") == '"\\\\u001b \\\\b"'
    assert json_line("\\\x1b") == '"\\\\\\u{001b}"'


def test_no_line_of_a_message_begins_where_one_of_ours_could() -> None:
    assert indented("bad\nnothing ran") == "bad\n    nothing ran"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_json_for_a_terminal_stays_json_and_does_nothing_there(value: Any) -> None:
    document = json_document(value)
    assert json.loads(document) == value
    assert all(line.isprintable() for line in document.split("\n"))


@given(st.text() | st.just(NASTY))
def test_nothing_that_is_shown_is_obeyed(text: str) -> None:
    assert visible(text).isprintable()
    assert json_line(text).isprintable()
    assert all(line.isprintable() for line in json_lines([text]).split("\n"))
