"""`endpoint`, the decorator that turns a function into an HTTP operation.

Host side. The function's signature and docstring are the operation's only declaration. They
determine how requests are read. `app.py` makes the OpenAPI document from them, and
scripts/make_clients.py makes the clients' methods. The name of each parameter determines the
parameter's value:

- `engine`, `request`, and `caller`, the principal that the operation requires;
- the name of a path parameter: the text in the path, described by `Annotated[str, "…"]`;
- `body`: an instance of a model, made from strict JSON, or an `IncomingBody` for a raw body;
- `query`: an instance of a model, made from the query;
- any name with `Annotated[…, Given(make)]`: the result of `make(request, caller)`.

Invariant: the order of the parameters is the order of the checks. The exception is a JSON body,
which is read before all checks, so that a credential that is revoked while the body arrives is
refused. If the function has no parameter `caller`, the request's authority is checked before any
parameter is filled.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from fumehood.core.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    StateUnavailable,
    Unauthorized,
    UnsupportedMediaType,
)
from fumehood.core.identity import Principal
from fumehood.http.answers import answer, engine_of
from fumehood.http.bodies import IncomingBody, parse_body, parse_query, read_json
from fumehood.http.caller import require_admin, require_approver, require_principal

Respond = Callable[[Request], Awaitable[Response]]
Authorize = Callable[[Request], Any]
"""Checks a request's authority. Returns the caller, or an awaitable whose result is the caller.
Raises EngineError if the request lacks the authority."""

Errors = frozenset[type[EngineError]]
Fill = Callable[[Request, Any, Any], Any]
"""Returns a parameter's value. The arguments are the request, its JSON body or upload, and the
caller."""

ANY_MEDIA = "*/*"


class Needs(StrEnum):
    """The authentication that an operation requires."""

    NOBODY = "nobody"
    CALLER = "caller"
    APPROVER = "approver"
    ADMIN = "admin"
    SIGNATURE = "signature"
    """The body must be signed with the webhook's secret. The operation itself verifies the
    signature."""


CHECKS: Mapping[Needs, Authorize | None] = {
    Needs.NOBODY: None,
    Needs.SIGNATURE: None,  # the function checks it, over the bytes of the body
    Needs.CALLER: require_principal,
    Needs.APPROVER: require_approver,
    Needs.ADMIN: require_admin,
}

FILLS: Mapping[str, Fill] = {
    "engine": lambda request, _, __: engine_of(request),
    "request": lambda request, _, __: request,
    "caller": lambda _, __, caller: caller,
}


@dataclass(frozen=True, slots=True)
class Given:
    """Annotates a parameter of an operation's function. `make(request, caller)` returns the
    parameter's value. If `make` uses path parameters, `describes` maps their names to their
    descriptions.
    """

    make: Callable[[Request, Any], Any]
    describes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParsedBy:
    """Annotates the parameter `body` of an operation's function. `parse` gets the body's JSON, and
    returns the parameter's value. `model` describes the body in the OpenAPI document, and is used
    for nothing else.
    """

    parse: Callable[[Any], Any]
    model: type[BaseModel]


@dataclass(frozen=True, slots=True)
class As:
    """Annotates the return value of an operation's function. The answer's `data` is then an object
    whose only field contains this value.

    `field` is the name of that field. `model` and `words` are the object's name and description in
    the OpenAPI document. The default name is the function's name in camel case, followed by
    `Answer`. If `tag` is given, it computes the response's `ETag` from the return value.
    """

    field: str
    model: str = ""
    words: str | None = None
    tag: Callable[[Any], str] | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """The name and parameters of the clients' method for an operation. Needed only if they differ
    from those of the operation's function.

    - `name`: for example, `agents.create` is the method `client.agents.create()`.
    - `renamed`: maps path parameters and fields to the names of the method's parameters.
    - `whole`: the name of a parameter for the whole body. If it is given, the method has no
      parameters for the body's fields.
    - `is_one`: whether the answer is a list with one item, which the method returns instead of the
      list.
    """

    name: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: str | None = None
    is_one: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """One HTTP method at one address. `endpoint` explains the fields."""

    method: str
    path: str
    function: Callable[..., Awaitable[Any]]
    respond: Respond
    needs: Needs
    authorize: Authorize | None
    data: type[BaseModel] | None
    body: type[BaseModel] | None
    query: type[BaseModel] | None
    parameters: Mapping[str, str]
    errors: Errors
    has_tool_codes: bool
    plain: tuple[int, ...]
    media: str | None
    upload: str | None
    events: str | None
    work_s: float
    client: Method | None
    returns: As | None
    address: re.Pattern[str]
    methods: frozenset[str]

    @property
    def id(self) -> str:
        """The operation's id in the OpenAPI document: its function's name in camel case."""
        first, *rest = self.function.__name__.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @property
    def words(self) -> tuple[str, str]:
        """The summary and the description, taken from the function's docstring."""
        summary, _, more = (inspect.getdoc(self.function) or "").partition("\n")
        return summary, more.strip()

    @property
    def all_errors(self) -> Errors:
        """The declared errors, and the errors that reading or authorizing a request may raise."""
        found: set[type[EngineError]] = {InternalError, StateUnavailable}
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
        return self.errors | found


