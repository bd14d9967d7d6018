"""Tool definitions: one frozen value for each version of a tool, whatever the tool's source.

`@tool` on a function and a JSON document make equal values. The part that models see
(`model_schema`) does not reveal how the tool runs, which is determined by `executor` and
`sandboxed`. `registry/definitions.py` decides whether a definition can be registered.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from enum import StrEnum
from operator import not_
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fumehood.core.arguments import FOR_CLIENTS, ONE_OF
from fumehood.core.errors import faults_of
from fumehood.core.json_types import JsonObject, Written
from fumehood.core.limits import Grade
from fumehood.core.names import NAME_PATTERN as NAME_PATTERN
from fumehood.core.names import TOOL_REFERENCE_PATTERN

MAX_SCHEMA_DEPTH = 32
"""Maximum nesting of JSON values in one schema, and maximum length of a chain of references."""

# *Source*: semver.org, the expression that its FAQ suggests.
SEMVER_PATTERN = (
    r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)"
    r"(?:-((?:0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*)(?:\.(?:0|[1-9][0-9]*|[0-9]*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$"
)
DECISION = "decision"
"""The executor of `external:` tools, which no definition can name."""

NET_EXECUTOR = "net"
"""The executor of programs' network requests, which no definition can name."""

_STREAMS: JsonObject = {
    "stdout": {"type": "string", "description": "What the program printed."},
    "stderr": {"type": "string", "description": "What it wrote to standard error."},
    "exit_code": {"type": ["integer", "null"], "description": "Its exit status."},
}

_FILES: JsonObject = {
    "type": "array",
    "description": "Files of the working directory that the program wrote or changed.",
    "items": {
        "type": "object",
        "required": ["filename", "content_type", "size"],
        "properties": {
            "filename": {"type": "string", "description": "Path in the workspace."},
            "content_type": {"type": "string", "description": "Guessed from the name."},
            "size": {"type": "integer", "description": "Bytes."},
            "content_base64": {"type": "string", "description": "The content."},
            "url": {"type": "string", "description": "Where the content is instead."},
            "expires_at": {"type": "string", "description": "Until when it is there."},
            "not_kept": {"type": "string", "description": "Why it is nowhere."},
        },
    },
}

PAGINATION_OUTPUT: JsonObject = {
    "type": "object",
    "required": ["has_more", "next_cursor", "total_count"],
    "properties": {
        "has_more": {"type": "boolean"},
        "next_cursor": {"type": ["string", "null"]},
        "total_count": {"type": ["integer", "null"]},
    },
}
"""Output schema of the field `pagination` of tools whose results come in pages."""

SESSION_OUTPUT: JsonObject = {
    "type": "object",
    "description": "Of a call in a session: what became of the variables.",
    "required": ["id", "state", "variables_bytes"],
    "properties": {
        "id": {"type": "string", "description": "The session."},
        "state": {
            "enum": ["kept", "rolled_back", "reset", "restarted", "restored", None],
            "description": "Of the variables; null where files alone are kept.",
        },
        "variables_bytes": {"type": ["integer", "null"], "description": "Their memory."},
        "copied_at": {
            "type": "string",
            "description": "With the state `restored`: when the copy of the files was saved.",
        },
    },
}

_ENDED_BY: JsonObject = {"type": "string", "description": "What ended the program."}

CODE_OUTPUT: JsonObject = {
    "type": "object",
    "required": [
        "stdout", "stderr", "exit_code", "value", "value_repr", "files", "images", "ended_by",
    ],
    "properties": {
        **_STREAMS,
        "value": {
            "description": "The value of the last expression; null where JSON cannot hold it.",
        },
        "value_repr": {
            "type": ["string", "null"],
            "description": "The same as the language shows it.",
        },
        "files": _FILES,
        "images": {"type": "array", "description": "Figures that the program made."},
        "ended_by": _ENDED_BY,
        "session": SESSION_OUTPUT,
        "tool_calls": {
            "type": "object",
            "description": "Calls of other tools that the program made: made, failed.",
        },
    },
}  # fmt: skip
"""Output schema of tools with an executor `code:…` except `code:shell`. The executor guarantees
this schema."""


