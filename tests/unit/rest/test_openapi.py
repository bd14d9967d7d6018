"""OpenAPI documents become definitions, or the reason says why not; the document is hostile."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.registry.definitions import parse_definition
from fumehood.rest.openapi import (
    MAX_DOCUMENT_BYTES,
    CannotImport,
    Imported,
    ImportOptions,
    import_openapi,
    read_document,
)

pytestmark = pytest.mark.row("R4", "T5")

TEXT = {"type": "string"}


def document(paths: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "openapi": "3.0.3",
        "info": {"title": "Shop", "version": "2.1.0"},
        "servers": [{"url": "https://shop.example/v1"}],
        "paths": paths,
        **fields,
    }


def made(paths: dict[str, Any], *, options: ImportOptions | None = None, **fields: Any) -> Imported:
    found = import_openapi(document(paths, **fields), options or ImportOptions())
    for tool in found.tools:
        parse_definition(tool)  # the engine accepts what is made
    return found


def tool_of(operation: dict[str, Any], path: str = "/x", method: str = "get", **fields: Any) -> Any:
    found = made({path: {method: operation}}, **fields)
    assert found.left_out == []
    (tool,) = found.tools
    return tool


def reason_of(
    operation: dict[str, Any], path: str = "/x", method: str = "get", **fields: Any
) -> str:
    """Why an operation is left out; its twin beside it becomes a tool."""
    found = made({path: {method: operation}, "/twin": {"get": {"operationId": "twin"}}}, **fields)
    assert [tool["name"] for tool in found.tools] == ["twin"]
    ((label, reason),) = found.left_out
    assert label == f"{method.upper()} {path}"
    return reason


def parameter(name: str, place: str = "query", **fields: Any) -> dict[str, Any]:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": TEXT, **required, **fields}


def body(schema: Any, kind: str = "application/json", **fields: Any) -> dict[str, Any]:
    return {"requestBody": {"content": {kind: {"schema": schema}}, **fields}}


def properties_of(schema: Any, **fields: Any) -> Any:
    """What a body's schema becomes."""
    tool = tool_of(body({"type": "object", "properties": {"x": schema}}), method="post", **fields)
    return tool["parameters"]["properties"]["x"]


# -- a whole operation ---------------------------------------------------------------------


@pytest.mark.row("T1", "T2")
def test_operation_becomes_a_complete_definition() -> None:
    operation = {
        "operationId": "listOrders",
        "summary": "List orders.",
        "description": "The newest first.",
        "tags": ["orders"],
        "deprecated": True,
        "externalDocs": {"url": "https://shop.example/docs"},
        "parameters": [
            parameter("status", description="Open or done.", schema={"enum": ["open", "done"]}),
            parameter("limit", required=True, schema={"type": "integer", "default": 10}),
        ],
    }
    assert tool_of(operation, "/orders") == {
        "name": "listOrders",
        "version": "2.1.0",
        "type": "REST",
        "description": "List orders.\n\nThe newest first.",
        "tags": ["orders"],
        "documentation_url": "https://shop.example/docs",
        "deprecated": True,
        "method": "GET",
        "endpoint": "https://shop.example/v1/orders",
        "read_only": True,
        "idempotent": True,
        "dangerous": False,
        "retry_count": 2,
        "parameters": {
            "type": "object",
            "properties": {
                "status": {"enum": ["open", "done"], "description": "Open or done."},
                "limit": {"type": "integer", "default": 10},
            },
            "required": ["limit"],
            "additionalProperties": False,
        },
    }


@pytest.mark.row("T2", "A1")
@pytest.mark.parametrize(
    ("method", "read_only", "idempotent", "dangerous"),
    [
        ("get", True, True, False),
        ("head", True, True, False),
        ("put", False, True, True),
        ("post", False, False, True),
        ("patch", False, False, True),
        ("delete", False, False, True),
    ],
)
def test_http_method_decides_approval_and_idempotency(
    method: str, read_only: bool, idempotent: bool, dangerous: bool
) -> None:
    tool = parse_definition(tool_of({"operationId": "act"}, method=method))
    assert (tool.read_only, tool.idempotent, tool.dangerous) == (read_only, idempotent, dangerous)
    assert tool.retry_count == (2 if idempotent else 0)
    freed = made({"/x": {method: {}}}, options=ImportOptions(no_approval=("*",))).tools[0]
    assert freed["dangerous"] is False
    assert (freed["read_only"], freed["idempotent"]) == (read_only, idempotent)


