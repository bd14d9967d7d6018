"""`/v1/openapi.json`: the document of this API, made from the types that serve it."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.model.call import CallBody
from fumehood.model.call_log import CallPage, CallQuery, CallRecord
from fumehood.model.envelope import Envelope
from fumehood.model.errors import ERROR_CODES, TOOL_CODE_HTTP_STATUS
from fumehood.model.json_types import JsonObject
from fumehood.model.tool import ToolDefinition, ToolType
from fumehood.registry.listing import DEFAULT_LIMIT, MAX_LIMIT

REFERENCE = "#/components/schemas/{model}"
NAME_PARAMETER = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "A tool's name, or `name@version`.",
    "schema": {"type": "string"},
}
CALL_ID_PARAMETER = {
    "name": "call_id",
    "in": "path",
    "required": True,
    "description": "The `call_id` of an envelope.",
    "schema": {"type": "string"},
}


async def openapi(request: Request) -> Response:
    """The document."""
    return JSONResponse(request.app.state.openapi)


def make_document(version: str) -> JsonObject:
    """OpenAPI 3.1 for every address of the callers' socket."""
    _, definitions = models_json_schema(
        [
            (CallBody, "validation"),
            (CallPage, "serialization"),
            (CallRecord, "serialization"),
            (Envelope, "serialization"),
            (ToolDefinition, "serialization"),
        ],
        ref_template=REFERENCE,
    )
    envelope = _json_content({"$ref": REFERENCE.format(model="Envelope")})
    statuses: dict[int, list[str]] = {TOOL_CODE_HTTP_STATUS: ["a tool's own code"]}
    for code, error in sorted(ERROR_CODES.items()):
        statuses.setdefault(error.http_status, []).append(code)
    refusals: JsonObject = {
        str(status): {"description": ", ".join(codes), "content": envelope}
        for status, codes in sorted(statuses.items())
    }
    answered = {"200": {"description": "The envelope.", "content": envelope}, **refusals}
    status_body = _json_content({"type": "object", "required": ["status"]})
    paths: dict[str, Any] = {
        "/v1/health": {
            "get": _operation("health", "The daemon answers.", {"200": _ok(status_body)})
        },
        "/v1/ready": {
            "get": _operation(
                "ready",
                "Whether calls are served, and what each wall enforces on this host.",
                {
                    "200": _ok(status_body),
                    "503": {"description": "Not ready.", "content": status_body},
                },
            )
        },
        "/v1/openapi.json": {
            "get": _operation(
                "openapi", "This document.", {"200": _ok(_json_content({"type": "object"}))}
            )
        },
        "/v1/tools": {
            "get": _operation(
                "listTools", "The tools, one page of them.", answered, _list_parameters()
            )
        },
        "/v1/tools/{name}": {
            "get": _operation("showTool", "One tool's definition.", answered, [NAME_PARAMETER])
        },
        "/v1/tools/{name}/call": {
            "post": {
                **_operation("callTool", "Call a tool.", answered, [NAME_PARAMETER]),
                "requestBody": {
                    "required": True,
                    "content": _json_content({"$ref": REFERENCE.format(model="CallBody")}),
                },
            }
        },
        "/v1/calls": {
            "get": _operation(
                "listCalls", "The caller's own calls, newest first.", answered, _query_parameters()
            )
        },
        "/v1/calls/{call_id}": {
            "get": _operation(
                "showCall", "One call of the caller's own.", answered, [CALL_ID_PARAMETER]
            )
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "fumehood", "version": version},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }


def _list_parameters() -> list[JsonObject]:
    limit = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
    described: dict[str, tuple[str, JsonObject]] = {
        "limit": ("How many at most.", limit),
        "cursor": ("`data.pagination.next_cursor` of the page before.", {"type": "string"}),
        "category": ("Only tools of this category.", {"type": "string"}),
        "tag": ("Only tools with this tag.", {"type": "string"}),
        "type": ("Only tools of this type.", {"type": "string", "enum": list(ToolType)}),
    }
    return [
        {"name": name, "in": "query", "required": False, "description": words, "schema": schema}
        for name, (words, schema) in described.items()
    ]


def _operation(
    identifier: str, summary: str, responses: JsonObject, parameters: list[JsonObject] | None = None
) -> JsonObject:
    operation: JsonObject = {"operationId": identifier, "summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    return operation


def _query_parameters() -> list[JsonObject]:
    """Those of the call log, from the type that checks them."""
    properties = CallQuery.model_json_schema()["properties"]
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in properties.items()
    ]


def _ok(content: JsonObject) -> JsonObject:
    return {"description": "The answer.", "content": content}


def _json_content(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}
