"""Which values are worked on in a thread."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.long_text import ELEMENT_SIZE, LOOP_SIZE, is_long

MOST = LOOP_SIZE // ELEMENT_SIZE


class Odd:
    """A value whose attributes cannot be read."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": ["c", None, 2.5, {"d": True}]}, False),
        (None, False),
        ("a" * LOOP_SIZE, False),
        ("a" * (LOOP_SIZE + 1), True),
        (b"a" * (LOOP_SIZE + 1), True),
        ({"a": ["b" * LOOP_SIZE]}, True),
        ({"b" * (LOOP_SIZE + 1): 1}, True),
        ([0] * MOST, False),
        ([0] * (MOST + 1), True),
        ([[[0] * 90] * 90] * 90, True),
        ({str(number): number for number in range(MOST + 1)}, True),
        ([Odd()], False),
    ],
)
def test_long_values_are_told_by_texts_and_elements(value: Any, *, expected: bool) -> None:
    assert is_long(value) is expected