def endpoint(
    method: str,
    path: str,
    needs: Needs,
    *,
    errors: Collection[type[EngineError]] = (),
    authorize: Authorize | None = None,
    before_reading: Callable[[Request], None] | None = None,
    data: type[BaseModel] | None = None,
    body: type[BaseModel] | None = None,
    has_tool_codes: bool = False,
    plain: tuple[int, ...] = (),
    media: str | None = None,
    events: str | None = None,
    work_s: float = 0.0,
    client: Method | str | None = "",
) -> Callable[[Callable[..., Awaitable[Any]]], Operation]:
    """Turn a function into an operation. The function returns the envelope's `data`, or a value
    that is annotated with `As`.

    - `method`: the HTTP method, such as `GET`.
    - `path`: the address. `{name}` matches one part of the address, and `{name:path}` matches the
      whole rest, including slashes.
    - `needs`: the authentication that the operation requires.
    - `errors`: errors in addition to those that follow from the other arguments and the signature.
    - `has_tool_codes`: whether the answer may also have an error code that a tool defines.
    - `work_s`: seconds that the engine may work before it answers, in addition to the clients'
      usual time limit.
    - `client`: the name of the clients' method, or a `Method`, if it differs from the function's
      name. None if the method is written by hand because it does more than send this request.
    - `authorize`: replaces the check that follows from `needs`.
    - `before_reading`: a check that runs before everything else.

    For a function that returns a response itself:

    - `data`: model of the envelope's `data`. None means any object.
    - `plain`: statuses of responses that are `data` itself, without an envelope.
    - `media`: media type of a response that is not JSON.
    - `events`: media type of a response that is an event stream once the call begins.
    - `body`: model of a body that the function reads itself.
    """

    def decorate(function: Callable[..., Awaitable[Any]]) -> Operation:
        # Inspected in advance, so that no request waits for it.
        signature = _Signature(function, path)
        check = authorize or CHECKS[needs]
        method_name = Method(client or function.__name__) if isinstance(client, str) else client
        respond = _responder(function, signature, check, before_reading)
        return Operation(
            method=method,
            path=path.replace(":path}", "}"),
            function=function,
            respond=respond,
            needs=needs,
            authorize=authorize,
            data=data or signature.data,
            body=body or signature.body,
            query=signature.query,
            parameters=signature.parameters,
            errors=frozenset(errors),
            has_tool_codes=has_tool_codes,
            plain=plain,
            media=media,
            upload=ANY_MEDIA if signature.takes_upload else None,
            events=events,
            work_s=work_s,
            client=method_name,
            returns=signature.returns,
            address=_pattern(path),
            methods=frozenset({method, "HEAD"} if method == "GET" else {method}),
        )

    return decorate