def test_approval_is_waived_only_for_named_tools() -> None:
    paths = {"/a": {"post": {"operationId": "a"}, "delete": {"operationId": "b", "tags": ["a"]}}}
    found = made(paths, options=ImportOptions(no_approval=("a",)))
    assert {tool["name"]: tool["dangerous"] for tool in found.tools} == {"a": False, "b": True}


@pytest.mark.parametrize("version", ["1.0.0\n", "v1", 1.0, None, "2.1"])
def test_non_semantic_version_falls_back_to_the_default(version: Any) -> None:
    tool = tool_of({}, info={"version": version})
    assert parse_definition(tool).version == "1.0.0"


# -- names ---------------------------------------------------------------------------------


def test_imported_names_are_valid_unique_and_stable() -> None:
    ids = ["a b", "a/b", "a-b", "9lives", "", "!", "x" * 80, "x" * 81, None]
    paths = {f"/p{number}/{{id}}": {"get": {"operationId": own}} for number, own in enumerate(ids)}
    for path in paths.values():
        path["parameters"] = [parameter("id", "path")]
    names = [tool["name"] for tool in made(paths).tools]
    assert names == [
        "a_b", "a_b_2", "a-b", "_9lives", "get_p4_id", "operation", "x" * 64, "x" * 62 + "_2",
        "get_p8_id",
    ]  # fmt: skip
    assert [tool["name"] for tool in made(paths).tools] == names
    some = made(paths, options=ImportOptions(only=("a_b_2",)))
    assert [tool["endpoint"][-7:] for tool in some.tools] == ["p1/{id}"]


def test_names_of_other_scripts_stay_apart_in_any_order() -> None:
    ids = ["查询", "删除", "löschen", "loschen", "Прочитать заказ"]
    paths = {f"/p{number}": {"get": {"operationId": own}} for number, own in enumerate(ids)}
    names = [tool["name"] for tool in made(paths).tools]
    assert names == [
        "operation_bcd6771e", "operation_2f9daa82", "l_schen_2f6be48d", "loschen",
        "operation_d00c2831",
    ]  # fmt: skip
    backwards = made(dict(reversed(paths.items())))
    assert [tool["name"] for tool in backwards.tools] == names[::-1]
    path = {"parameters": [parameter("城市", "path"), parameter("国家", "path")]}
    assert list(tool_of(path, "/{城市}/{国家}")["parameters"]["properties"]) == [
        "parameter_ed84a166", "parameter_0cc659a9",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (("listOrders",), ["shop_listOrders"]),
        (("shop_listOrders",), ["shop_listOrders"]),
        (("stock",), ["shop_readStock"]),
        (("*Orders", "stock"), ["shop_listOrders", "shop_readStock"]),
        ((), ["shop_listOrders", "shop_dropOrder", "shop_readStock"]),
    ],
)
def test_only_option_selects_by_tool_operation_and_tag(
    only: tuple[str, ...], names: list[str]
) -> None:
    paths = {
        "/o": {"get": {"operationId": "listOrders"}, "delete": {"operationId": "dropOrder"}},
        "/s": {"get": {"operationId": "readStock", "tags": ["stock"]}},
    }
    found = made(paths, options=ImportOptions(only=only, prefix="shop_"))
    assert [tool["name"] for tool in found.tools] == names


# -- where it goes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "server", "source", "endpoint"),
    [
        ([{"url": "https://a.example/v1/"}], None, None, "https://a.example/v1/x"),
        ([{"url": "https://a.example/v1"}], "http://b.example/v2", None, "http://b.example/v2/x"),
        ([{"url": "/v1"}], None, "https://c.example/docs/api.json?k=1", "https://c.example/v1/x"),
        ([{"url": "/v1"}], "https://b.example", None, "https://b.example/v1/x"),
        ([{"url": "/"}], "https://b.example/v2", None, "https://b.example/v2/x"),
        ([], "https://b.example/v2", "https://c.example/a.json", "https://b.example/v2/x"),
        ([], None, "https://c.example/docs/api.json", "https://c.example/x"),
        ([{"url": "//d.example/v1"}], "https://b.example", None, "https://b.example/x"),
        ([{"url": "https://{r}.example", "variables": {"r": {"default": "eu"}}}], None, None,
         "https://eu.example/x"),
    ],
)  # fmt: skip
def test_server_decides_the_endpoint(
    servers: list[Any], server: str | None, source: str | None, endpoint: str
) -> None:
    options = ImportOptions(server=server, source=source)
    assert made({"/x": {"get": {}}}, servers=servers, options=options).tools[0]["endpoint"] == (
        endpoint
    )


