"""From a document to a definition, or to the list of everything that is wrong with it.

Host side; every source of tools goes through here. Invariant: a promise whose machinery
does not exist yet is refused, never accepted and ignored. `NOT_ENFORCED` is the one table
of such fields; whoever builds the machinery deletes the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from fumehood.core.call import CallOptions
from fumehood.core.errors import InvalidParams
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MIN_CONTAINER_MB, MIN_INTERPRETER_MB, MIN_JAIL_MB
from fumehood.core.parameters import parameter_list_schema
from fumehood.core.tool import DEFAULT_EXECUTORS, ToolDefinition, ToolType
from fumehood.registry.rest_fields import refers_to_secret, rest_faults
from fumehood.registry.schema_faults import schema_faults

CODE_ARGUMENTS = ("code", "stdin", "files")
SHELL_ARGUMENTS = ("command", "stdin", "files")

PROGRAM_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "expression": ("expression", "precision"),
        "restricted_python": ("code",),
        "code:python": CODE_ARGUMENTS,
        "code:javascript": CODE_ARGUMENTS,
        "code:shell": SHELL_ARGUMENTS,
        "workspace:read": ("path", "offset", "limit", "encoding"),
        "workspace:write": ("path", "content", "content_base64", "mode"),
        "workspace:list": ("path", "recursive", "limit", "cursor"),
        "workspace:delete": ("paths", "recursive"),
    }
)
"""What each executor that runs a program takes, the needed one first; a tool's schema may
narrow these but name no others."""


@dataclass(frozen=True, slots=True)
class NotEnforced:
    """A field that parses but whose promise this version could not keep."""

    is_set: Callable[[Any], bool]
    promise: str


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _over_zero(value: Any) -> bool:
    return isinstance(value, int) and value > 0


NOT_ENFORCED: Mapping[str, Mapping[str, NotEnforced]] = MappingProxyType(
    {
        "definition": {
            "requires_auth": NotEnforced(_given, "credentials for tools"),
            "rate_limit": NotEnforced(_given, "rate limits"),
            "cacheable": NotEnforced(_given, "the result cache"),
            "cache_ttl": NotEnforced(_given, "the result cache"),
            "cache_key_params": NotEnforced(_given, "the result cache"),
            "streaming": NotEnforced(_given, "results that a tool gives in parts"),
            "retry_count": NotEnforced(_over_zero, "retries"),
            "fallback": NotEnforced(_given, "fallback tools"),
            "endpoint": NotEnforced(refers_to_secret, "secrets"),
            "headers": NotEnforced(refers_to_secret, "secrets"),
        },
        "options": {
            "max_length": NotEnforced(_given, "shortened results"),
        },
    }
)

EXECUTORS_HERE = (*PROGRAM_ARGUMENTS, "function")
EXECUTORS_TO_COME = ("http", "mcp")
"""Tools that can be registered and listed; a call is answered with `SANDBOX_UNAVAILABLE`."""


class InvalidDefinition(InvalidParams):
    """A tool's definition is wrong; `details.faults` lists everything that is."""

    def __init__(
        self, name: str, faults: list[str], remedy: str = "", *, message: str | None = None
    ) -> None:
        own = f"the tool {name[:80]!r} cannot be registered: {'; '.join(faults)}"
        super().__init__(
            message or (f"{own}. {remedy}" if remedy else own),
            fields=sorted({fault.split(":", 1)[0] for fault in faults}),
            details={"faults": faults},
        )
        self.name = name
        self.faults = faults
        self.remedy = remedy

    @classmethod
    def of_several(cls, errors: Sequence[InvalidDefinition]) -> InvalidDefinition:
        """One error for several tools: a line for each with its faults, then each remedy once."""
        lines = (
            f"{len(errors)} tools cannot be registered:",
            *(f"  {error.name[:80]!r}: {'; '.join(error.faults)}" for error in errors),
            *dict.fromkeys(error.remedy for error in errors if error.remedy),
        )
        return cls(
            ", ".join(error.name for error in errors),
            [fault for error in errors for fault in error.faults],
            message="\n".join(lines),
        )


def parse_definition(document: JsonObject) -> ToolDefinition:
    """The definition in a document.

    Raises:
        InvalidDefinition: with every fault, not just the first.
    """
    if not isinstance(document, dict):
        raise InvalidDefinition(type(document).__name__, ["definition: not an object"])
    listed = document.get("parameters")
    faults: list[str] = []
    if isinstance(listed, list | tuple):
        schema, faults = parameter_list_schema(listed)
        document = {**document, "parameters": schema}
    try:
        definition = ToolDefinition.model_validate(document)
    except ValidationError as error:
        faults = [*_readable(error), *faults, *_document_faults(document)]
    else:
        # What the model understood ("no" is false), not how it was written, is what counts.
        faults += _document_faults(definition.model_dump())
    if faults:
        raise InvalidDefinition(str(document.get("name", "")), faults)
    return definition


