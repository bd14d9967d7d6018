"""One HTTP operation: its address, method, endpoint and description; and the OpenAPI document.

Host side. Each file of `routes/` ends with a list of operations. `app.py` makes the routes from
them and `make_document` the OpenAPI 3.1 document, so that nothing is served undocumented.
*Source*: the OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    TOOL_CODE,
    TOOL_CODE_HTTP_STATUS,
    EngineError,
    InternalError,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    Unauthorized,
    UnsupportedMediaType,
)
from fumehood.core.json_types import JsonObject

Endpoint = Callable[[Request], Awaitable[Response]]
Errors = frozenset[type[EngineError]]


class Needs(StrEnum):
    """Who may use an operation."""

    NOBODY = "nobody"
    CALLER = "caller"
    APPROVER = "approver"
    ADMIN = "admin"
    SIGNATURE = "signature"
    """A holder of the webhook's secret."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method at one address.

    - `data`: model of the envelope's `data`; None means any object.
    - `body`, `query`: models that the endpoint parses.
    - `parameters`: descriptions of the path parameters.
    - `errors`: errors besides `common_errors`; `has_tool_codes` adds a tool's own codes.
    - `plain`: statuses of responses that are `data` itself, without an envelope.
    - `media`: media type of a response that is not JSON.
    - `upload`: media type of a request body that is not JSON.
    - `takes_rest`: the last parameter takes the rest of the path, including slashes.
    - `events`: media type of a response that is an event stream once the call begins.
    """

    method: str
    path: str
    endpoint: Endpoint
    needs: Needs
    data: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    errors: Errors = frozenset()
    has_tool_codes: bool = False
    plain: tuple[int, ...] = ()
    media: str | None = None
    upload: str | None = None
    takes_rest: bool = False
    events: str | None = None

    @property
    def id(self) -> str:
        """The operation's id in the document: its function's name in camel case."""
        first, *rest = self.endpoint.__name__.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @property
    def words(self) -> tuple[str, str]:
        """Summary and description, from the endpoint's docstring."""
        summary, _, more = (inspect.getdoc(self.endpoint) or "").partition("\n")
        return summary, more.strip()

    @property
    def route(self) -> Route:
        """The Starlette route."""
        if not self.takes_rest:
            return Route(self.path, self.endpoint, methods=[self.method])
        path = self.path.removesuffix("}") + ":path}"
        route = Route(path, self.endpoint, methods=[self.method])
        # A file name may contain a line break.
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
        return route

    @property
    def all_errors(self) -> Errors:
        """All possible errors, including the common ones."""
        return self.errors | self.common_errors

    @property
    def common_errors(self) -> Errors:
        """Errors that follow from `needs` and from the parts of the request that are read."""
        found: set[type[EngineError]] = {InternalError}
        if self.needs is not Needs.NOBODY:
            found |= {Unauthorized, PermissionDenied}
        if self.needs in (Needs.ADMIN, Needs.APPROVER):
            found |= {RateLimited}
        if self.body is not None:
            found |= {InvalidParams, UnsupportedMediaType, RequestTooLarge}
        if self.upload is not None:
            found |= {InvalidParams, UnsupportedMediaType, RequestTooLarge, RateLimited}
        if self.query is not None:
            found |= {InvalidParams}
        return frozenset(found)


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
    """Make the OpenAPI document of one socket."""
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