def test_nearest_server_wins() -> None:
    here, there = [{"url": "https://here.example"}], [{"url": "https://there.example"}]
    assert tool_of({"servers": here})["endpoint"] == "https://here.example/x"
    found = made({"/x": {"servers": there, "get": {}, "put": {"servers": here}}}).tools
    assert [tool["endpoint"] for tool in found] == [
        "https://there.example/x", "https://here.example/x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *((ImportOptions(prefix=prefix), "--prefix") for prefix in ("9", "a b", "ä", "${")),
        *(
            (ImportOptions(server=server), "--server takes")
            for server in ("shop.example", "file:///x", "https://a b")
        ),
        (ImportOptions(no_approval=("c",)), "--no-approval 'c' fits nothing"),
        (ImportOptions(only=("stok",)), r"fits nothing in the document\. Did you mean 'stock'"),
    ],
)
def test_unusable_import_option_is_refused(options: ImportOptions, words: str) -> None:
    with pytest.raises(CannotImport, match=words):
        made({"/s": {"get": {"tags": ["stock"]}}}, options=options)


# -- credentials ---------------------------------------------------------------------------


SCHEMES = {
    "Key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "QueryKey": {"type": "apiKey", "in": "query", "name": "api key"},
    "CookieKey": {"type": "apiKey", "in": "cookie", "name": "sid"},
    "Bearer": {"type": "http", "scheme": "Bearer"},
    "Basic": {"type": "http", "scheme": "basic"},
    "Digest": {"type": "http", "scheme": "digest"},
    "OAuth": {"type": "oauth2", "flows": {}},
    "Linked": {"$ref": "#/components/securitySchemes/Key"},
    "a b": {"type": "http", "scheme": "bearer"},
    "a_b": {"type": "http", "scheme": "bearer"},
}
CIRCLE = {"a": {"$ref": "#/components/parameters/a"}}
WITH_SCHEMES = {"components": {"securitySchemes": SCHEMES, "parameters": CIRCLE}}


@pytest.mark.parametrize(
    ("security", "headers", "query"),
    [
        ([{"Key": []}], {"X-Api-Key": "${secret:Key}"}, ""),
        ([{"QueryKey": []}], None, "?api%20key=${secret:QueryKey}"),
        ([{"Bearer": []}], {"authorization": "Bearer ${secret:Bearer}"}, ""),
        ([{"Basic": []}], {"authorization": "Basic ${secret:Basic}"}, ""),
        ([{"OAuth": ["read"]}], {"authorization": "Bearer ${secret:OAuth}"}, ""),
        ([{"Linked": []}], {"X-Api-Key": "${secret:Linked}"}, ""),
        ([{"Key": [], "Bearer": []}],
         {"X-Api-Key": "${secret:Key}", "authorization": "Bearer ${secret:Bearer}"}, ""),
        ([{"CookieKey": []}, {"Key": []}], {"X-Api-Key": "${secret:Key}"}, ""),
        ([{}], None, ""),
        ([], None, ""),
    ],
)  # fmt: skip
def test_credentials_become_references_to_secrets(
    security: list[Any], headers: Any, query: str
) -> None:
    found = made({"/x": {"get": {"operationId": "x", "security": security}}}, **WITH_SCHEMES)
    (tool,) = found.tools
    assert tool.get("headers") == headers
    assert tool["endpoint"] == f"https://shop.example/v1/x{query}"
    assert all(need.tools == ["x"] for need in found.secrets.values())
    assert all(need.hosts == ["shop.example"] for need in found.secrets.values())
    named = {name for name in SCHEMES if f"${{secret:{name}}}" in json.dumps(tool)}
    assert set(found.secrets) == named


def test_two_credentials_never_share_a_secret() -> None:
    paths = {"/1": {"get": {"security": [{"a b": []}]}}, "/2": {"get": {"security": [{"a_b": []}]}}}
    found = made(paths, **WITH_SCHEMES, options=ImportOptions(prefix="shop_"))
    assert [tool["headers"]["authorization"] for tool in found.tools] == [
        "Bearer ${secret:shop_a_b}", "Bearer ${secret:shop_a_b_2}",
    ]  # fmt: skip


# -- arguments -----------------------------------------------------------------------------