class _Signature:
    """The result of inspecting an operation's function: its parameters, body, query and answer.
    Each parameter has a `Fill`, a function that computes the parameter's value from a request.
    """

    def __init__(self, function: Callable[..., Awaitable[Any]], path: str) -> None:
        self.data: type[BaseModel] | None = None
        self.returns: As | None = None
        self.body: type[BaseModel] | None = None
        self.query: type[BaseModel] | None = None
        self.takes_upload = False
        self._described: dict[str, str] = {}
        self._in_path = re.findall(r"{(\w+)", path)
        hints = get_type_hints(function, include_extras=True)
        returned = hints.pop("return")
        kind, *notes = get_args(returned) if get_origin(returned) is Annotated else (returned,)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            self.data = kind
        for note in notes:
            self.returns = note
            self.data = _object_with(
                note, note.model or f"{function.__name__.title().replace('_', '')}Answer", kind
            )
        names = list(hints)
        fills = [self._fill(name, hint) for name, hint in hints.items()]
        first = names.index("caller") if "caller" in names else 0
        self.before_caller: Sequence[Fill] = fills[:first]
        self.from_caller: Sequence[Fill] = fills[first:]
        self.parameters = {name: self._described[name] for name in self._in_path}

    def _fill(self, name: str, hint: Any) -> Fill:
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for note in notes:
            if isinstance(note, str):
                self._described[name] = note
            elif isinstance(note, Given):
                self._described |= note.describes
                make = note.make
                return lambda request, _, caller: make(request, caller)
            elif isinstance(note, ParsedBy):
                self.body, parse = note.model, note.parse
                return lambda _, document, __: parse(document)
        if name in self._in_path:
            return lambda request, _, __: request.scope["path_params"][name]
        if kind is IncomingBody:
            self.takes_upload = True
            return lambda _, upload, __: upload
        if name == "body":
            self.body = kind
            return lambda _, document, __: parse_body(kind, document)
        if name == "query":
            self.query = kind
            return lambda request, _, __: parse_query(kind, request)
        return FILLS[name]


@cache
def _object_with(note: As, name: str, kind: Any) -> type[BaseModel]:
    """Create a model with the name `name` and a single field of the type `kind`. `note` has the
    field's name and the model's description. Equal arguments always give the same model.
    """
    config = ConfigDict(frozen=True, extra="forbid", defer_build=True)
    fields: dict[str, Any] = {note.field: (kind, ...)}
    return create_model(name, __config__=config, __doc__=note.words, **fields)


def _responder(
    function: Callable[..., Awaitable[Any]],
    signature: _Signature,
    authorize: Authorize | None,
    before_reading: Callable[[Request], None] | None,
) -> Respond:
    """Return a coroutine function that answers a request by calling `function`. `signature` is the
    result of inspecting `function`. `authorize` checks the request's authority, and None means no
    check. `before_reading` has the same meaning as in `endpoint`.
    """
    reads_json = signature.body is not None
    before_caller, from_caller = signature.before_caller, signature.from_caller
    awaits = inspect.iscoroutinefunction(authorize)
    returns, data = signature.returns, signature.data

    async def respond(request: Request, document: Any = None) -> Response:
        if before_reading is not None:
            before_reading(request)
        if reads_json:
            document = await read_json(request)
        values = [fill(request, document, None) for fill in before_caller]
        caller: Principal | None = None
        if authorize is not None:
            caller = await authorize(request) if awaits else authorize(request)
        values += [fill(request, document, caller) for fill in from_caller]
        result = await function(*values)
        if isinstance(result, Response):
            return result
        if returns is None or data is None:
            return answer(engine_of(request), result)
        response = answer(engine_of(request), data(**{returns.field: result}))
        if returns.tag is not None:
            response.headers["etag"] = returns.tag(result)
        return response

    async def respond_to_upload(request: Request) -> Response:
        upload = IncomingBody(request)
        try:
            return await respond(request, upload)
        except EngineError:
            await upload.drain()
            raise

    return respond_to_upload if signature.takes_upload else respond


def _pattern(path: str) -> re.Pattern[str]:
    pattern, _, _ = compile_path(path)
    return re.compile(pattern.pattern, re.DOTALL)  # a file name may contain a line break
