"""Parses a document into a tool definition, or lists every fault in the document.

Host side. Definitions from every source of tools are checked here. Invariants: a field that this
version cannot enforce is refused, never accepted and ignored; a definition of a tool that another
service runs contains no literal credential. This module resolves, opens and sends nothing. A fault
quotes names, never values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError

from fumehood.core.arguments import ARGUMENTS, Arguments
from fumehood.core.errors import InvalidParams, faults_of
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MIN_CONTAINER_MB, MIN_JAIL_MB, MIN_MEMORY_MB
from fumehood.core.tool import (
    CURSOR,
    DEFAULT_EXECUTORS,
    MAX_HEADER_VALUE,
    PLACEHOLDER,
    QUERY_PLACE,
    SECRET_REFERENCE,
    ToolDefinition,
    ToolType,
    is_header_value,
    parameter_list_schema,
)
from fumehood.registry.json_schema import schema_faults

if TYPE_CHECKING:
    from fumehood.core.part import ToolKind

EXECUTORS = (*ARGUMENTS, "function")
"""The executors that a definition can name without any part. Parts add others
(`parts.tool_kinds`)."""


class InvalidDefinition(InvalidParams):
    """The definition of a tool is invalid. `details.faults` lists every fault."""

    def __init__(self, name: str, faults: list[str], remedy: str = "") -> None:
        message = f"the tool {name[:80]!r} cannot be registered: {'; '.join(faults)}"
        super().__init__(
            f"{message}. {remedy}" if remedy else message,
            fields=sorted({fault.split(":", 1)[0] for fault in faults}),
            details={"faults": faults},
        )
        self.faults = faults


def parse_definition(document: JsonObject) -> ToolDefinition:
    """Parse and check a document, and return the tool definition.

    Raises:
        InvalidDefinition: the document has faults. The error lists all of them.
    """
    if not isinstance(document, dict):
        raise InvalidDefinition(
            type(document).__name__, ["definition: neither made by @tool nor an object"]
        )
    listed = document.get("parameters")
    faults: list[str] = []
    if isinstance(listed, list | tuple):
        schema, faults = parameter_list_schema(listed)
        document = {**document, "parameters": schema}
    try:
        definition = ToolDefinition.model_validate(document)
    except ValidationError as error:
        said = [f"{path or 'definition'}: {words}" for path, words in faults_of(error)]
        faults = [*said, *faults, *_document_faults(document)]
    else:
        # Check the parsed values, not the text: the model reads "no" as false.
        faults += _document_faults(definition.model_dump())
    if faults:
        raise InvalidDefinition(str(document.get("name", "")), faults)
    return definition


def check_definition(definition: ToolDefinition) -> None:
    """Check a definition that was created in Python, in the same way as a parsed document.

    Raises:
        InvalidDefinition: the definition has faults. The error lists all of them.
    """
    parse_definition(definition.model_dump())


def _document_faults(document: JsonObject) -> list[str]:
    faults: list[str] = []
    for where in ("parameters", "output_schema"):
        schema = document.get(where)
        if isinstance(schema, dict):
            faults += schema_faults(schema, where)
    parameters = document.get("parameters")
    if isinstance(parameters, dict) and parameters.get("type", "object") != "object":
        faults.append("parameters: the root of the schema must be an object")
    faults += _required_faults(document)
    return [
        *faults,
        *rest_faults(document),
        *_executor_faults(document),
        *_faults_of_parts(document),
        *_failure_faults(document),
    ]


def _required_faults(document: JsonObject) -> Iterator[str]:
    """Yield a fault for each required parameter that is not declared, if the schema forbids
    undeclared parameters. No call could be valid under such a schema.
    """
    schema = document.get("parameters")
    if not isinstance(schema, dict) or schema.get("additionalProperties") is not False:
        return
    properties, required = declared_in(document)
    for name in required if "patternProperties" not in schema else ():
        if name not in properties:
            yield (
                f"parameters.required: {str(name)[:64]!r} is not among the properties, and "
                "additionalProperties is false, so no call could be valid"
            )


RESTRICTIONS = ("rate_limit",)
"""Fields of a definition that restrict the tool's calls. Each must be enforced by a part
(`Part.enforces`)."""


def unenforced(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a fault for each field in a definition that is meant to restrict the tool's calls, but
    that no part of this engine enforces.
    """
    from fumehood.parts import parts  # the jail loads this module, and needs no parts

    for field in RESTRICTIONS:
        is_given = document.get(field) is not None
        if is_given and not any(field in part.enforces for part in parts()):
            yield f"{field}: it is not enforced by this version"


