"""Parts of a result: joined, counted, and passed on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.executors.parts import Parts, TooManyParts
from fumehood.protocol import strict_json

pytestmark = [pytest.mark.anyio, pytest.mark.row("T3")]

VALUES = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9) | st.lists(st.text())


def given_out(values: list[Any]) -> Generator[Any, None, None]:
    yield from values


@given(st.lists(VALUES), st.integers(0, 200))
def test_streamed_parts_form_a_text_or_list_within_the_limit(values: list[Any], most: int) -> None:
    heard: list[str] = []
    parts = Parts(most, heard.append)
    size = sum(len(strict_json.dumps(value)) + 1 for value in values)
    if size > most:
        with pytest.raises(TooManyParts):
            parts.collect(given_out(values))
        assert len("".join(heard)) <= most
        return
    data = parts.collect(given_out(values)).data
    if all(isinstance(value, str) for value in values):
        assert data == "".join(heard) == "".join(values)
    else:
        assert data == values


async def test_generators_are_always_closed() -> None:
    closed = []

    def plain() -> Generator[str, None, None]:
        try:
            while True:
                yield "x"
        finally:
            closed.append("plain")

    async def waiting() -> AsyncGenerator[str, None]:
        try:
            while True:
                yield "x"
        finally:
            closed.append("waiting")

    with pytest.raises(TooManyParts):
        Parts(100).collect(plain())
    with pytest.raises(TooManyParts):
        await Parts(100).collect_async(waiting())
    assert closed == ["plain", "waiting"]