def test_path_argument_that_clashes_with_the_body_is_renamed() -> None:
    operation = {
        **body({"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}),
        "parameters": [parameter("id", "path"), parameter("sub id", "path")],
    }
    tool = tool_of(operation, "/x/{id}/{sub id}", "put")
    assert tool["endpoint"].endswith("/x/{path_id}/{sub_id}")
    assert tool["parameters"]["properties"] == {
        "path_id": TEXT, "sub_id": TEXT, "id": {"type": "integer"},
    }  # fmt: skip
    assert tool["parameters"]["required"] == ["path_id", "sub_id", "id"]


def test_header_and_query_arguments_are_mapped_beside_a_body() -> None:
    operation = {
        **body({"properties": {"id": TEXT, "X-Trace": TEXT}}),
        "parameters": [
            parameter("X-Trace", "header", required=True, description="D."),
            parameter("dry[run]", required=True, schema={"type": "boolean"}),
            parameter("id"),
            parameter("id", "path"),
        ],
    }
    tool = tool_of(operation, "/{id}", "post")
    assert tool["endpoint"].endswith("/{path_id}?dry%5Brun%5D={dry_run}&id={query_id}")
    assert tool["headers"] == {"X-Trace": "{header_X-Trace}"}
    assert tool["parameters"] == {
        "type": "object",
        "properties": {
            "path_id": TEXT, "header_X-Trace": {**TEXT, "description": "D."},
            "dry_run": {"type": "boolean"}, "query_id": TEXT, "id": TEXT, "X-Trace": TEXT,
        },
        "required": ["path_id", "header_X-Trace", "dry_run"],
        "additionalProperties": False,
    }  # fmt: skip
    plain = tool_of({"parameters": [parameter("X-Trace", "header"), parameter("id")]})
    assert plain["endpoint"].endswith("/x")
    assert plain["headers"] == {"X-Trace": "{X-Trace}"}
    assert list(plain["parameters"]["properties"]) == ["X-Trace", "id"]


def test_credential_parameter_is_not_an_argument() -> None:
    given = [parameter("x-api-key", "header", required=True), parameter("api key", required=True)]
    tool = tool_of({"security": [{"Key": [], "QueryKey": []}], "parameters": given}, **WITH_SCHEMES)
    assert tool["parameters"]["properties"] == {}
    assert tool["headers"] == {"X-Api-Key": "${secret:Key}"}
    assert tool["endpoint"].endswith("/x?api%20key=${secret:QueryKey}")
    open_tool = made({"/x": {"get": {"parameters": [parameter("x-api-key", "header")]}}})
    assert "looks like a credential" in open_tool.notes[0][1]


def test_operation_parameters_override_path_parameters() -> None:
    common = [parameter("a", description="Old."), parameter("b", required=True)]
    found = made(
        {
            "/x": {
                "parameters": common,
                "get": {"parameters": [parameter("a", required=True), parameter("b")]},
            }
        }
    )
    schema = found.tools[0]["parameters"]
    assert (schema["properties"], schema["required"]) == ({"a": TEXT, "b": TEXT}, ["a"])


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("get", parameter("c", "cookie"), "not sent in a cookie"),
        ("get", parameter("q", style="deepObject"), "form in the query is not supported"),
        ("get", parameter("q", explode=False, schema={"type": "array"}), "form in the query"),
        ("get", parameter("q", explode=False, schema={}), "form in the query is not supported"),
        ("get", parameter("q", explode=False, schema={"type": ["string", "array"]}), "form in the"),
        ("get", parameter("q", explode=False, schema={"enum": [1, []]}), "form in the query"),
        ("get", {"name": "q", "in": "query", "content": {}}, "form in the query is not supported"),
        ("get", parameter("q", schema={"type": "object"}), "an object cannot stand in a query"),
        ("post", parameter("q", schema={"type": "object"}), "an object cannot stand in a query"),
        ("get", parameter("h", "header", schema={"type": "array"}), "cannot stand in a header"),
        ("get", parameter("X-Token", "header"), "looks like a credential"),
        ("get", parameter("Host", "header"), "belongs to the connection"),
        ("get", parameter("a b", "header"), "is not a header's name"),
    ],
)
def test_optional_unsupported_parameter_is_left_out(
    method: str, given: dict[str, Any], words: str
) -> None:
    found = made({"/x": {method: {"parameters": [given]}}})
    assert found.tools[0]["parameters"]["properties"] == {}
    ((_, note),) = found.notes
    assert words in note
    required = {"parameters": [{**given, "required": True}]}
    assert words in reason_of(required, method=method)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"}, {"enum": ["a", 1]}, {"type": ["string", "null"]},
        {"anyOf": [{"type": "integer"}, {"const": "all"}]},
    ],
)  # fmt: skip
def test_scalar_is_sent_plainly_whatever_explode_says(schema: Any) -> None:
    given = [parameter("q", explode=False, schema=schema), parameter("p", explode=False)]
    tool = tool_of({"parameters": given}, openapi="3.1.0")
    assert tool["parameters"]["properties"] == {"q": schema, "p": TEXT}