def check_definition(definition: ToolDefinition) -> None:
    """The same checks for a definition that is a value already.

    Raises:
        InvalidDefinition: with every fault.
    """
    parse_definition(definition.model_dump())


def unenforced_options(options: CallOptions) -> list[tuple[str, str]]:
    """The options of a call that this version could not keep, each with its promise."""
    table = NOT_ENFORCED["options"]
    return [
        (name, table[name].promise)
        for name in sorted(options.model_fields_set & table.keys())
        if table[name].is_set(getattr(options, name))
    ]


def _document_faults(document: JsonObject) -> list[str]:
    faults: list[str] = []
    for where in ("parameters", "output_schema"):
        schema = document.get(where)
        if isinstance(schema, dict):
            faults += schema_faults(schema, where)
    parameters = document.get("parameters")
    if isinstance(parameters, dict) and parameters.get("type", "object") != "object":
        faults.append("parameters: the root of the schema must be an object")
    for name, row in NOT_ENFORCED["definition"].items():
        if row.is_set(document.get(name)):
            faults.append(f"{name}: not enforced by this version ({row.promise})")
    return [*faults, *rest_faults(document), *_executor_faults(document)]


def _executor_faults(document: JsonObject) -> list[str]:
    kind = document.get("type", ToolType.NATIVE)
    if not isinstance(kind, str):
        return []  # the model names this fault
    executor = document.get("executor") or DEFAULT_EXECUTORS.get(kind, "function")
    sandboxed = document.get("sandboxed", True)
    if not isinstance(executor, str):
        return []
    faults = []
    if kind in ("REST", "MCP") and executor != {"REST": "http", "MCP": "mcp"}[kind]:
        faults.append(f"executor: a tool of type {kind} cannot run as {executor!r}")
    if kind in ("BUILTIN", "NATIVE") and executor in ("http", "mcp"):
        faults.append(f"executor: {executor!r} does not fit a tool of type {kind}")
    if kind == "BUILTIN" and not document.get("executor"):
        faults.append("executor: a tool of type BUILTIN must say how it runs")
    if executor not in (*EXECUTORS_HERE, *EXECUTORS_TO_COME):
        faults.append(f"executor: {executor!r} is not enforced by this version")
    if executor in PROGRAM_ARGUMENTS:
        faults += _program_faults(document, executor, sandboxed)
    if executor == "function":
        faults += _function_faults(document, sandboxed)
    return faults


def _function_faults(document: JsonObject, sandboxed: Any) -> list[str]:
    memory_mb = document.get("memory_limit_mb")
    if memory_mb is not None and sandboxed is False:
        return ["memory_limit_mb: it could not be enforced on a function in the host"]
    if isinstance(memory_mb, int) and memory_mb < MIN_JAIL_MB:
        return [f"memory_limit_mb: the jail needs at least {MIN_JAIL_MB}"]
    return []


def _program_faults(document: JsonObject, executor: str, sandboxed: Any) -> list[str]:
    faults = []
    needed, *_ = known = PROGRAM_ARGUMENTS[executor]
    where, least_mb = "the interpreter", MIN_INTERPRETER_MB
    if executor.startswith(("code:", "workspace:")):
        where, least_mb = "a container", MIN_CONTAINER_MB
    memory_mb = document.get("memory_limit_mb")
    if isinstance(memory_mb, int) and memory_mb < least_mb:
        faults.append(f"memory_limit_mb: {where} needs at least {least_mb}")
    if sandboxed is False:
        faults.append(f"sandboxed: the executor {executor!r} always runs in its sandbox")
    parameters = document.get("parameters")
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else {}
    if isinstance(properties, dict):
        if needed not in properties and executor != "workspace:list":  # which needs none
            faults.append(f"parameters: the executor {executor!r} needs a parameter {needed!r}")
        faults += [
            f"parameters: the executor {executor!r} knows no parameter {name!r}"
            for name in sorted(properties.keys() - set(known))
        ]
    return faults


def _readable(error: ValidationError) -> list[str]:
    return [
        f"{'.'.join(map(str, fault['loc'])) or 'definition'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)
    ]