def _faults_of_parts(document: JsonObject) -> Iterator[str]:
    """Yield the faults that `unenforced` and the parts find in a definition."""
    from fumehood.core.part import imported
    from fumehood.parts import parts

    yield from unenforced(document)
    for part in parts():
        if part.definitions is not None:
            yield from imported(part.definitions)(document)


def _failure_faults(document: JsonObject) -> Iterator[str]:
    """Yield the faults in the fields of a definition that control retries and fallbacks."""
    executor = document.get("executor")
    if isinstance(executor, str) and _arguments_of(executor) is not None:
        for field in ("retry_count", "fallback"):
            if document.get(field):
                yield f"{field}: the executor {executor!r} calls no other service"


def _executor_faults(document: JsonObject) -> list[str]:
    kind = document.get("type", ToolType.NATIVE)
    if not isinstance(kind, str):
        return []  # the model reports this fault
    executor = document.get("executor") or DEFAULT_EXECUTORS.get(kind, "function")
    sandboxed = document.get("sandboxed", True)
    if not isinstance(executor, str):
        return []
    faults: list[str] = []
    remote = remote_type(kind)
    if remote is not None and executor != remote.executor:
        faults.append(f"executor: a tool of type {kind} cannot run as {executor!r}")
    if remote is None and kind not in LOCAL_TYPES and kind in tuple(ToolType):
        faults.append(f"type: {kind} is not enforced by this version")
    # Parts are loaded only if they can matter, because they are missing in the jail, where
    # functions are declared.
    added = {} if executor in EXECUTORS else _added()
    of_part = added.get(executor)
    if kind == "NATIVE" and of_part is not None and (of_part.type or of_part.is_builtin):
        faults.append(f"executor: {executor!r} does not fit a tool of type {kind}")
    if executor not in EXECUTORS and of_part is None:
        faults.append(f"executor: {executor!r} is not enforced by this version")
    model = _arguments_of(executor)
    if model is not None:
        faults += _program_faults(document, executor, model, sandboxed)
    if executor == "function":
        faults += _function_faults(document, sandboxed)
    place = of_part.place if of_part is not None else executor.partition(":")[0]
    faults += _grade_faults(document, place)
    own_streams = executor == "function" or executor.startswith("code:")
    streams = of_part.streams if of_part is not None else own_streams
    if document.get("streaming") and not streams:
        faults.append(f"streaming: the executor {executor!r} gives its result whole")
    return faults


def _grade_faults(document: JsonObject, place: str) -> list[str]:
    """Return a fault if the definition demands a grade of its container and has none. `place` is
    where the tool runs: the place of a part's executor, or the first word of another executor.
    """
    if document.get("least_grade") is None or place in ("container", "code"):
        return []
    return ["least_grade: only tools that run in containers can demand a grade"]


def _function_faults(document: JsonObject, sandboxed: Any) -> list[str]:
    memory_mb = document.get("memory_limit_mb")
    if memory_mb is not None and sandboxed is False:
        return ["memory_limit_mb: it could not be enforced on a function in the host"]
    if isinstance(memory_mb, int) and memory_mb < MIN_JAIL_MB:
        return [f"memory_limit_mb: the jail needs at least {MIN_JAIL_MB}"]
    return []


def _arguments_of(executor: str) -> type[Arguments] | None:
    if executor in EXECUTORS:
        return ARGUMENTS.get(executor)
    from fumehood.registry.arguments import arguments_of  # which loads the parts, as `_added` does

    return arguments_of(executor)


