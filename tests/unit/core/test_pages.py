"""Pages of a tool's own results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import CallFailed, Config, Engine, tool
from fumehood.core.pages import Pages
from fumehood.testing import FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("E5")]

WORDS = [f"word {number}" for number in range(25)]


@tool(sandboxed=False)
async def words(limit: int = 10, cursor: str = "0") -> dict[str, Any]:
    """List words."""
    start = int(cursor)
    more = start + limit < len(WORDS)
    pagination = {"has_more": more, "next_cursor": str(start + limit) if more else None}
    return {"items": WORDS[start : start + limit], "pagination": pagination}


@tool(sandboxed=False)
async def one_word() -> str:
    """Give one word."""
    return WORDS[0]


def page(items: list[int], cursor: object) -> dict[str, Any]:
    return {"items": items, "pagination": {"next_cursor": cursor}}


def engine(home: Path) -> Engine:
    walls: dict[str, Any] = {"interpreter": FakeWall(), "container": FakeWall()}
    return Engine([words, one_word], config=Config(home=home), **walls)


async def test_number_of_fetched_items_is_limited(home: Path) -> None:
    async with engine(home) as running:
        assert await running.fetch_all("words", max_items=12) == WORDS[:12]


async def test_failing_page_raises_its_envelope(home: Path) -> None:
    async with engine(home) as running:
        with pytest.raises(CallFailed) as failed:
            await running.fetch_all("words", {"limit": "many"})
        assert failed.value.code == "INVALID_PARAMS"
        with pytest.raises(ValueError, match="pages"):
            await running.fetch_all("one_word")


@pytest.mark.parametrize("cursor", ["again", 7, "", None])
def test_repeated_or_missing_cursor_ends_the_list(cursor: object) -> None:
    pages = Pages({"a": 1}, 100)
    pages.add(page([1], cursor))
    if not pages.is_over:
        assert pages.arguments == {"a": 1, "cursor": cursor}
        pages.add(page([2], cursor))
    assert pages.is_over
    assert pages.is_cut is (cursor in ("again", ""))


def test_endless_list_of_empty_pages_ends() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pages({}, 0)
    pages = Pages({}, 10)
    pages.add(page([], "more"))
    assert pages.is_over
    assert pages.is_cut