@pytest.mark.parametrize("name", ["Accept", "content-type", "Authorization"])
def test_transport_headers_are_ignored(name: str) -> None:
    assert made({"/x": {"get": {"parameters": [parameter(name, "header")]}}}).notes == []


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXT, TEXT),
        ({}, TEXT),
        ({"type": ["null", "integer"]}, {"type": "integer"}),
        ({"enum": ["a"]}, {"enum": ["a"], "type": "string"}),
    ],
)
def test_path_argument_must_be_a_text_or_number(schema: Any, expected: Any) -> None:
    operation = {"parameters": [parameter("id", "path", schema=schema)]}
    assert tool_of(operation, "/{id}")["parameters"]["properties"] == {"id": expected}


def test_properties_of_a_json_body_become_arguments() -> None:
    schema = {"required": ["a"], "properties": {"a": TEXT, "b": TEXT}, "title": "T"}
    tool = tool_of(body(schema, "application/json; charset=utf-8"), method="post")
    assert tool["parameters"] == {
        "type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"],
        "additionalProperties": False,
    }  # fmt: skip
    assert "headers" not in tool
    patch = tool_of(body(schema, "application/merge-patch+json"), method="patch")
    assert patch["headers"] == {"content-type": "application/merge-patch+json"}
    free = tool_of(body({"type": "object"}), method="post")
    assert free["parameters"]["additionalProperties"] is True
    said = tool_of(body({**schema, "additionalProperties": TEXT}), method="post")
    assert said["parameters"]["additionalProperties"] == TEXT


def test_optional_body_of_a_delete_is_left_out() -> None:
    found = made({"/x": {"delete": body({"type": "object"})}})
    assert found.notes == [("DELETE /x", "without its optional body")]
    assert "with a body" in reason_of(body({}, required=True), method="delete")


@pytest.mark.parametrize("name", ["", "a\x1b[2J", "a\u202eb"])
def test_operation_with_an_unprintable_parameter_name_is_left_out(name: str) -> None:
    assert "name is empty, or cannot be printed" in reason_of({"parameters": [parameter(name)]})


# -- schemas -------------------------------------------------------------------------------


MAYBE = {"anyOf": [TEXT, {"type": "null"}], "const": 1}
BASE = {"type": "object", "required": ["a"], "properties": {"a": TEXT}}
MORE = {"type": "object", "required": ["b"], "properties": {"b": TEXT}, "description": "D."}
CLOSED = {**MORE, "additionalProperties": False}
OTHER = {"type": "object", "properties": {"a": {"type": "integer"}}}
MERGED = {
    "type": "object", "required": ["a", "b"], "properties": {"a": TEXT, "b": TEXT}, "description": "D.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "schema", "expected"),
    [
        *(
            ("3.0.3", schema, expected)
            for schema, expected in (
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": True, "enum": ["a"]},
         {"type": ["string", "null"], "enum": ["a", None]}),
        ({"allOf": [TEXT, {"enum": ["a"]}], "nullable": True, "description": "D."},
         {"type": ["string", "null"], "enum": ["a", None], "description": "D."}),
        ({"oneOf": [TEXT], "nullable": True}, {"anyOf": [{"oneOf": [TEXT]}, {"type": "null"}]}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True},
         {"type": "integer", "exclusiveMinimum": 0}),
        ({"type": "integer", "maximum": 9, "exclusiveMaximum": False},
         {"type": "integer", "maximum": 9}),
        ({"type": "string", "default": None}, TEXT),
        ({"type": "string", "example": "a", "title": "T", "xml": {}, "x-own": 1}, TEXT),
        ({"$ref": "#/components/schemas/Text", "description": "ignored"}, {**TEXT, "description": "Old."}),
        ({"type": "object", "required": ["a", "b"],
          "properties": {"a": TEXT, "b": {"type": "string", "readOnly": True}}},
         {"type": "object", "required": ["a"], "properties": {"a": TEXT}}),
            )
        ),
        # A schema of 3.1 is JSON Schema already, and keeps what is beside a reference.
        ("3.1.0", {"$ref": "#/components/schemas/Text", "description": "D."}, {**TEXT, "description": "D."}),
        ("3.1.0", MAYBE, MAYBE),
        ("3.0.3", {"allOf": [BASE, MORE]}, MERGED),
        ("3.0.3", {"allOf": [BASE, OTHER]}, {"allOf": [BASE, OTHER]}),
        ("3.0.3", {"allOf": [BASE, CLOSED]}, {"allOf": [BASE, CLOSED]}),
    ],
)  # fmt: skip
def test_openapi_schema_becomes_json_schema(version: str, schema: Any, expected: Any) -> None:
    components = {"schemas": {"Text": {**TEXT, "description": "Old."}}}
    assert properties_of(schema, openapi=version, components=components) == expected


