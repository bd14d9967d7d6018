"""The HTTP application: routing, an envelope for every refusal, and the OpenAPI documents.

Host side, between the server and one engine. Invariant: whatever a client sends, the answer
has a documented form, without stack traces or host paths. Each socket's document is made from the
operations that the socket serves, so that every operation is documented.
*Source*: the OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fumehood.core.envelope import Envelope
from fumehood.core.errors import (
    TOOL_CODE_HTTP_STATUS,
    EngineError,
    InternalError,
    MethodNotAllowed,
    ResourceNotFound,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.part import PartError, imported
from fumehood.core.status import engine_version
from fumehood.engine import Engine
from fumehood.http.answers import envelope_response, headers_of, stopped
from fumehood.http.caller import refusal_over_tcp
from fumehood.http.endpoint import Needs, Operation, Respond
from fumehood.http.peer import Face, Handover, Handovers
from fumehood.http.routes import (
    approvals,
    authority,
    calls,
    overview,
    sessions,
    tools,
)
from fumehood.observe.log import log_fault
from fumehood.observe.trace_context import HEADER, INCOMING
from fumehood.parts import parts

TRACEPARENT = HEADER.encode()


def with_added(kernel: Sequence[Operation], added: Iterable[Operation]) -> list[Operation]:
    """Return the built-in operations (`kernel`) together with the operations that parts add. A
    part's operation replaces the built-in operation with the same address and method.

    Raises:
        PartError: two parts add the same operation, or a part's operation requires a different
            authority than the built-in operation that it replaces.
    """
    own = {(operation.method, operation.path): operation for operation in kernel}
    found = dict(own)
    for operation in added:
        place = (operation.method, operation.path)
        replaced = own.get(place, operation)
        if found.get(place, replaced) is not replaced:
            raise PartError(f"Two parts add the operation {' '.join(place)}.")
        if (replaced.needs, replaced.authorize) != (operation.needs, operation.authorize):
            raise PartError(f"{' '.join(place)} of a part must need {replaced.needs.value}.")
        found[place] = operation
    return list(found.values())


def _with_parts(of: str, kernel: Sequence[Operation]) -> list[Operation]:
    places = [getattr(part, of) for part in parts()]
    return with_added(kernel, [each for place in places for each in imported(place)])


OPERATIONS: list[Operation] = _with_parts(
    "operations",
    [
        *calls.OPERATIONS,
        *approvals.OPERATIONS,
        *tools.OPERATIONS,
        *sessions.OPERATIONS,
        *overview.OPERATIONS,
    ],
)
"""Operations that the callers' socket serves."""

CONTROL_OPERATIONS: list[Operation] = _with_parts(
    "control_operations",
    [
        *authority.OPERATIONS,
        *tools.CONTROL_OPERATIONS,
        *approvals.CONTROL_OPERATIONS,
        *overview.CONTROL_OPERATIONS,
    ],
)
"""Operations that the control socket serves. For an operation that only the control socket serves,
the callers' socket answers RESOURCE_NOT_FOUND."""


class Faces:
    """The ASGI application of the server. It passes each request to the application that serves the
    socket on which the request arrived.

    A part can mount an application of its own at a path of the callers' sockets. Requests with this
    path then go to that application.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._engine = Application(engine, "fumehood", OPERATIONS)
        self._control = Application(engine, "fumehood, control socket", CONTROL_OPERATIONS)
        for path in (path for part in parts() for path in part.mounts):
            if any(operation.address.fullmatch(path) for operation in OPERATIONS):
                raise PartError(f"A part mounts {path!r}, which is the address of an operation.")
        self._mounted: dict[str, ASGIApp] = {
            path: imported(place)(engine) for part in parts() for path, place in part.mounts.items()
        }
        places = [part.handovers for part in parts() if part.handovers is not None]
        self._handovers: list[Handovers] = [one for place in places for one in imported(place)]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Return the coroutine that answers one request."""
        # Not a coroutine function, because each nested coroutine would slow down every call.
        face = scope["state"]["face"]
        given = headers_of(scope, TRACEPARENT)
        # Also set without the header: a pipelined request may begin in the previous one's context.
        INCOMING.set(given[0].decode("latin-1") if len(given) == 1 else None)
        app: ASGIApp = self._control
        if face is not Face.CONTROL:
            app = self._mounted.get(scope["path"], self._engine)
        if face is Face.TCP:
            scope["app"] = self._engine
            refusal = refusal_over_tcp(Request(scope))
            if refusal is not None:
                return envelope_response(self.engine.refusal(refusal))(scope, receive, send)
        return app(scope, receive, send)

    def takes_over(self, path: bytes) -> bool:
        """Return whether a part takes over the connections of requests with this path. Such
        requests are not answered over HTTP.
        """
        return any(one.accepts(path) for one in self._handovers)

    def hand_over(self, request: Request, upgrade: bytes | None) -> Handover:
        """Check a request whose connection a part will take over. Return the object that serves the
        connection from then on. `upgrade` is the protocol in the request's `Upgrade` header, or
        None.

        Raises EngineError if the request is refused.
        """
        request.scope["app"] = self._engine
        if request.scope["state"]["face"] is Face.TCP:
            refusal = refusal_over_tcp(request)
            if refusal is not None:
                raise refusal
        path = request.scope["raw_path"]
        owner = next(one for one in self._handovers if one.accepts(path))
        return owner.check(self.engine, request, upgrade)


