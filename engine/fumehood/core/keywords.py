"""The keyword arguments of the public methods, for type checkers and for a check of their names.

Each stands for a model whose fields bear the same names; a test compares them. Their values are
checked by the engine, as those of a request that came by a socket.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from fumehood.core.json_types import JsonObject
from fumehood.core.names import nearest

Class = TypeVar("Class", bound=type)


class CallKeywords(TypedDict, total=False):
    """Of `CallOptions`. Absent limits are the tool's or the wall's."""

    enable_cache: bool
    enable_streaming: bool
    enable_retry: bool
    debug: bool
    timeout_seconds: float | None
    memory_limit_mb: int | None
    max_length: int | None
    return_summary: bool
    wait_for_approval: bool | float | None
    dry_run: bool
    session_id: str | None
    agent_id: str | None
    idempotency_key: str | None
    trace_id: str | None
    cancel_on_disconnect: bool
    isolation: Literal["call", "session", "container_per_call"] | None
    new_call: bool


class DecisionKeywords(TypedDict, total=False):
    """Of `DecisionOptions`."""

    wait_for_approval: bool | float | None
    session_id: str | None
    agent_id: str | None
    trace_id: str | None
    new_call: bool


class HandleKeywords(CallKeywords, total=False):
    """Of `HandleOptions`."""

    max_parallel: int
    parallel_tool_calls: bool
    repair_arguments: bool
    tools: list[str] | None


class BatchKeywords(TypedDict, total=False):
    """Of `BatchOptions`."""

    max_parallel: int
    timeout_seconds: float | None
    parallel_tool_calls: bool


class CallQueryKeywords(TypedDict, total=False):
    """Of `CallQuery`."""

    since: datetime | str | None
    until: datetime | str | None
    agent: str | None
    tool: str | None
    code: str | None
    limit: int
    cursor: str | None


class AllCallsKeywords(CallQueryKeywords, total=False):
    """Of `AllCallsQuery`."""

    principal: str | None
    session: str | None
    trace: str | None
    parent: str | None


class ToolFilterKeywords(TypedDict, total=False):
    """Filters of a list of tools."""

    category: str
    tag: str
    type: str


class ToolPageKeywords(ToolFilterKeywords, total=False):
    """The same for one page of it."""

    limit: int
    cursor: str | None


class UsageKeywords(TypedDict, total=False):
    """Of `UsageQuery`, but `by`."""

    since: datetime | str | None
    until: datetime | str | None
    agent: str | None
    session: str | None
    tool: str | None


class AllUsageKeywords(UsageKeywords, total=False):
    """Of `AllUsageQuery`, but `by`."""

    principal: str | None


class ApprovalQueryKeywords(TypedDict, total=False):
    """Of `ApprovalQuery`."""

    state: str | None
    tool: str | None
    agent: str | None
    call_id: str | None
    limit: int
    cursor: str | None


class ToolKeywords(TypedDict, total=False):
    """Of `ToolDefinition`. Lists are written as such, money and dates as text too."""

    id: str
    name: str
    version: str
    type: str
    description: str
    parameters: JsonObject | Sequence[object]
    output_schema: JsonObject | None
    input_examples: Sequence[JsonObject]
    category: str | None
    tags: Sequence[str]
    documentation_url: str | None
    requires_auth: bool
    rate_limit: int | None
    timeout_seconds: float | None
    memory_limit_mb: int | None
    sandboxed: bool
    dangerous: bool
    cost_per_use: Decimal | float | str
    read_only: bool
    idempotent: bool
    strict: bool
    cacheable: bool
    cache_ttl: int | None
    cache_key_params: Sequence[str] | None
    streaming: bool
    estimated_tokens: object
    deprecated: bool
    sunset_date: date | str | None
    replacement: str | None
    migration_guide: str | None
    changelog: Sequence[str]
    endpoint: str | None
    method: str | None
    headers: dict[str, str] | None
    response: JsonObject | None
    timeout: int | None
    retry_count: int
    is_active: bool
    fallback: str | None
    executor: str


def checked(kind: type, method: str, given: Mapping[str, object]) -> JsonObject:
    """The keyword arguments of a method.

    Raises:
        TypeError: a name that is none of `kind`.
    """
    known: dict[str, object] = kind.__annotations__
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return dict(given)
    near = nearest(unknown, known)
    cure = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(sorted(known))}."
    raise TypeError(f"{method}() has no keyword argument {unknown!r}. {cure}")


class _Absent:
    """Stands in a signature for the default of a keyword, which is the model's."""

    def __repr__(self) -> str:
        return "..."


_ABSENT = _Absent()


def show_keywords(cls: Class) -> Class:
    """Have `inspect.signature`, and so editors and notebooks, name the keywords of the methods
    that take `**name: Unpack[…]`, as type checkers do.
    """
    for method in vars(cls).values():
        if inspect.isfunction(method) and method.__code__.co_flags & inspect.CO_VARKEYWORDS:
            signature: Any = inspect.signature(method)
            *others, rest = signature.parameters.values()
            (kind,) = get_args(get_type_hints(method)[rest.name])
            named = (
                rest.replace(
                    name=name, kind=rest.KEYWORD_ONLY, default=_ABSENT, annotation=annotation
                )
                for name, annotation in get_type_hints(kind).items()
            )
            vars(method)["__signature__"] = signature.replace(parameters=[*others, *named])
    return cls