def test_recursive_schema_is_cut_with_a_note() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Node"}}}
    components = {"schemas": {"Node": node}}
    found = made(
        {"/x": {"post": body({"$ref": "#/components/schemas/Node"})}}, components=components
    )
    assert found.tools[0]["parameters"]["properties"] == {"next": {"type": "object"}}
    ((_, note),) = found.notes
    assert "'#/components/schemas/Node' contains itself" in note


@pytest.mark.parametrize(
    ("unsupported", "note"),
    [
        ({"pattern": "^(?=b)"}, "without the pattern '^(?=b)': it is not supported"),
        ({"if": {"minLength": 1}}, "without the keyword 'if': it is not supported"),
    ],
)
def test_unsupported_part_of_a_schema_is_left_out_with_a_note(
    unsupported: dict[str, Any], note: str
) -> None:
    supported = {"type": "string", "pattern": "^b$"}
    schema = {"properties": {"a": {"type": "string", "x-own": 1, **unsupported}, "b": supported}}
    found = made({"/x": {"post": body(schema)}})
    assert found.tools[0]["parameters"]["properties"] == {"a": TEXT, "b": supported}
    assert found.notes == [("POST /x", note)]


def test_schema_of_references_in_a_circle_is_cut_with_a_note() -> None:
    loop = {"$ref": "#/components/schemas/Loop"}
    found = made({"/x": {"post": body(loop)}}, components={"schemas": {"Loop": loop}})
    assert "contains itself" in found.notes[0][1]


def servers(url: str, **variables: Any) -> dict[str, Any]:
    named = {name: {"default": value} for name, value in variables.items()}
    return {"servers": [{"url": url, "variables": named}]}


PATHS = ["x", ".evil.example/x", "@evil.example/x", ":8080/x", "/x?a=b", "/x#a", "/a b"]
LEFT_OUT: list[tuple[Any, str]] = [
    (servers("/v1"), "name it with --server"),
    (servers(""), "name it with --server"),
    (servers("https://"), "name it with --server"),
    (servers("https://[x"), "name it with --server"),
    (servers("file:///etc/passwd"), "name it with --server"),
    (servers("ftp://a.example"), "must be an absolute URL"),
    (servers("https://{region}.example"), "variable 'region' has no default"),
    (servers("https://user:word@a.example"), "user name or password"),
    (servers("https://a.example/?key=1"), "has a query"),
    (servers("https://a.example/#top"), "has a query"),
    (servers("https://a .example"), "holds what a URL cannot"),
    # A document cannot name a secret.
    (servers("https://evil.example/${secret:key}"), ""),
    (servers("https://evil.example/{v}", v="${secret:key}"), ""),
    (servers("https://{v}.evil.example", v="${secret:key}"), ""),
    (body({}, "application/${secret:key}+json"), ""),
    ({"security": [{"CookieKey": []}]}, "'CookieKey' is of a kind that is not supported"),
    ({"security": [{"Digest": []}]}, "'Digest' is of a kind that is not supported"),
    ({"security": [{"Nothing": []}]}, "'Nothing' is not defined"),
    ({"security": [7]}, "not an object"),
    (body({}, "multipart/form-data"), "'multipart/form-data'; only JSON is supported"),
    (body({}, "application/x-www-form-urlencoded"), "only JSON is supported"),
    (body({}, "text/json+x"), "only JSON is supported"),
    (body({}, "*/*"), "only JSON is supported"),
    ({"requestBody": {}}, "only JSON is supported"),
    ({"requestBody": 7}, "the body is not an object"),
    (body({"type": "array", "items": TEXT}), "not a plain JSON object"),
    (body({"oneOf": [{"type": "object"}]}), "not a plain JSON object"),
    (body({"type": "string"}), "not a plain JSON object"),
    (body({"allOf": [BASE, OTHER]}), "not a plain JSON object"),
    (body({"properties": {"a": json.loads('{"items":' * 40 + "{}" + "}" * 40)}}), "nested deeper"),
    ({"parameters": [{"$ref": "#/components/parameters/a"}]}, "in a circle"),
    (body({"$ref": "other.yaml#/Order"}), "refers to another document"),
    (body({"$ref": "https://evil.example/x.json"}), "refers to another document"),
    (body({"$ref": "file:///etc/passwd"}), "refers to another document"),
    (body({"$ref": "#Order"}), "refers to another document"),
    (body({f"x-{number}": 1 for number in range(10_000)}), "more than 10000 parts"),
    (body({"$ref": "#/components/schemas/Nothing"}), "refers to nothing"),
    (body({"type": "object", "properties": []}), "'properties' is of a wrong type"),
    (body({"properties": {"a": {"anyOf": {}}}}), "'anyOf' is of a wrong type"),
    (body({"properties": {"a": {"type": "file"}}}), "not a valid JSON Schema"),
    (body([]), "a schema is not an object"),
    (body({"properties": {"a": {"enum": ["x" * 200_000]}}}), "larger than 128 KB"),
]