SHELL_OUTPUT: JsonObject = {
    "type": "object",
    "required": ["stdout", "stderr", "exit_code", "files", "ended_by"],
    "properties": {
        **_STREAMS,
        "files": _FILES,
        "ended_by": _ENDED_BY,
        "session": SESSION_OUTPUT,
    },
}
"""Output schema of tools with the executor `code:shell`: a command has no value. The executor
guarantees this schema."""


# -- parameters as a list, a simple alternative to JSON Schema --------------------------------

_BOUNDS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
}


def _finite_number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError("a finite number is needed")
    return value


Bound = Annotated[Any, BeforeValidator(_finite_number)]
"""A finite number, as it was given: an integer is not converted to a float."""


class ToolParameter(BaseModel):
    """One parameter of a tool.

    `min` and `max` bound a number's value, or the length of a string or array. A parameter is
    required unless it has a default or `required` is False.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    type: Literal["string", "integer", "number", "boolean", "array", "object"]
    description: str = Field(min_length=1, max_length=10_000)
    required: bool | None = None
    default: Any = None
    enum: list[Any] | None = Field(default=None, min_length=1)
    min: Bound | None = None
    max: Bound | None = None
    pattern: str | None = None

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> ToolParameter:
        faults = list(self._faults())
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def has_default(self) -> bool:
        """Whether the parameter has a default. The default may be null."""
        return "default" in self.model_fields_set

    @property
    def is_required(self) -> bool:
        """Whether every call must give this parameter."""
        return not self.has_default if self.required is None else self.required

    def json_schema(self) -> JsonObject:
        """Return the JSON Schema for a value of this parameter."""
        schema: JsonObject = {"type": self.type, "description": self.description}
        if self.has_default:
            schema["default"] = self.default
        if self.enum is not None:
            schema["enum"] = list(self.enum)
        if self.pattern is not None:
            schema["pattern"] = self.pattern
        for keyword, bound in zip(_BOUNDS.get(self.type, ()), (self.min, self.max), strict=False):
            if bound is not None:
                schema[keyword] = bound
        return schema

    def _faults(self) -> Iterator[str]:
        if self.required and self.has_default:
            yield "a required parameter has no use for a default"
        if self.pattern is not None and self.type != "string":
            yield f"a pattern does not fit the type {self.type}"
        if self.type not in _BOUNDS and not (self.min is None and self.max is None):
            yield f"min and max do not fit the type {self.type}"


def parameter_list_schema(listed: Sequence[Any]) -> tuple[JsonObject, list[str]]:
    """Convert a list of parameters to a JSON Schema of a call's arguments. Return the schema, and
    every fault in the list.

    Each element of the list is a `ToolParameter`, or a dictionary with the fields of a
    `ToolParameter`. Invalid elements are left out of the schema.
    """
    properties: JsonObject = {}
    required: list[str] = []
    faults: list[str] = []
    for position, item in enumerate(listed):
        try:
            parameter = ToolParameter.model_validate(item)
        except ValidationError as error:
            place = f"parameters.{position}"
            faults += [
                f"{place}.{path}: {said}" if path else f"{place}: {said}"
                for path, said in faults_of(error)
            ]
            continue
        if parameter.name in properties:
            faults.append(f"parameters.{position}: {parameter.name!r} is in the list already")
            continue
        properties[parameter.name] = parameter.json_schema()
        if parameter.is_required:
            required.append(parameter.name)
    schema: JsonObject = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    return schema, faults


# -- definitions -----------------------------------------------------------------------------


class ToolType(StrEnum):
    """What kind of tool it is: built into the engine, code of the operator or of a package
    (`NATIVE`), a call of a REST API, or a tool of an MCP server.
    """

    BUILTIN = "BUILTIN"
    NATIVE = "NATIVE"
    REST = "REST"
    MCP = "MCP"


DEFAULT_EXECUTORS: dict[str, str] = {
    ToolType.NATIVE: "function",
    ToolType.REST: "http",
    ToolType.MCP: "mcp",
}


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OutputTokens(_Value):
    """An estimate of the number of tokens in a tool's result."""

    min: int = Field(ge=0)
    max: int = Field(ge=0)
    typical: int = Field(ge=0)


