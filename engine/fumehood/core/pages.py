"""Pages of a list: their sizes, and a collector for a tool's results in pages.

Values only.
"""

from __future__ import annotations

from typing import Any

from fumehood.core.json_types import JsonObject

DEFAULT_PAGE = 10
"""Items of one page if the caller does not choose."""

MAX_PAGE = 100
"""Maximum number of items on one page."""

MAX_ITEMS = 1000
"""Maximum number of items that `fetch_all` and the commands collect if the caller does not
choose."""


class Pages:
    """The items of one list, collected page by page.

        pages = Pages(arguments, max_items)
        while not pages.is_over:
            pages.add(the data of a call with pages.arguments)

    The list also ends after a page without items, or with a cursor that has already occurred, so
    that a faulty tool cannot return pages for ever.
    """

    def __init__(self, arguments: JsonObject | None, max_items: int) -> None:
        """Begin an empty list of at most `max_items` items. `arguments` are the arguments of the
        call for the first page.

        Raises:
            ValueError: `max_items` is under 1.
        """
        if max_items < 1:
            raise ValueError("max_items must be at least 1")
        self.arguments = arguments or {}
        """Arguments of the call for the next page."""
        self.is_over = False
        self.is_cut = False
        """Whether the list ended although the tool reported more items, without a usable cursor."""
        self.items: list[Any] = []
        self._max_items = max_items
        self._seen: set[str] = set()

    def add(self, data: JsonObject) -> None:
        """Add the items of one page. `data` is the data of the call's answer.

        Raises:
            ValueError: the tool does not return its results in pages.
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
