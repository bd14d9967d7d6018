"""Pages of a tool's own results."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.pages import Pages

pytestmark = pytest.mark.row("E5")


def page(items: list[int], cursor: object) -> dict[str, Any]:
    return {"items": items, "pagination": {"next_cursor": cursor}}


def test_number_of_fetched_items_is_limited() -> None:
    pages = Pages(None, 3)
    for number in (1, 3):
        pages.add(page([number, number + 1], str(number)))
    assert (pages.items, pages.is_over, pages.is_cut) == ([1, 2, 3], True, False)


def test_tool_that_does_not_answer_in_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="pages"):
        Pages(None, 3).add({"value": 1})


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