class EstimatedTokens(_Value):
    """An estimate of the number of tokens in a call's arguments (`input`) and result (`output`)."""

    input: int = Field(ge=0)
    output: OutputTokens


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not a boolean")  # noqa: TRY004  # pydantic's
    return value


Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False), BeforeValidator(_no_bool)]
Megabytes = Annotated[int, Field(gt=0, le=1 << 20), BeforeValidator(_no_bool)]
LeastGrade = Annotated[
    Grade,
    Field(
        strict=False,
        description="The weakest grade of a container in which it may run. It is refused if the "
        "engine's containers are weaker.",
    ),
]
Money = Annotated[Decimal, Field(ge=0, max_digits=18, decimal_places=9), BeforeValidator(_no_bool)]


MAX_HEADER_VALUE = 4096
"""Maximum characters of a header value, and of a secret, because secrets are sent in headers."""

# *Source*: RFC 9110, section 5.5, without obs-text.
_HEADER_VALUE = re.compile(r"([!-~]([ \t!-~]*[!-~])?)?")


def is_header_value(value: str) -> bool:
    """Whether a text may be sent as the value of an HTTP header."""
    return len(value) <= MAX_HEADER_VALUE and _HEADER_VALUE.fullmatch(value) is not None


SECRET_REFERENCE = re.compile(r"\$\{secret:([A-Za-z_][A-Za-z0-9_-]{0,63})\}")
"""A reference to a secret; its group is the name."""

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_-]{0,63})\}")
"""A placeholder that an argument replaces, in an endpoint's path or as a whole header value. Its
group is the argument's name."""

QUERY_PLACE = re.compile(r"(?<==)\{([A-Za-z_][A-Za-z0-9_-]{0,63})\}(?=&|\Z)")
"""A placeholder in an endpoint's query: the whole value of a query parameter."""

CURSOR = "cursor"
"""The name of the cursor parameter of tools whose results come in pages."""

# *Source*: RFC 6901, section 3.
Pointer = Annotated[str, Field(pattern=r"^(/([^~/]|~[01])*)*$", max_length=500)]
"""A JSON Pointer. The empty one refers to the whole document."""


class ResponseMapping(_Value):
    """The parts of a service's JSON answer that become the tool's result.

    With `items`, the result is a list; with `fields`, an object; with both, a list of objects with
    these fields.

    If the list has several pages, `cursor_parameter` names the query parameter that requests a
    page. In addition, exactly one of these fields must say where the parameter's next value comes
    from:

    - `next_cursor` is the place of the value in the answer.
    - `next_url` is the place of a URL in the answer. The URL contains the parameter.
    - `counts` makes the value a number, which begins with `first`. It grows with each page by 1
      (`pages`), or by the number of items in the page (`items`).
    """

    items: Pointer | None = None
    fields: dict[str, Pointer] | None = Field(default=None, min_length=1, max_length=100)
    cursor_parameter: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")
    next_cursor: Pointer | None = None
    next_url: Pointer | None = None
    counts: Literal["pages", "items"] | None = None
    first: int | None = Field(default=None, ge=0, le=1_000_000)
    total_count: Pointer | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ways = [way for way in (self.next_cursor, self.next_url, self.counts) if way is not None]
        if self.items is None and self.fields is None:
            raise ValueError("needs `items`, `fields` or both")
        if self.items is None and (ways or self.cursor_parameter or self.total_count is not None):
            raise ValueError("pages are of `items`, which is missing")
        if len(ways) != (0 if self.cursor_parameter is None else 1):
            raise ValueError(
                "pages need `cursor_parameter` and one of `next_cursor`, `next_url` and `counts`"
            )
        if self.first is not None and self.counts is None:
            raise ValueError("`first` goes with `counts`")
        return self


