"""Pages of the list of tools: in order, complete, filtered, and safe from a change meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import InvalidParams
from fumehood.core.tool import ToolType
from fumehood.protocol.cursors import Cursors
from fumehood.registry.index import RegisteredTool, Source, ToolIndex, tool_of_document
from fumehood.registry.listing import ToolFilter, ToolPage, page_of_tools
from support.definitions import expression_document, rest_document

CURSORS = Cursors(b"k" * 32)


def _tool(number: int, **fields: Any) -> RegisteredTool:
    return tool_of_document(rest_document(name=f"t{number:03}", **fields), Source.DIRECTORY)


def _index(count: int) -> ToolIndex:
    index = ToolIndex()
    tags = [["even"], ["odd"]]
    tools = [_tool(i, tags=tags[i % 2], category=f"c{i % 3}") for i in range(count)]
    index.replace_source(Source.DIRECTORY, reversed(tools))
    return index


def _page(index: ToolIndex, cursor: str | None = None, limit: int = 10, **filters: Any) -> ToolPage:
    return page_of_tools(
        index, CURSORS, "uid:1", filter_by=ToolFilter(**filters), limit=limit, cursor=cursor
    )


def _all_names(index: ToolIndex, limit: int, **filters: Any) -> list[str]:
    names: list[str] = []
    cursor: str | None = None
    while True:
        page = _page(index, cursor, limit, **filters)
        assert len(page.tools) <= limit
        assert page.pagination["has_more"] == (page.next_cursor is not None)
        names += [tool.definition.name for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return names


@pytest.mark.row("E5")
@pytest.mark.parametrize("limit", [1, 3, 10, 25, 26, 100])
def test_pages_together_hold_every_tool_once_in_order(limit: int) -> None:
    assert _all_names(_index(26), limit) == [f"t{i:03}" for i in range(26)]


@pytest.mark.row("E5", "R1")
def test_filters_match_exactly_and_are_counted() -> None:
    index = _index(12)
    index.register(
        tool_of_document(expression_document(), Source.PROGRAM).definition, Source.PROGRAM
    )
    assert _all_names(index, 5, tag="odd") == [f"t{i:03}" for i in range(1, 12, 2)]
    assert _all_names(index, 5, category="c1", tag="even") == ["t004", "t010"]
    assert _all_names(index, 5, type=ToolType.NATIVE) == ["sums"]
    assert _all_names(index, 5, tag="od") == []
    assert _page(index, limit=1, tag="odd").total_count == 6
    assert _page(index).total_count == 13


@pytest.mark.row("E5")
def test_tools_that_come_and_go_meanwhile_make_no_others_repeat_or_vanish() -> None:
    index = _index(20)
    first = _page(index)
    kept = [tool for tool in index if tool.definition.name not in ("t003", "t009", "t015")]
    late = _tool(0, version="2.0.0")
    index.replace_source(Source.DIRECTORY, [*kept, late])
    assert first.next_cursor is not None
    second = _page(index, first.next_cursor)
    names = [tool.definition.name for tool in second.tools]
    assert names == [f"t{i:03}" for i in range(10, 20) if i != 15]


@pytest.mark.row("E5")
@pytest.mark.parametrize("limit", [0, -1, 101])
def test_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(InvalidParams, match="from 1 to 100"):
        _page(_index(1), limit=limit)


@pytest.mark.row("E5")
def test_cursor_of_other_filters_is_refused() -> None:
    index = _index(20)
    cursor = _page(index, tag="odd", limit=2).next_cursor
    assert _page(index, cursor, tag="odd").tools
    for filters in ({}, {"tag": "even"}, {"category": "odd"}, {"tag": "odd", "category": "c0"}):
        with pytest.raises(InvalidParams):
            _page(index, cursor, **filters)