def _program_faults(
    document: JsonObject, executor: str, model: type[Arguments], sandboxed: Any
) -> list[str]:
    faults = []
    where, least_mb = "a container", MIN_CONTAINER_MB
    if executor not in EXECUTORS and (place := _added()[executor].place) != "container":
        where, least_mb = f"the {place}", MIN_MEMORY_MB
    memory_mb = document.get("memory_limit_mb")
    if isinstance(memory_mb, int) and memory_mb < least_mb:
        faults.append(f"memory_limit_mb: {where} needs at least {least_mb}")
    if sandboxed is False:
        faults.append(f"sandboxed: the executor {executor!r} always runs in its sandbox")
    properties, _ = declared_in(document)
    known, one_of = model.model_fields, model.one_of
    if one_of and not properties.keys() & set(one_of):
        names = " or ".join(map(repr, one_of))
        faults.append(f"parameters: the executor {executor!r} needs a parameter {names}")
    faults += [
        f"parameters: the executor {executor!r} needs a parameter {name!r}"
        for name, field in known.items()
        if field.is_required() and name not in properties
    ]
    faults += [
        f"parameters: the executor {executor!r} knows no parameter {name!r}"
        for name in sorted(properties.keys() - known.keys())
    ]
    return faults


def declared_in(document: JsonObject) -> tuple[JsonObject, Collection[str]]:
    """Return the parameters that a definition declares, by name, and the names of the required
    parameters. If the schema's `properties` or `required` is invalid, it counts as empty.
    """
    schema = document.get("parameters")
    schema = schema if isinstance(schema, dict) else {}
    properties, required = schema.get("properties"), schema.get("required")
    return (
        properties if isinstance(properties, dict) else {},
        required if isinstance(required, list | tuple) else (),
    )


# -- tools that another service runs --------------------------------------------------------


METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
QUERY_METHODS = ("DELETE", "GET", "HEAD")
"""HTTP methods whose requests carry arguments in the URL's query. Requests with other methods carry
arguments in a JSON body."""

FIELDS = ("endpoint", "headers", "method", "response", "timeout")
"""Fields that a definition can have only if another service runs the tool."""

LOCAL_TYPES = ("BUILTIN", "NATIVE")
"""The types of the tools that the engine runs itself."""


@dataclass(frozen=True, slots=True)
class Remote:
    """A type of tools that the engine does not run itself, because another service runs them. A
    definition that comes from outside the engine must have such a type.
    """

    executor: str
    fields: frozenset[str]
    """The fields in `FIELDS` that a definition of this type can have."""


def remote_types() -> dict[str, Remote]:
    """Return the tool types whose tools another service runs, as a mapping from the name of the
    type. The mapping is in the order of `ToolType`.
    """
    added = {one.type: Remote(name, one.fields) for name, one in _added().items()}
    return {kind.value: added[kind.value] for kind in ToolType if kind.value in added}


def _added() -> dict[str, ToolKind]:
    from fumehood.parts import tool_kinds  # the jail loads this module, and needs no parts

    return tool_kinds()


def remote_type(kind: str) -> Remote | None:
    """Return the tool type with the name `kind` if another service runs tools of this type,
    otherwise None.
    """
    return None if kind in LOCAL_TYPES else remote_types().get(kind)


MAX_DEFINITION_BYTES = 128 * 1024
"""Maximum size in bytes, as JSON, of a definition that is made from the description of another
service (OpenAPI, MCP)."""

MAX_URL = 2048
"""Maximum number of characters of a URL. It also limits how much data an agent can leak in one
URL."""