def _wish(text: str) -> str:
    from fumehood.core.hosts import network_wish  # not at the top: the jail loads this module

    return network_wish(text)


NetworkPatterns = Annotated[
    tuple[Annotated[str, Field(max_length=300), AfterValidator(_wish)], ...],
    Field(
        max_length=100,
        strict=False,
        description="Hosts that programs may reach, such as `api.example.org` or "
        "`*.example.org:443`, and package indexes, such as `@pypi`. The settings of `gateway` "
        "determine which are allowed.",
    ),
]


class ToolDefinition(_Value):
    """One version of a tool. Most fields have a default.

    `parameters` may be given as a list of `ToolParameter`s, which is converted to a JSON Schema.

    If a limit is absent, the wall's default applies, never "no limit". The default of `idempotent`
    is the value of `read_only`. The default of `id` is `name@version`.
    """

    # Identity
    id: str = Field(default="", max_length=200)
    name: str = Field(pattern=NAME_PATTERN)
    version: str = Field(default="1.0.0", pattern=SEMVER_PATTERN, max_length=100)
    type: ToolType = ToolType.NATIVE
    description: str = Field(min_length=1, max_length=10_000)
    parameters: Annotated[JsonObject, Written(JsonObject | Sequence[object])] = Field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    output_schema: JsonObject | None = None
    input_examples: tuple[JsonObject, ...] = ()
    # Metadata, limits and classification
    category: str | None = None
    tags: tuple[str, ...] = ()
    documentation_url: str | None = None
    requires_auth: bool = False
    rate_limit: int | None = Field(default=None, gt=0)
    timeout_seconds: Seconds | None = None
    memory_limit_mb: Megabytes | None = None
    # Omitted if it is absent, so that approvals of earlier versions keep their digest.
    least_grade: LeastGrade | None = Field(default=None, exclude_if=not_)
    sandboxed: bool = True
    dangerous: bool = False
    cost_per_use: Money = Decimal(0)
    read_only: bool = False
    idempotent: bool = False
    # Calling
    strict: bool = False
    cacheable: bool = False
    cache_ttl: int | None = Field(default=None, gt=0)
    cache_key_params: tuple[str, ...] | None = None
    streaming: bool = False
    estimated_tokens: Annotated[int | EstimatedTokens | None, Written(object)] = None
    # Lifecycle
    deprecated: bool = False
    sunset_date: date | None = None
    replacement: str | None = None
    migration_guide: str | None = None
    changelog: tuple[str, ...] = ()
    # REST and retries
    endpoint: str | None = None
    method: str | None = None
    headers: dict[str, str] | None = None
    # Omitted if it is absent, so that approvals of earlier versions keep their digest.
    response: Annotated[ResponseMapping | None, Written(JsonObject | None)] = Field(
        default=None, exclude_if=lambda response: response is None
    )
    timeout: int | None = Field(default=None, gt=0)
    retry_count: int = Field(default=0, ge=0, le=10)
    is_active: bool = True
    # Fallback
    fallback: str | None = Field(default=None, pattern=TOOL_REFERENCE_PATTERN)
    # Execution
    executor: str = Field(default="", min_length=1)
    # Omitted if it is empty, for the same reason as `response`.
    network: NetworkPatterns = Field(default=(), exclude_if=not_)

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        filled = dict(document)
        parameters = filled.get("parameters")
        if isinstance(parameters, list | tuple):
            parameters, faults = parameter_list_schema(parameters)
            if faults:
                raise ValueError("; ".join(faults))
            filled["parameters"] = parameters
        if isinstance(parameters, dict) and "type" not in parameters:
            filled["parameters"] = {"type": "object", **parameters}
        filled.setdefault("idempotent", filled.get("read_only", False))
        kind: Any = filled.get("type", ToolType.NATIVE)
        default_executor = DEFAULT_EXECUTORS.get(kind, "") if isinstance(kind, str) else ""
        filled.setdefault("executor", default_executor)
        if not filled.get("id"):
            filled["id"] = f"{filled.get('name')}@{filled.get('version', '1.0.0')}"
        return filled

    @model_validator(mode="after")
    def _network_is_of_programs(self) -> Self:
        if self.network and not self.executor.startswith("code:"):
            raise ValueError("network is for programs, so for an executor code:…")
        return self

    @property
    def version_key(self) -> tuple[Any, ...]:
        """A key for sorting versions in the order that semver defines: a pre-release comes before
        its release.
        """
        match = re.match(SEMVER_PATTERN, self.version)
        assert match is not None
        major, minor, patch, pre, _ = match.groups()
        parts = tuple(
            (0, int(part), "") if part.isdigit() else (1, 0, part)
            for part in (pre or "").split(".")
        )
        return (int(major), int(minor), int(patch), pre is None, parts)

    def for_models(self) -> ToolDefinition:
        """Return the definition without the optional parameters that are meant only for clients.

        Some executors require exactly one of several parameters (`ONE_OF`). If only one of these is
        left, it becomes required.
        """
        properties, required = (self.parameters.get(key, {}) for key in ("properties", "required"))
        shown = {
            name: said
            for name, said in properties.items()
            if name in required or not (isinstance(said, dict) and said.get(FOR_CLIENTS) is True)
        }
        if len(shown) == len(properties):
            return self
        needed = [name for name in ONE_OF.get(self.executor, ()) if name in shown]
        parameters = {**self.parameters, "properties": shown}
        if len(needed) == 1:
            parameters["required"] = list(dict.fromkeys((*required, *needed)))
        return self.model_copy(update={"parameters": parameters})

    def model_schema(self) -> JsonObject:
        """Return what models see of the definition: the name, the description and the
        parameters.
        """
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.for_models().parameters,
        }