@pytest.mark.parametrize(
    ("operation", "path", "words"),
    [
        *((operation, "/x", words) for operation, words in LEFT_OUT),
        *(({}, path, "") for path in PATHS),  # they would change the host or the query
        ({}, "/{id}", "no parameter declares"),
        *(
            ({"parameters": [parameter("id", "path", **fields)]}, "/{id}", words)
            for fields, words in (
                ({"schema": {"type": "array", "items": TEXT}}, "an array cannot stand in a path"),
                ({"schema": {"type": "object"}}, "an object cannot stand in a path"),
                ({"schema": {"anyOf": [TEXT]}}, "not one text or number"),
                ({"schema": {"type": "file"}}, "not a valid JSON Schema"),
                ({"style": "matrix"}, "its form in the path is not supported"),
            )
        ),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_operation_that_cannot_be_a_tool_is_left_out_with_its_reason(
    operation: Any, path: str, words: str
) -> None:
    assert words in reason_of(operation, path, "post", **WITH_SCHEMES)


def test_exponentially_expanding_references_are_bounded() -> None:
    schemas: dict[str, Any] = {"s0": TEXT}
    for number in range(1, 13):
        part = {"$ref": f"#/components/schemas/s{number - 1}"}
        schemas[f"s{number}"] = {"type": "object", "properties": {"a": part, "b": part}}
    big = body({"$ref": "#/components/schemas/s12"})
    small = body({"$ref": "#/components/schemas/s3"})
    components = {"schemas": schemas}
    assert "more than 10000 parts" in reason_of(big, method="post", components=components)
    assert tool_of(small, method="post", components=components)


# -- the document --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"swagger": "2.0"}, "Swagger 2.0, which is not supported"),
        ({"openapi": "4.0.0"}, "OpenAPI 3.0 or 3.1"),
        ({"openapi": "3.2.0"}, "OpenAPI 3.0 or 3.1"),
        ({}, "OpenAPI 3.0 or 3.1"),
        ([], "not an object"),
        ("openapi: 3.0.0", "not an object"),
    ],
)
def test_documents_that_are_not_openapi_are_refused(given: Any, words: str) -> None:
    with pytest.raises(CannotImport, match=words):
        import_openapi(given, ImportOptions())


@pytest.mark.parametrize("version", ["3.0.0", "3.0.4", "3.1", "3.1.1", 3.1])
def test_openapi_3_0_and_3_1_are_read(version: Any) -> None:
    assert made({"/x": {"get": {}}}, openapi=version).tools


def test_document_format_follows_its_suffix_or_first_character() -> None:
    text = json.dumps(document({"/x": {"get": {"responses": {"200": {}}}}})).encode()
    yaml = b"openapi: 3.0.3\npaths: {/x: {get: {responses: {200: {}}}}}\n"
    for name, data in (("a.json", text), ("a.yaml", text), ("-", text), ("a", b"\n " + text)):
        assert read_document(name, data)["openapi"] == "3.0.3"
    for name in ("a.yaml", "a.yml", "-"):
        assert read_document(name, yaml)["paths"]["/x"]["get"] == {"responses": {"200": {}}}


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"openapi: 3.0.3", "not JSON"),
        ("a.json", b'{"a": 1, "a": 2}', "given twice"),
        ("a.json", b"{" + b'"a":{' * 70 + b"}" * 71, "nested deeper"),
        ("a.yaml", b"a: &x 1\nb: *x\n", "anchors and aliases"),
        ("a.yaml", b"a: !!python/object/apply:os.system [id]\n", "tags are not accepted"),
        ("a.yaml", b"200: 1\n200: 2\n", "given twice"),
        ("a.yaml", b"200: 1\n'200': 2\n", "given twice"),
        ("a.yaml", b"true: 1\n", "key is not a string"),
        ("a.json", b" " * (MAX_DOCUMENT_BYTES + 1), "larger than 16 MB"),
    ],
)
def test_ambiguous_document_is_refused(name: str, data: bytes, words: str) -> None:
    with pytest.raises(CannotImport, match=words):
        read_document(name, data)


