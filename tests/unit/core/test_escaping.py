"""Escaping of untrusted text: the fast ways say the same as looking at each character."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.escaping import escapes, misleading_in, printable, visible

pytestmark = pytest.mark.row("A6")

ODD = st.sampled_from([*"a\n\té́́́\u200b\u202e\x1b\ufeff日ﾠ", "\u0301", "\u20e3"])
TEXTS = st.text(max_size=40) | st.lists(ODD, max_size=20).map("".join)


@given(TEXTS)
def test_printable_text_matches_the_escape_of_each_character(text: str) -> None:
    assert printable(text) == "".join(shown for _, shown in escapes(text, breaks=True))
    assert visible(text) == "".join(shown for _, shown in escapes(text, breaks=False))


@given(TEXTS)
def test_misleading_characters_are_exactly_the_escaped_ones(text: str) -> None:
    expected = Counter(char for char, shown in escapes(text, breaks=True) if shown != char)
    assert misleading_in(text) == expected
