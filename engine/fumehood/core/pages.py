"""Pages of a tool's own results (mission E5): what one page says. Values only."""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject

MAX_ITEMS = 1000
"""Of `fetch_all`, unless its caller says otherwise."""


class Pages:
    """The items of one list, collected page by page.

    A tool is not trusted to end: a page without new items or with a cursor that was there before
    ends the list.
    """

    def __init__(self, max_items: int) -> None:
        """Collect up to this many items.

        Raises:
            ValueError: `max_items` is not a number over 0.
        """
        if max_items < 1:
            raise ValueError("max_items must be at least 1")
        self.items: list[Any] = []
        self._max_items = max_items
        self._seen: set[str] = set()

    def add(self, data: JsonObject) -> str | None:
        """Take the data of one page; returns the cursor of the next one, or None after the last.

        Raises:
            ValueError: the tool does not answer in pages.
        """
        items, pagination = data.get("items"), data.get("pagination")
        if not isinstance(items, list) or not isinstance(pagination, dict):
            raise ValueError("the tool does not answer in pages")  # noqa: TRY004
        self.items += items[: self._max_items - len(self.items)]
        cursor = pagination.get("next_cursor")
        if not isinstance(cursor, str) or cursor in self._seen or not items:
            return None
        self._seen.add(cursor)
        return cursor if len(self.items) < self._max_items else None