def test_imported_texts_lose_invisible_characters_and_are_cut() -> None:
    hidden = "Read.\x1b[2J\u202e\u200b\U000e0041\r\n\tTwo.\x00"
    tool = tool_of({"summary": hidden, "description": "x" * 5000, "tags": [hidden]})
    assert tool["description"].startswith("Read.[2J\n  Two.\n\nxxx")
    assert len(tool["description"]) == 2000
    assert tool["tags"] == ["Read.[2J\n  Two."]
    given = parameter("a", description=hidden + "y" * 5000)
    (described,) = tool_of({"parameters": [given]})["parameters"]["properties"].values()
    assert described["description"].startswith("Read.[2J\n  Two.yyy")
    assert len(described["description"]) == 2000
    assert tool_of({"description": "\x00"}, "/x")["description"] == "GET /x"


def test_unsupported_methods_are_noted() -> None:
    found = made({"/x": {"options": {}, "trace": {}, "get": {}}, "/y": {"$ref": "a.yaml"}})
    assert [tool["name"] for tool in found.tools] == ["get_x"]
    assert [label for label, _ in found.left_out] == ["OPTIONS /x", "TRACE /x", "/y"]


WHOLE = document(
    {
        "/orders/{id}": {
            "parameters": [parameter("id", "path"), {"$ref": "#/components/parameters/P"}],
            "servers": [{"url": "/v1", "variables": {"a": {"default": "b"}}}],
            "get": {
                "operationId": "read", "tags": ["a"], "security": [{"Key": []}, {}],
                "externalDocs": {"url": "https://a.example"},
            },
            "put": body({"allOf": [{"$ref": "#/components/schemas/S"}, {"required": ["a"]}]}),
        },
    },
    components={
        "parameters": {"P": parameter("p", schema={"type": "integer", "minimum": 1})},
        "schemas": {"S": {"properties": {"a": {"nullable": True, **TEXT}, "b": {"items": TEXT}}}},
        "securitySchemes": SCHEMES,
    },
    security=[{"Bearer": []}],
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6)
    | st.sampled_from(["#/components/schemas/S", "${secret:Key}", "{id}", "object", "get", "path"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["$ref", "type", "properties", "required", "allOf", "url", "in", "name"]),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
PARTS: list[tuple[Any, ...]] = []


def _collect(node: Any, path: tuple[Any, ...]) -> None:
    PARTS.append(path)
    for key, child in node.items() if isinstance(node, dict) else ():
        _collect(child, (*path, key))
    for key, child in enumerate(node) if isinstance(node, list) else ():
        _collect(child, (*path, key))


_collect(WHOLE, ())


@given(st.lists(st.tuples(st.sampled_from(PARTS), ANYTHING), min_size=1, max_size=3))
def test_mutated_document_yields_only_valid_definitions_or_notes(
    changes: list[tuple[tuple[Any, ...], Any]],
) -> None:
    """Any part may be anything: what is made is sound, and nothing else is raised."""
    changed: Any = {"document": copy.deepcopy(WHOLE)}
    for path, value in changes:
        *above, last = ("document", *path)
        owner = changed
        try:
            for step in above:
                owner = owner[step]
            owner[last] = value
        except (TypeError, KeyError, IndexError):
            continue  # an earlier change took that part away
    try:
        found = import_openapi(
            changed["document"], ImportOptions(source="https://shop.example/openapi.json")
        )
    except CannotImport:
        return
    for tool in found.tools:
        definition = parse_definition(tool)
        assert definition.dangerous is (definition.method not in ("GET", "HEAD"))


def test_control_unmutated_document_is_imported() -> None:
    """Without this the test above could change nothing that matters."""
    found = import_openapi(WHOLE, ImportOptions(source="https://shop.example/openapi.json"))
    assert [tool["name"] for tool in found.tools] == ["read", "put_orders_id"]
    assert len(PARTS) > 80
