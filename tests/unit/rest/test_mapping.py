"""The result of a REST tool in the JSON of its service, and the cursors of its pages."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import ExecutionError, InvalidParams, OutputLimitExceeded
from fumehood.core.json_types import JsonObject
from fumehood.core.tool import ToolDefinition
from fumehood.outgoing.secret_values import SecretValues
from fumehood.protocol.cursors import Cursors
from fumehood.redaction.redactor import Redactor
from fumehood.registry.definitions import parse_definition
from fumehood.rest.executor import MAX_OBJECTS, ListCursors, mapped
from support.definitions import rest_document

pytestmark = pytest.mark.row("T5", "E5")

KEY = b"k" * 32
MINE = ListCursors(Cursors(KEY), "uid:1")
SECRET = "canary-of-a-service"


def tool(**response: Any) -> ToolDefinition:
    parameters = {"properties": {"q": {"type": "string"}, "cursor": {"type": "string"}}}
    return parse_definition(rest_document(parameters=parameters, response=response))


def page(definition: ToolDefinition, document: Any, cursor: str | None = None) -> JsonObject:
    arguments = {"q": "x", "cursor": cursor} if cursor is not None else {"q": "x"}
    return mapped(definition, arguments, document, SecretValues([SECRET]), Redactor(), MINE)


def sent(definition: ToolDefinition, cursor: str | None) -> JsonObject:
    return MINE.with_position(definition, {"q": "x", "cursor": cursor})


BY_CURSOR = {"items": "/found", "cursor_parameter": "after", "next_cursor": "/next"}


def test_json_pointers_map_response_values_to_fields() -> None:
    document = {"a/b": {"~": [{"x": 1}, "no object", {}]}, "n": 3, "": {"y": SECRET}}
    assert page(tool(fields={"y": "//y", "first": "/a~1b/~0/0/x", "none": "/z"}), document) == {
        "y": "[redacted]", "first": 1, "none": None
    }  # fmt: skip
    assert page(tool(items="/a~1b/~0", fields={"x": "/x"}, total_count="/n"), document) == {
        "items": [{"x": 1}, {"x": None}, {"x": None}],
        "pagination": {"has_more": False, "next_cursor": None, "total_count": 3},
    }
    assert page(tool(items=""), [1, 2])["items"] == [1, 2]
    assert page(tool(items="/found"), {"found": None})["items"] == []


@pytest.mark.parametrize("document", [{}, [], None, "found", {"found": {}}, {"found": "x"}])
def test_response_without_the_expected_list_is_an_error(document: Any) -> None:
    with pytest.raises(ExecutionError, match="without a list at '/found'"):
        page(tool(items="/found"), document)


@pytest.mark.parametrize("total", [-1, True, "7", 1.5, None, {}])
def test_invalid_total_count_becomes_null(total: Any) -> None:
    found = page(tool(items="/found", total_count="/n"), {"found": [], "n": total})
    assert found["pagination"]["total_count"] is None


@pytest.mark.parametrize("position", ["abc", "a b&x=1", 7, "é" * 100])
def test_cursor_returns_the_upstream_position_in_its_parameter(position: Any) -> None:
    definition = tool(**BY_CURSOR)
    first = page(definition, {"found": [1], "next": position})["pagination"]
    assert first["has_more"] is True
    assert sent(definition, first["next_cursor"]) == {"q": "x", "after": position}
    assert sent(definition, None) == {"q": "x"}


@pytest.mark.parametrize("end", [{}, {"next": None}, {"next": ""}, {"next": False}])
def test_list_ends_if_the_upstream_names_no_next_page(end: JsonObject) -> None:
    pagination = page(tool(**BY_CURSOR), {"found": [1], **end})["pagination"]
    assert pagination == {"has_more": False, "next_cursor": None, "total_count": None}


def test_mapped_list_over_the_object_limit_is_refused() -> None:
    definition = tool(items="", fields={"title": "/title", "url": "/url"})
    with pytest.raises(OutputLimitExceeded):
        page(definition, [0] * (MAX_OBJECTS + 1))
    assert len(page(definition, [0] * MAX_OBJECTS)["items"]) == MAX_OBJECTS  # twin
    assert len(page(tool(items=""), [0] * (MAX_OBJECTS + 1))["items"]) > MAX_OBJECTS  # as they are


@pytest.mark.parametrize(
    ("position", "words"),
    [
        (True, "not understood"),
        (1.5, "not understood"),
        ([1], "not understood"),
        (f"a{SECRET}b", "with a secret"),
        ("ghp_" + "a" * 36, "with a secret"),
    ],
)
def test_invalid_upstream_position_is_an_error(position: Any, words: str) -> None:
    with pytest.raises(ExecutionError, match=words) as caught:
        page(tool(**BY_CURSOR), {"found": [1], "next": position})
    assert SECRET not in caught.value.message


def test_page_and_item_numbers_advance_until_an_empty_page() -> None:
    for counts, positions in (("pages", [None, 2, 3]), ("items", [None, 2, 4])):
        definition = tool(items="", cursor_parameter="at", counts=counts)
        cursor, seen = None, []
        for document in (["a", "b"], ["c", "d"], []):
            seen.append(sent(definition, cursor).get("at"))
            cursor = page(definition, document, cursor)["pagination"]["next_cursor"]
        assert (seen, cursor) == (positions, None)
    from_0 = tool(items="", cursor_parameter="at", counts="pages", first=0)
    assert sent(from_0, page(from_0, [1])["pagination"]["next_cursor"])["at"] == 1


BY_URL = {"items": "/found", "cursor_parameter": "page", "next_url": "/next"}


@pytest.mark.parametrize(
    "url",
    ["https://evil.example/steal?x=1&page=2", "http://127.0.0.1/?page=2", "?page=2", "/a?page=2"],
)
def test_only_the_cursor_parameter_of_a_next_url_is_used(url: str) -> None:
    definition = tool(**BY_URL)
    cursor = page(definition, {"found": [1], "next": url})["pagination"]["next_cursor"]
    assert sent(definition, cursor) == {"q": "x", "page": "2"}


@pytest.mark.parametrize("url", ["https://a.example/", "https://[", "page=2", "?page=", 3])
def test_next_url_without_the_cursor_parameter_is_an_error(url: Any) -> None:
    with pytest.raises(ExecutionError, match="not understood"):
        page(tool(**BY_URL), {"found": [1], "next": url})


def test_cursor_is_valid_only_for_its_tool_arguments_and_owner() -> None:
    definition = tool(**BY_CURSOR)
    cursor = page(definition, {"found": [1], "next": "2"})["pagination"]["next_cursor"]
    elsewhere = definition.model_copy(update={"endpoint": "https://other.example/"})
    another = definition.model_copy(update={"name": "another"})
    yours = ListCursors(Cursors(KEY), "uid:2")
    later = ListCursors(Cursors(b"j" * 32), "uid:1")
    arguments = {"q": "x", "cursor": cursor}
    for whose, of, given_ in (
        (MINE, elsewhere, arguments),
        (MINE, another, arguments),
        (MINE, definition, {**arguments, "q": "y"}),
        (yours, definition, arguments),
        (later, definition, arguments),
        (MINE, definition, {**arguments, "cursor": cursor[:-1]}),
        (MINE, definition, {**arguments, "cursor": ""}),
    ):
        with pytest.raises(InvalidParams):
            whose.with_position(of, given_)
    assert MINE.with_position(definition, arguments) == {"q": "x", "after": "2"}  # twin
