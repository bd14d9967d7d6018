"""The index: versions, lists and filters."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from fumehood import InvalidDefinition, ToolDefinition
from fumehood.core.errors import InvalidParams, ToolNotFound
from fumehood.core.tool import ToolType
from fumehood.protocol.cursors import Cursors
from fumehood.registry.index import (
    RegisteredTool,
    Source,
    ToolFilter,
    ToolIndex,
    ToolPage,
    filter_tools,
    page_of_tools,
    tool_of_document,
)
from support.definitions import (
    answer_nothing,
    expression_document,
    function_definition,
    rest_document,
)


def _expression(**fields: Any) -> ToolDefinition:
    return ToolDefinition.model_validate(expression_document(**fields))


def _index(*definitions: ToolDefinition, source: Source = Source.PROGRAM) -> ToolIndex:
    index = ToolIndex()
    for definition in definitions:
        index.register(definition, source)
    return index


def _version(tool: RegisteredTool) -> str:
    return tool.definition.version


@pytest.mark.row("T4")
@pytest.mark.parametrize(
    ("versions", "deprecated", "preferred"),
    [
        (["1.10.1-rc.1", "1.10.0", "1.9.0", "1.2.0"], [], "1.10.1-rc.1"),
        (["3.0.0", "2.0.0", "1.0.0"], ["3.0.0"], "2.0.0"),
        (["2.0.0", "1.0.0"], ["2.0.0", "1.0.0"], "2.0.0"),
    ],
)
def test_newest_version_is_preferred_unless_deprecated_and_each_can_be_pinned(
    versions: list[str], deprecated: list[str], preferred: str
) -> None:
    index = _index(*(_expression(version=v, deprecated=v in deprecated) for v in sorted(versions)))
    assert [_version(tool) for tool in index] == [preferred]
    assert [_version(tool) for tool in index.versions("sums")] == versions
    assert [_version(index.get(f"sums@{version}")) for version in versions] == versions
    assert _version(index.get("sums")) == preferred


@pytest.mark.row("T4")
@pytest.mark.parametrize("reference", ["sums@9.9.9", "sums@1", "sums@1.0.0@", "sums@ 1.0.0"])
def test_unknown_version_is_refused_with_those_that_exist(reference: str) -> None:
    index = _index(_expression(version="1.0.0"), _expression(version="1.1.0"))
    with pytest.raises(ToolNotFound, match=r"it has 1\.0\.0, 1\.1\.0"):
        index.get(reference)


@pytest.mark.parametrize("reference", ["", "@1.0.0", "SUMS", "sums ", "sum", "x" * 10_000])
def test_tool_names_match_exactly(reference: str) -> None:
    with pytest.raises(ToolNotFound) as caught:
        _index(_expression()).get(reference)
    assert len(caught.value.message) < 200


def test_duplicate_name_and_version_is_refused() -> None:
    index = _index(_expression())
    with pytest.raises(InvalidDefinition, match=r"sums@1\.0\.0 is already registered"):
        index.register(_expression(description="Other."), Source.PROGRAM)
    assert index.get("sums").definition.description == "Add numbers."


@pytest.mark.row("R1")
@pytest.mark.parametrize("source", [Source.PROGRAM, Source.ENTRY_POINT])
def test_builtin_name_cannot_be_taken_by_another_version(source: Source) -> None:
    index = _index(_expression(), source=Source.BUILTIN)
    with pytest.raises(InvalidDefinition, match="cannot be overridden"):
        index.register(_expression(version="9.0.0"), source)
    index.register(_expression(version="2.0.0"), Source.BUILTIN)  # the twin
    assert [_version(tool) for tool in index.versions("sums")] == ["2.0.0", "1.0.0"]


@pytest.mark.row("R4")
@pytest.mark.parametrize("source", [Source.PROGRAM, Source.ENTRY_POINT])
def test_only_the_engine_registers_builtin_tools(source: Source) -> None:
    with pytest.raises(InvalidDefinition, match="BUILTIN is for the tools that come with"):
        ToolIndex().register(_expression(type="BUILTIN"), source)
    tool = ToolIndex().register(_expression(type="BUILTIN"), Source.BUILTIN)
    assert tool.source is Source.BUILTIN


def test_python_function_requires_the_function_executor() -> None:
    with pytest.raises(InvalidDefinition, match="goes with a Python function"):
        ToolIndex().register(function_definition(), Source.PROGRAM)
    index = ToolIndex()
    with pytest.raises(InvalidDefinition, match="goes with a Python function"):
        index.register(_expression(), Source.PROGRAM, function=answer_nothing)
    assert (list(index), index.versions("sums")) == ([], [])
    tool = index.register(function_definition(), Source.PROGRAM, function=answer_nothing)
    assert tool.function is answer_nothing


def test_faults_of_definition_and_index_are_listed_together() -> None:
    index = _index(_expression(), source=Source.BUILTIN)
    wrong = _expression().model_copy(update={"version": "2.0.0", "streaming": True})
    with pytest.raises(InvalidDefinition) as caught:
        index.register(wrong, Source.PROGRAM)
    assert [fault.split(":", 1)[0] for fault in caught.value.faults] == ["streaming", "name"]


def _from_directory(*names: str, **fields: Any) -> list[RegisteredTool]:
    return [tool_of_document(rest_document(name=n, **fields), Source.DIRECTORY) for n in names]


@pytest.mark.row("R1", "R4")
def test_replacing_a_source_keeps_tools_of_other_sources() -> None:
    index = _index(_expression(), _expression(version="2.0.0"))
    index.replace_source(Source.DIRECTORY, _from_directory("a", "b"))
    assert [tool.definition.name for tool in index] == ["a", "b", "sums"]
    index.replace_source(Source.DIRECTORY, _from_directory("b", "c", version="3.0.0"))
    assert [tool.definition.name for tool in index] == ["b", "c", "sums"]
    assert [_version(tool) for tool in index.versions("b")] == ["3.0.0"]
    assert [_version(tool) for tool in index.versions("sums")] == ["2.0.0", "1.0.0"]
    index.replace_source(Source.DIRECTORY, [])
    assert [tool.definition.name for tool in index] == ["sums"]
    with pytest.raises(ToolNotFound):
        index.get("b")


# -- Pages of the list of tools ------------------------------------------------------------

CURSORS = Cursors(b"k" * 32)


def _tool(number: int, **fields: Any) -> RegisteredTool:
    return tool_of_document(rest_document(name=f"t{number:03}", **fields), Source.DIRECTORY)


def _index_listing(count: int) -> ToolIndex:
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
def test_pages_list_every_tool_once_in_order(limit: int) -> None:
    assert _all_names(_index_listing(26), limit) == [f"t{i:03}" for i in range(26)]


@pytest.mark.row("E5", "R1")
def test_filters_match_exactly_and_are_counted() -> None:
    index = _index_listing(12)
    index.register(_expression(), Source.PROGRAM)
    assert _all_names(index, 5, tag="odd") == [f"t{i:03}" for i in range(1, 12, 2)]
    assert _all_names(index, 5, category="c1", tag="even") == ["t004", "t010"]
    assert _all_names(index, 5, type=ToolType.NATIVE) == ["sums"]
    assert _all_names(index, 5, tag="od") == []
    assert _page(index, limit=1, tag="odd").total_count == 6
    assert _page(index).total_count == 13


@pytest.mark.row("E5")
def test_concurrent_changes_do_not_repeat_or_skip_tools_on_pages() -> None:
    index = _index_listing(20)
    first = _page(index)
    kept = [tool for tool in index if tool.definition.name not in ("t003", "t009", "t015")]
    late = _tool(0, version="2.0.0")
    index.replace_source(Source.DIRECTORY, [*kept, late])
    second = _page(index, first.next_cursor)
    names = [tool.definition.name for tool in second.tools]
    assert names == [f"t{i:03}" for i in range(10, 20) if i != 15]


@pytest.mark.row("E5")
@pytest.mark.parametrize("limit", [0, -1, 101])
def test_limit_out_of_range_is_refused(limit: int) -> None:
    with pytest.raises(InvalidParams, match="from 1 to 100"):
        _page(_index_listing(1), limit=limit)


@pytest.mark.row("E5")
def test_cursor_of_other_filters_is_refused() -> None:
    index = _index_listing(20)
    cursor = _page(index, tag="odd", limit=2).next_cursor
    assert _page(index, cursor, tag="odd").tools
    for filters in ({}, {"tag": "even"}, {"category": "odd"}, {"tag": "odd", "category": "c0"}):
        with pytest.raises(InvalidParams):
            _page(index, cursor, **filters)


# -- Filtering -----------------------------------------------------------------------------


def _tool_filtering(name: str, **fields: object) -> ToolDefinition:
    return function_definition(name=name, **fields)


TOOLS = (
    _tool_filtering("read_a", category="files", cost_per_use=Decimal("0.01")),
    _tool_filtering("read_b", category="web"),
    _tool_filtering("wipe", category="files", dangerous=True),
    _tool_filtering("off", category="files", is_active=False),
    _tool_filtering("plain"),
    _tool_filtering("dear", category="files", cost_per_use=Decimal(2)),
)


@pytest.mark.row("R2")
@pytest.mark.parametrize(
    ("wishes", "kept"),
    [
        ({}, ["read_a", "read_b", "plain", "dear"]),
        ({"categories": None}, ["read_a", "read_b", "plain", "dear"]),
        ({"exclude_dangerous": False}, ["read_a", "read_b", "wipe", "plain", "dear"]),
        ({"categories": {"web"}}, ["read_b"]),
        ({"categories": set()}, []),
        ({"max_cost": Decimal("0.01")}, ["read_a", "read_b", "plain"]),
        ({"max_cost": Decimal("0.009")}, ["read_b", "plain"]),
        ({"max_cost": Decimal(0)}, ["read_b", "plain"]),
        ({"at_most": 2}, ["read_a", "read_b"]),
        ({"at_most": 0}, []),
    ],
)
def test_tools_are_filtered_by_danger_category_cost_and_number(
    wishes: dict[str, Any], kept: list[str]
) -> None:
    assert [tool.name for tool in filter_tools(TOOLS, **wishes).tools] == kept


@pytest.mark.row("R2")
def test_every_excluded_tool_has_a_reason() -> None:
    selection = filter_tools(TOOLS, categories={"files"}, max_cost=Decimal(1), at_most=5)
    assert [tool.name for tool in selection.tools] == ["read_a"]
    assert {each.name: each.reason for each in selection.left_out} == {
        "read_b": "its category is web",
        "wipe": "it is dangerous",
        "off": "it is disabled",
        "plain": "its category is none",
        "dear": "it costs 2 a use",
    }