class Application:
    """Serves the operations of one socket for an engine that has been started."""

    def __init__(self, engine: Engine, title: str, operations: Sequence[Operation]) -> None:
        # Starlette's application and routes are not used, because they would slow down every call:
        # they take about as much time as one of the engine's checks.
        # Fixed addresses come before those that have an id in the same place.
        self._operations = tuple(sorted(operations, key=lambda one: "{" in one.path))
        self.engine = engine
        # Made on first request: it takes megabytes and is rarely needed.
        self.openapi = lru_cache(maxsize=1)(
            partial(make_document, title, engine_version(), operations)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Internal errors are logged. Their details are not sent to the
        client.
        """
        scope["app"] = self
        try:
            response = await self._found(scope)(Request(scope, receive, send))
        except EngineError as error:
            response = self._refuse(error, scope)
        except asyncio.CancelledError:
            if not self.engine.is_draining:
                raise
            # The time for running requests is over, but the client still gets an answer.
            response = envelope_response(stopped(self.engine, _tool_of(scope)))
        except Exception as fault:
            log_fault(self.engine.log, "daemon.internal_error", fault)
            response = self._refuse(InternalError("The engine failed internally."), scope)
        try:
            await response(scope, receive, send)
        except Exception as fault:
            log_fault(self.engine.log, "daemon.internal_error", fault)
            raise  # the response has begun: the server closes the connection

    def _refuse(self, error: EngineError, scope: Scope) -> Response:
        return envelope_response(self.engine.refusal(error, tool=_tool_of(scope)))

    def _found(self, scope: Scope) -> Respond:
        """Return the function that responds to requests with the address and method in `scope`.

        Raises:
            MethodNotAllowed: the address exists, but not with this method.
            ResourceNotFound: the address does not exist.
        """
        path, method = scope["path"], scope["method"]
        is_known = False
        for operation in self._operations:
            match = operation.address.fullmatch(path)
            if match is not None:
                if method in operation.methods:
                    scope["path_params"] = match.groupdict()
                    return operation.respond
                is_known = True
        if is_known:
            raise MethodNotAllowed(
                "This address does not accept this method. See /v1/openapi.json."
            )
        raise ResourceNotFound("This address does not exist. See /v1/openapi.json.")


def _tool_of(scope: Scope) -> str | None:
    name: str | None = scope.get("path_params", {}).get("name")
    return name


REFERENCE = "#/components/schemas/{model}"
ANY_OBJECT: JsonObject = {"type": "object", "additionalProperties": True}
"""The JSON schema of an arbitrary object. `additionalProperties` is explicit, because some client
generators treat an object without properties as empty."""

BINARY = "application/octet-stream"
"""The media type of file contents in the OpenAPI document. The engine itself accepts files of any
media type."""

BYTES: JsonObject = {"schema": {"type": "string", "format": "binary"}}
REFUSAL = "Refusal"
SECURITY: dict[Needs, list[JsonObject]] = {
    Needs.NOBODY: [],
    Needs.CALLER: [{}, {"bearer": []}],  # the peer's uid suffices
    Needs.APPROVER: [{"bearer": []}],
    Needs.ADMIN: [{"bearer": []}],
    Needs.SIGNATURE: [{"signature": []}],
}
DESCRIPTION = (
    "HTTP/1.1 and JSON over a Unix socket. `HEAD` works wherever `GET` does. Every refusal is an "
    "envelope. Malformed HTTP is refused with status 400 (`INVALID_PARAMS`), an address that is "
    "not in this document with 404 (`RESOURCE_NOT_FOUND`), and a method that is not in this "
    "document for its address with 405 (`METHOD_NOT_ALLOWED`)."
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

Schemas = dict[type[Any], JsonObject]


def make_document(title: str, version: str, operations: Sequence[Operation]) -> JsonObject:
    """Make the OpenAPI document of one socket, which serves `operations`. `title` and `version` are
    those of the document.
    """
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
    """Return two values for the models of `operations`. The first maps each model to a reference to
    its definition. The second maps the names of the definitions to the definitions.
    """
    wanted: dict[type[BaseModel], None] = {Envelope: None}
    for operation in operations:
        wanted |= {model: None for model in (operation.body, operation.data) if model is not None}
    # Requests and answers share the schema for validation. The schema for serialization would
    # require fields that an answer may lack.
    modes: list[tuple[type[BaseModel], Literal["validation"]]]
    modes = [(model, "validation") for model in wanted]
    schemas, found = models_json_schema(modes, ref_template=REFERENCE)
    definitions = {name: _worded(schema) for name, schema in found["$defs"].items()}
    return {model: dict(schema) for (model, _), schema in schemas.items()}, definitions


def _worded(schema: Any) -> Any:
    """Return a schema whose descriptions state the default values, without `default` keywords."""
    # With `default`, generated clients would send every default value explicitly. A request that
    # changes one field of an object would then reset the other fields.
    if isinstance(schema, list):
        return [_worded(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: {name: _worded(said) for name, said in value.items()}
        if key == "properties"
        else _worded(value)
        for key, value in schema.items()
        if key != "default"
    }
    if schema.get("default") not in (None, "", [], {}):
        words = f"Default: {json.dumps(schema['default'])}."
        made["description"] = " ".join(filter(None, (schema.get("description"), words)))
    return made


def _described(operation: Operation, schemas: Schemas, definitions: JsonObject) -> JsonObject:
    summary, description = operation.words
    entry: JsonObject = {
        "operationId": operation.id,
        "summary": summary,
        "security": SECURITY[operation.needs],
        "responses": _responses(operation, schemas, definitions),
    }
    if description:
        entry["description"] = description
    parameters = _path_parameters(operation) + _query_parameters(operation, definitions)
    if parameters:
        entry["parameters"] = parameters
    if operation.body is not None:
        content = _json_content(schemas[operation.body])
        entry["requestBody"] = {"required": True, "content": content}
    if operation.upload is not None:
        entry["requestBody"] = {"required": True, "content": {BINARY: BYTES}}
    return entry


def _responses(operation: Operation, schemas: Schemas, definitions: JsonObject) -> JsonObject:
    data = ANY_OBJECT if operation.data is None else schemas[operation.data]
    nothing = {**ANY_OBJECT, "maxProperties": 0}
    refusal = _envelope(definitions, REFUSAL, is_success=False, data=nothing)
    statuses: dict[int, list[str]] = {}
    for error in sorted(operation.all_errors, key=lambda error: error.code):
        statuses.setdefault(error.http_status, []).append(error.code)
    refusals = {status: _response(", ".join(codes), refusal) for status, codes in statuses.items()}
    if operation.has_tool_codes:
        refusals[TOOL_CODE_HTTP_STATUS] = _response("An error code that the tool defines.", refusal)
    answers: dict[int, JsonObject]
    if operation.media is not None:
        answers = {
            200: {
                "description": "The raw content.",
                "content": {BINARY: BYTES, operation.media: BYTES},
            }
        }
    elif operation.plain:
        answers = {status: _response("The answer.", data) for status in operation.plain}
    else:
        name = "ResultEnvelope" if operation.data is None else f"{operation.data.__name__}Envelope"
        success = _envelope(definitions, name, is_success=True, data=data)
        answers = {200: _response("The envelope.", success)}
    if operation.events is not None:
        answers[200]["content"][operation.events] = {"schema": {"type": "string"}}
    return {str(status): answer for status, answer in sorted({**refusals, **answers}.items())}


def _envelope(
    definitions: JsonObject, name: str, *, is_success: bool, data: JsonObject
) -> JsonObject:
    """Define an envelope in `definitions` under `name`, and return a reference to this definition.
    `data` is the schema of the envelope's `data`.
    """
    any_envelope = definitions["Envelope"]
    fields = {
        **any_envelope["properties"],
        "success": {"type": "boolean", "const": is_success},
        "status": {"type": "string", "const": "success" if is_success else "error"},
        "data": data,
        "error": {"type": "null"} if is_success else {"$ref": REFERENCE.format(model="ErrorInfo")},
    }
    # A complete schema for each answer, because client generators only partly support combined
    # schemas and repeated names.
    definitions[name] = {**any_envelope, "title": name, "properties": fields}
    return {"$ref": REFERENCE.format(model=name)}


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
    """Return a description of each field of the operation's query model as a query parameter.
    Schemas to which the fields refer are added to `definitions`.
    """
    if operation.query is None:
        return []
    schema: dict[str, Any] = operation.query.model_json_schema(ref_template=REFERENCE)
    definitions |= {name: _worded(said) for name, said in schema.get("$defs", {}).items()}
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _worded(of_value)}
        for name, of_value in schema["properties"].items()
    ]


def _response(description: str, schema: JsonObject) -> JsonObject:
    return {"description": description, "content": _json_content(schema)}


def _json_content(schema: JsonObject) -> JsonObject:
    return {"application/json": {"schema": schema}}