# *Source*: RFC 3986, section 2: the characters that a URL may hold.
_URL_TEXT = re.compile(r"[A-Za-z0-9\-._~:/?\[\]@!$&'()*+,;=%]+")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
    r"(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?"
)
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}")
# *Source*: RFC 9110, section 5.6.2 (token).
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_OURS = frozenset(
    {
        "accept-encoding", "connection", "content-length", "expect", "host", "keep-alive",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Names of headers that a definition cannot set. These headers belong to the connection. Setting
them could split or redirect requests."""

_CREDENTIAL_NAME = re.compile(
    r"auth(?!or(?!i[sz]))|token(?!s)|secret|passw|credential|cookie|signature|session"
    r"|(api|access|private|subscription|app|account|functions)[-_]?key|\Akey\Z",
    re.IGNORECASE,
)
_CREDENTIAL_VALUE = re.compile(
    r"\s*(bearer|basic|digest|negotiate|token|apikey)\s"
    r"|(sk|pk|rk)[-_][A-Za-z0-9]|gh[opsu]_|github_pat_|xox[abprs]-|AKIA[0-9A-Z]|eyJ[A-Za-z0-9]",
    re.IGNORECASE,
)
_USE_A_REFERENCE = "write ${secret:NAME} instead of a literal"


def rest_faults(document: JsonObject) -> Iterator[str]:
    """Yield the faults in those fields of a definition that describe how another service runs the
    tool, such as `endpoint` (see `FIELDS`). A definition of any other tool must not have these
    fields.
    """
    kind = document.get("type", "NATIVE")
    if not isinstance(kind, str):
        return  # the model reports this fault
    executor = str(document.get("executor"))
    if kind == "BUILTIN" and executor not in EXECUTORS and executor in (added := _added()):
        kind = added[executor].type or kind  # search_web, whose endpoint the operator sets
    remote = remote_type(kind)
    for field in FIELDS:
        if document.get(field) is not None and (remote is None or field not in remote.fields):
            yield f"{field}: does not fit a tool of type {kind!s}"
    if remote is None:
        return
    yield from _wall_faults(document, kind)
    if kind == "REST":
        yield from _request_faults(document)
        yield from _response_faults(document)
    if isinstance(document.get("endpoint"), str):
        yield from _endpoint_faults(document["endpoint"], document, is_rest=kind == "REST")
    if isinstance(document.get("headers"), dict):
        yield from _headers_faults(document["headers"])


def _request_faults(document: JsonObject) -> Iterator[str]:
    """Yield the faults in the fields that describe the requests of a REST tool."""
    method, headers = document.get("method"), document.get("headers")
    if method not in METHODS:
        yield f"method: a REST tool needs one of {', '.join(METHODS)}"
    for value in headers.values() if isinstance(headers, dict) else ():
        place = PLACEHOLDER.fullmatch(str(value))
        if place is not None and place[1] not in declared_in(document)[0]:
            yield f"headers: {{{place[1]}}} needs a parameter of that name"
    if document.get("endpoint") is None:
        yield "endpoint: a REST tool needs an https or http URL"
    if method in QUERY_METHODS or not isinstance(headers, dict):
        return
    for name, value in headers.items():
        if str(name).lower() == "content-type" and "json" not in str(value).lower():
            yield "headers: 'content-type' must be a type of JSON, as the body is"


def _response_faults(document: JsonObject) -> Iterator[str]:
    """Yield the faults in the field of a REST tool that describes how responses become results."""
    response = document.get("response")
    if not isinstance(response, dict):
        return
    if document.get("method") == "HEAD":
        yield "response: the answer to HEAD has no body"
    if document.get("streaming"):
        yield "response: an answer that is relayed in parts is not mapped (streaming)"
    name = response.get("cursor_parameter")
    if not isinstance(name, str):
        return
    properties, required = declared_in(document)
    declared = properties.get(CURSOR)
    is_text = isinstance(declared, dict) and declared.get("type") == "string"
    if not is_text or CURSOR in required:
        yield (
            f"response: pages need an optional parameter {CURSOR!r} of the type string; callers "
            "hand next_cursor back in it"
        )


def _wall_faults(document: JsonObject, kind: str) -> Iterator[str]:
    if document.get("sandboxed", True) is False:
        # Unsandboxed, a REST tool could reach any address on the host's network, and another tool's
        # server could be a program on the host. Only the operator may allow that, by name.
        yield (
            f"sandboxed: a definition of type {kind!s} cannot say false; only the operator's "
            "configuration may, and this version has no such setting"
        )
    if document.get("memory_limit_mb") is not None:
        yield f"memory_limit_mb: it could not be enforced on a tool of type {kind!s}"


def _endpoint_faults(endpoint: str, document: JsonObject, *, is_rest: bool) -> Iterator[str]:
    path, question, query_text = endpoint.partition("?")
    names = PLACEHOLDER.findall(path) if is_rest else []
    values = QUERY_PLACE.findall(query_text) if is_rest else []
    if is_rest and "//" in path:
        head, slash, below = path.partition("//")[2].partition("/")
        path = f"{path.partition('//')[0]}//{head}{slash}{PLACEHOLDER.sub('x', below)}"
        query_text = QUERY_PLACE.sub("x", query_text)
    faults = list(url_faults(SECRET_REFERENCE.sub("x", path + question + query_text)))
    yield from faults
    if faults:
        return
    if SECRET_REFERENCE.search(endpoint.partition("//")[2].partition("/")[0]):
        yield "endpoint: a secret cannot decide which host is asked"
    elif SECRET_REFERENCE.search(path):
        yield "endpoint: a secret can stand in the query only, or in a header"
    query = parse_qsl(query_text, keep_blank_values=True)
    for name, value in query:
        if _is_literal_credential(name, value):
            yield f"endpoint: the query parameter {name[:60]!a} looks like a credential; " + (
                _USE_A_REFERENCE
            )
    queried = {name for name, _ in query} if document.get("method") in QUERY_METHODS else set()
    yield from _placeholder_faults(names, values, queried, document)


def _placeholder_faults(
    names: list[str], values: list[str], queried: set[str], document: JsonObject
) -> Iterator[str]:
    """Yield the faults of the placeholders in an endpoint.

    `names` are the placeholders in the endpoint's path, and `values` those in its query. `queried`
    are the names of the query's parameters.
    """
    properties, required = declared_in(document)
    for name in dict.fromkeys(names):
        declared = properties.get(name)
        kind = declared.get("type") if isinstance(declared, dict) else None
        if kind not in ("string", "integer", "number", "boolean") or name not in required:
            yield (
                f"endpoint: {{{name}}} needs a required parameter of that name, of the type "
                "string, integer, number or boolean"
            )
    for name in dict.fromkeys(values):
        if name not in properties:
            yield f"endpoint: {{{name}}} needs a parameter of that name"
    for name in sorted(queried & properties.keys() - {*names, *values}):
        yield f"endpoint: the query has {name[:60]!a} already, which is a parameter too"


def url_faults(url: str) -> Iterator[str]:
    """Yield every fault of a URL to which the engine is to send requests."""
    if len(url) > MAX_URL:
        yield f"endpoint: longer than {MAX_URL} characters"
        return
    if not _URL_TEXT.fullmatch(url) or _BAD_ESCAPE.search(url):
        yield (
            "endpoint: holds what a URL cannot (spaces, control characters, braces, a backslash, "
            "'#', letters beyond ASCII); write them as %XX, or leave them out"
        )
        return
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        yield "endpoint: not a URL"
        return
    if parts.scheme not in ("https", "http") or not url.startswith(f"{parts.scheme}://"):
        yield "endpoint: must be an absolute URL that begins with https:// or http://"
        return
    if "@" in parts.netloc:
        yield "endpoint: a URL with a user name or password is not accepted; use a header"
        return
    pattern = _IPV6 if parts.netloc.startswith("[") else _HOST_NAME
    if not host or not pattern.fullmatch(host) or port == 0:
        yield "endpoint: has no valid host or port"


def _headers_faults(headers: dict[Any, Any]) -> Iterator[str]:
    for name, value in headers.items():
        if isinstance(name, str) and isinstance(value, str):  # else the model reports the fault
            yield from header_faults(name, value)


def header_faults(name: str, value: str) -> Iterator[str]:
    """Yield every fault of a header that a definition sets."""
    shown = f"headers: {name[:60]!a}"
    if not _HEADER_NAME.fullmatch(name):
        yield f"{shown} is not a header's name"
        return
    if name.lower() in _OURS:
        yield f"{shown} belongs to the connection and cannot be set"
    if not is_header_value(value):
        yield (
            f"{shown} has a value with control characters, letters beyond ASCII, space around it, "
            f"or more than {MAX_HEADER_VALUE} characters"
        )
    if "${" in SECRET_REFERENCE.sub("", value):
        yield f"{shown} holds a reference of an unknown form; secrets are ${{secret:NAME}}"
    if _is_literal_credential(name, value):
        yield f"{shown} looks like a credential; {_USE_A_REFERENCE}"


def is_credential_name(name: str) -> bool:
    """Return whether a variable or header with this name probably contains a credential."""
    return _CREDENTIAL_NAME.search(name) is not None


def _is_literal_credential(name: str, value: str) -> bool:
    if SECRET_REFERENCE.search(value):
        return False
    return bool(value and (_CREDENTIAL_NAME.search(name) or _CREDENTIAL_VALUE.match(value)))
