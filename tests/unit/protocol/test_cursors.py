"""Cursors: only what was made here, for this list and this principal, is read."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import InvalidParams
from fumehood.protocol.cursors import Cursors

CURSORS = Cursors(b"k" * 32)


@pytest.mark.row("E5")
@given(position=st.text(st.characters(exclude_categories=["Cs"]), max_size=64))
def test_cursor_round_trips(position: str) -> None:
    cursor = CURSORS.make("tools", "uid:1", position)
    assert CURSORS.read(cursor, "tools", "uid:1") == position
    assert cursor.isascii()
    assert not set(cursor) & set("+/= &")


@pytest.mark.row("E5", "D4")
@pytest.mark.parametrize(
    ("listing", "principal"),
    [("tools", "uid:2"), ("calls", "uid:1"), ("tool", "s5:uid:1"), ("tools5:uid:1", "")],
)
def test_cursor_of_another_list_or_principal_is_refused(listing: str, principal: str) -> None:
    cursor = CURSORS.make("tools", "uid:1", "calculator")
    with pytest.raises(InvalidParams) as caught:
        CURSORS.read(cursor, listing, principal)
    assert caught.value.fields == ("cursor",)


@pytest.mark.row("E5")
def test_cursor_of_another_engine_start_is_refused() -> None:
    cursor = Cursors(b"other").make("tools", "uid:1", "calculator")
    with pytest.raises(InvalidParams, match="was restarted"):
        CURSORS.read(cursor, "tools", "uid:1")


@pytest.mark.row("E5")
def test_altered_cursor_is_refused_at_every_byte() -> None:
    cursor = CURSORS.make("tools", "uid:1", "calculator")
    raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
    for position in range(len(raw)):
        altered = bytearray(raw)
        altered[position] ^= 1
        with pytest.raises(InvalidParams):
            CURSORS.read(base64.urlsafe_b64encode(altered).decode(), "tools", "uid:1")


@pytest.mark.parametrize("cursor", ["", "a", "!!!!", "ü", "\udcff", "AAAA", "A" * 100_000])
def test_malformed_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidParams):
        CURSORS.read(cursor, "tools", "uid:1")
