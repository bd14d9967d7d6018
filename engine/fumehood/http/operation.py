"""One address with one method: who serves it, and what the API's document says of it.

Host side, a value. Each file of `routes/` ends with a list of these; `app.py` makes the routes
from it and `document.py` the document, so that nothing is served and not described.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fumehood.core.errors import (
    EngineError,
    InternalError,
    InvalidParams,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    Unauthorized,
    UnsupportedMediaType,
)

Endpoint = Callable[[Request], Awaitable[Response]]
Errors = frozenset[type[EngineError]]


class Needs(StrEnum):
    """Who may ask."""

    NOBODY = "nobody"
    CALLER = "caller"
    APPROVER = "approver"
    ADMIN = "admin"
    SIGNATURE = "signature"
    """Whoever holds the webhook's secret."""


@dataclass(frozen=True, slots=True)
class Operation:
    """What is served at one address by one method.

    `data` is what stands in the envelope's `data`; None is any object. `body` and `query` are
    what the endpoint parses; `parameters` says of each one in the path what it is. `errors`
    are those that come besides `common_errors`; `has_tool_codes` adds a tool's own.
    `plain` are the statuses of an answer that is no envelope but `data` itself; `media` is the
    type of one that is no JSON at all, `events` that of one that is events instead of an envelope
    where the call begins. `upload` is the type of a body that is no JSON. `takes_rest` says that
    the last parameter takes the rest of the path, slashes included.
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
        """The operation's name in the document: that of its function in camel case."""
        first, *rest = self.endpoint.__name__.split("_")
        return first + "".join(word.capitalize() for word in rest)

    @property
    def words(self) -> tuple[str, str]:
        """Summary and description, from the function's docstring."""
        summary, _, more = (inspect.getdoc(self.endpoint) or "").partition("\n")
        return summary, more.strip()

    @property
    def route(self) -> Route:
        """What the application serves."""
        if not self.takes_rest:
            return Route(self.path, self.endpoint, methods=[self.method])
        path = self.path.removesuffix("}") + ":path}"
        route = Route(path, self.endpoint, methods=[self.method])
        # What a file is called may hold a line break.
        route.path_regex = re.compile(route.path_regex.pattern, re.DOTALL)
        return route

    @property
    def all_errors(self) -> Errors:
        """Every code that can come, those that come to every operation of this kind included."""
        return self.errors | self.common_errors

    @property
    def common_errors(self) -> Errors:
        """Those that follow from who may ask and what is read."""
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
