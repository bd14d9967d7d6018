"""The OpenAPI 3.1 document of one socket, made from its operations.

Host side. The operations are the ones that `app.py` serves, so nothing is served undocumented.
*Source*: the OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from fumehood.core.envelope import Envelope
from fumehood.core.errors import TOOL_CODE, TOOL_CODE_HTTP_STATUS
from fumehood.core.json_types import JsonObject
from fumehood.http.endpoint import Needs, Operation

REFERENCE = "#/components/schemas/{model}"
ANY_OBJECT: JsonObject = {"type": "object"}
SECURITY: dict[Needs, list[JsonObject]] = {
    Needs.NOBODY: [],
    Needs.CALLER: [{}, {"bearer": []}],  # the peer's uid suffices
    Needs.APPROVER: [{"bearer": []}],
    Needs.ADMIN: [{"bearer": []}],
    Needs.SIGNATURE: [{"signature": []}],
}
DESCRIPTION = (
    "HTTP/1.1 and JSON over a Unix socket. `HEAD` works wherever `GET` does. Malformed HTTP is "
    "answered with status 400 and an envelope (`INVALID_PARAMS`), an address that is not in "
    "this document with 404 (`RESOURCE_NOT_FOUND`), another method with 405 "
    "(`METHOD_NOT_ALLOWED`)."
)
BEARER: JsonObject = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token, or an approver's credential.",
}

SIGNATURE: JsonObject = {
    "type": "apiKey",
    "in": "header",
    "name": "fumehood-signature",
    "description": "`t=UNIX,v1=HEX`: HMAC-SHA-256 with the webhook's secret over `UNIX.body`.",
}

Mode = Literal["validation", "serialization"]
Schemas = dict[tuple[type[Any], Mode], JsonObject]


def make_document(title: str, version: str, operations: Sequence[Operation]) -> JsonObject:
    """Make the document of one socket."""
    schemas, definitions = _schemas(operations)
    paths: dict[str, JsonObject] = {}
    for operation in operations:
        entry = _described(operation, schemas, definitions)
        paths.setdefault(operation.path, {})[operation.method.lower()] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": DESCRIPTION},
        "servers": [{"url": "http://fumehood", "description": "The host name is ignored."}],
        "paths": paths,
        "components": {"schemas": definitions, "securitySchemes": _schemes(operations)},
    }


def _schemes(operations: Iterable[Operation]) -> JsonObject:
    is_signed = any(operation.needs is Needs.SIGNATURE for operation in operations)
    return {"bearer": BEARER, "signature": SIGNATURE} if is_signed else {"bearer": BEARER}


def _schemas(operations: Iterable[Operation]) -> tuple[Schemas, JsonObject]:
    """Return a schema reference per model, and the definitions that they refer to."""
    # The envelope omits absent fields, which only its "validation" schema expresses.
    wanted: dict[tuple[type[BaseModel], Mode], None] = {(Envelope, "validation"): None}
    for operation in operations:
        if operation.body is not None:
            wanted[operation.body, "validation"] = None
        if operation.data is not None:
            wanted[operation.data, "serialization"] = None
    schemas, found = models_json_schema(list(wanted), ref_template=REFERENCE)
    return {key: dict(schema) for key, schema in schemas.items()}, found["$defs"]


def _described(operation: Operation, schemas: Schemas, definitions: JsonObject) -> JsonObject:
    summary, description = operation.words
    entry: JsonObject = {
        "operationId": operation.id,
        "summary": summary,
        "security": SECURITY[operation.needs],
        "responses": _responses(operation, schemas),
    }
    if description:
        entry["description"] = description
    parameters = _path_parameters(operation) + _query_parameters(operation, definitions)
    if parameters:
        entry["parameters"] = parameters
    if operation.body is not None:
        content = _json_content(schemas[operation.body, "validation"])
        entry["requestBody"] = {"required": True, "content": content}
    if operation.upload is not None:
        entry["requestBody"] = {"required": True, "content": {operation.upload: {}}}
    return entry


def _responses(operation: Operation, schemas: Schemas) -> JsonObject:
    envelope = schemas[Envelope, "validation"]
    data = ANY_OBJECT if operation.data is None else schemas[operation.data, "serialization"]
    statuses: dict[int, list[str]] = {}
    for error in sorted(operation.all_errors, key=lambda error: error.code):
        statuses.setdefault(error.http_status, []).append(error.code)
    refusals = {
        status: _response(", ".join(codes), _refusal(envelope, {"enum": codes}))
        for status, codes in statuses.items()
    }
    if operation.has_tool_codes:
        own = _refusal(envelope, {"pattern": TOOL_CODE.pattern})
        refusals[TOOL_CODE_HTTP_STATUS] = _response("A code of the tool's own.", own)
    answers: dict[int, JsonObject]
    if operation.media is not None:
        answers = {200: {"description": "The bytes.", "content": {operation.media: {}}}}
    elif operation.plain:
        answers = {status: _response("The answer.", data) for status in operation.plain}
    else:
        answers = {200: _response("The envelope.", _success(envelope, data))}
    if operation.events is not None:
        answers[200]["content"][operation.events] = {"schema": {"type": "string"}}
    return {str(status): answer for status, answer in sorted({**refusals, **answers}.items())}


def _success(envelope: JsonObject, data: JsonObject) -> JsonObject:
    here = {"success": {"const": True}, "error": {"type": "null"}, "data": data}
    return {"allOf": [envelope, {"properties": here}]}


def _refusal(envelope: JsonObject, code: JsonObject) -> JsonObject:
    error = {"type": "object", "properties": {"code": code}}
    here = {"success": {"const": False}, "error": error, "data": {"maxProperties": 0}}
    return {"allOf": [envelope, {"properties": here}]}


def _path_parameters(operation: Operation) -> list[JsonObject]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": words,
            "schema": {"type": "string"},
        }
        for name, words in operation.parameters.items()
    ]


def _query_parameters(operation: Operation, definitions: JsonObject) -> list[JsonObject]:
    """Describe the fields of the query model."""
    if operation.query is None:
        return []
    schema: dict[str, Any] = operation.query.model_json_schema(ref_template=REFERENCE)
    definitions |= schema.get("$defs", {})
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": of_value}
        for name, of_value in schema["properties"].items()
    ]


def _response(description: str, schema: JsonObject) -> JsonObject:
    return {"description": description, "content": _json_content(schema)}


def _json_content(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}
