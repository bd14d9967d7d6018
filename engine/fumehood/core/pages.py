"""Pages of a tool's results (mission E5): the pagination of one answer. Values only."""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject

MAX_ITEMS = 1000
"""Default limit of `fetch_all`."""


class Pages:
    """The items of one list, collected page by page.

        pages = Pages(arguments, max_items)
        while not pages.is_over:
            pages.add(the data of a call with pages.arguments)

    A tool may never end, so a page without items or with a repeated cursor ends the list.
    """

    def __init__(self, arguments: JsonObject | None, max_items: int) -> None:
        """Collect up to this many items of the calls with these arguments.

        Raises:
            ValueError: `max_items` is not a number over 0.
        """
        if max_items < 1:
            raise ValueError("max_items must be at least 1")
        self.arguments = arguments or {}
        """Arguments of the next page's call."""
        self.is_over = False
        self.is_cut = False
        """Whether the tool reported more items without a usable cursor."""
        self.items: list[Any] = []
        self._max_items = max_items
        self._seen: set[str] = set()

    def add(self, data: JsonObject) -> None:
        """Take the data of one page.

        Raises:
            ValueError: the tool does not answer in pages.
        """
        items, pagination = data.get("items"), data.get("pagination")
        if not isinstance(items, list) or not isinstance(pagination, dict):
            raise ValueError("the tool does not answer in pages")  # noqa: TRY004
        self.items += items[: self._max_items - len(self.items)]
        cursor = pagination.get("next_cursor")
        is_full = len(self.items) >= self._max_items
        if not isinstance(cursor, str) or cursor in self._seen or not items or is_full:
            self.is_over = True
            self.is_cut = isinstance(cursor, str) and not is_full
            return
        self._seen.add(cursor)
        self.arguments = {**self.arguments, "cursor": cursor}