class Severity(StrEnum):
    """How serious a lint finding is. *Source*: the levels of SARIF 2.1.0, section 3.27.10."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(_Value):
    """A lint rule that a tool's definition breaks. `path` is the place in the definition, `message`
    says what is wrong there, and `remedy` says how to correct it.
    """

    rule: str
    severity: Severity
    path: str
    message: str
    remedy: str


# -- reading schemas --------------------------------------------------------------------------

ALTERNATIVES = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")


def parameter_names(schema: JsonObject) -> set[str]:
    """Return the names of all parameters that a valid schema describes or requires.

    Parameters in the schema's alternatives, conditions and references are included.
    """
    names: set[str] = set()
    waiting: list[Any] = [schema]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        names |= {*node.get("properties", ()), *node.get("required", ())}
        for name, others in node.get("dependentRequired", {}).items():
            names |= {name, *others}
        waiting += node.get("dependentSchemas", {}).values()
        waiting += (part for keyword in ALTERNATIVES for part in node.get(keyword, ()))
        waiting += (node.get(keyword) for keyword in _CONDITIONS)
        if isinstance(node.get("$ref"), str):
            waiting.append(target_of(node["$ref"], schema))
    return names


def with_own_root(parameters: JsonObject) -> JsonObject:
    """Return a parameter schema whose root is not a reference. If the root is a reference, its
    target replaces it.
    """
    root = parameters
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(root.get("$ref"), str):
            break
        target = target_of(root["$ref"], parameters)
        beside = {keyword: said for keyword, said in root.items() if keyword != "$ref"}
        root = {**target, **beside} if isinstance(target, dict) else beside
    return root


def target_of(reference: str, root: JsonObject) -> Any:
    """Return the schema to which a reference within `root` points, or True (anything is valid) if
    the reference points to nothing.
    """
    found: Any = root
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        found = found.get(key, True) if isinstance(found, dict) else True
    return found
