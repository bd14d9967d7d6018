"""An incoming call, the result that a tool returns, and the verdicts of result checkers.

Values only. The stages between call and result are in `pipeline/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, Field

from fumehood.core.identity import Principal
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import MIN_INTERPRETER_MB
from fumehood.core.tool import Megabytes, Seconds
from fumehood.core.value import StrictValue

MAX_USE = 10**12
"""The highest cost of one call, and the most tokens that it can report. Beyond it the sixth decimal
place of a cost would be lost."""

MAX_CALLS = 1000
"""Calls of one batch, or of one assistant message."""

MAX_KEY_CHARACTERS = 255
"""Characters of an idempotency key."""

MAX_KEYS = 1000
"""Arguments of one call. Each unknown one becomes a message or a warning."""

MAX_TOOL_CHARACTERS = 256
"""Characters of a tool's name and version in a batch."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]


Packages = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=200)]],
    Field(
        max_length=50,
        description="Packages from the Python index, such as `humanize>=4`, to install for "
        "programs. The setting `packages.allow` determines which packages are allowed.",
    ),
]


NetworkHosts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=300)]],
    Field(
        max_length=100,
        description="Hosts that the program may reach, such as `api.example.org` or "
        "`*.example.org:443`, and package indexes, such as `@pypi`. The settings of `gateway` "
        "determine which are allowed.",
    ),
]


class CallOptions(StrictValue):
    """Options of one call. For an absent limit, that of the tool or of the wall applies."""

    # `fumehood.call_options` adds the options of parts.

    enable_streaming: bool = True
    enable_retry: bool = True
    debug: bool = False
    timeout_seconds: Seconds | None = None
    memory_limit_mb: Megabytes | None = Field(
        default=None, json_schema_extra={"minimum": MIN_INTERPRETER_MB}
    )
    """At least the minimum of the tool's wall."""
    max_length: int | None = Field(default=None, gt=0)
    return_summary: bool = True
    wait_for_approval: bool | float | None = None
    dry_run: bool = False
    session_id: Id | None = None
    agent_id: Id | None = None
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=MAX_KEY_CHARACTERS)
    trace_id: Id | None = None
    cancel_on_disconnect: bool = False
    isolation: Literal["call", "session", "container_per_call"] | None = None
    new_call: bool = False
    packages: Packages | None = None
    network: NetworkHosts | None = None
    preview: bool = False
    """Run it as a trial: a human sees its effect before it is put into the session."""


DECIDING_OPTIONS = (
    "timeout_seconds", "memory_limit_mb", "isolation", "packages", "network", "preview",
)  # fmt: skip
"""Options of the kernel that change what a call does. `agent_id` and `session_id` also do."""

_NO_OPTIONS = CallOptions()


class CallBody(StrictValue):
    """A call's arguments and options."""

    arguments: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"maxProperties": MAX_KEYS}
    )
    options: CallOptions = Field(default_factory=lambda: _NO_OPTIONS)


class BatchOptions(StrictValue):
    """Options of a batch. `timeout_seconds` is the time limit for all its calls together."""

    max_parallel: int = Field(default=8, ge=1, le=32)
    timeout_seconds: Seconds | None = None
    parallel_tool_calls: bool = True


class RawBatch(StrictValue):
    """Many calls at once, each parsed when its turn comes: none can fail another."""

    calls: list[Any] = Field(min_length=1, max_length=MAX_CALLS)
    options: BatchOptions = Field(default_factory=BatchOptions)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """A span, as W3C Trace Context names it. As a text it is the header `traceparent`."""

    trace_id: str
    span_id: str
    flags: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


Need = Literal["program", "trial"]
"""The need of a held action, in the engine's memory only: the program whose request it sends, or
the effect of a trial."""


class Held(Protocol):
    """An action that waits in the engine's memory for a human's yes (`executors.base.HeldAction`).

    It is done once, and not after its program has ended.
    """

    @property
    def needs(self) -> Need: ...

    @property
    def always_asks(self) -> bool:
        """Whether a human must decide even if the policy or a remembered rule allows the call."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One call before anything is known of it: a name that may not exist, raw arguments."""

    tool: str
    arguments: JsonObject
    options: CallOptions
    principal: Principal | None
    call_id: str
    trace_id: str
    context: JsonObject | None = None
    """Additional input of an `external:` tool, such as its working directory."""
    is_fallback: bool = False
    """Whether it replaces a failed call of another tool."""
    parent_id: str | None = None
    """The id of the call whose program makes this call."""
    traceparent: TraceParent | None = None
    """The caller's span that it belongs to."""
    held: Held | None = None
    """What it does instead of running its tool, once a human has said yes."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A result that also reports tokens and cost.

    `tokens_used` are tokens that the tool itself spent (an LLM call inside), `cost` is
    money on top of `cost_per_use`.
    """

    data: Any
    tokens_used: int = 0
    cost: Decimal = field(default_factory=Decimal)

    @classmethod
    def of(cls, returned: Any) -> ToolResult:
        """Wrap a function's return value. Runs no code of the value, which may lie about its
        class."""
        return returned if issubclass(type(returned), cls) else cls(returned)

    def __post_init__(self) -> None:
        """Refuse figures that could not be accounted, inside the tool that made them."""
        if type(self.tokens_used) is not int or not 0 <= self.tokens_used <= MAX_USE:
            raise ValueError(f"tokens_used must be an integer from 0 to {MAX_USE}")
        cost: object = self.cost
        if not isinstance(cost, Decimal) or not cost.is_finite() or not 0 <= cost <= MAX_USE:
            raise ValueError(f"cost must be a Decimal from 0 to {MAX_USE}")


@dataclass(frozen=True, slots=True)
class CheckedResult:
    """A successful result, as its caller will get it, and the call that it answers."""

    tool: str
    arguments: JsonObject
    """Without those that the agent's configuration fixes."""
    data: JsonObject
    principal: str | None
    agent_id: str | None
    session_id: str | None
    trace_id: str


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """A checker's opinion. `correction` says what to do about it, for the caller's model."""

    needs_correction: bool = False
    correction: str | None = None


ResultChecker = Callable[[CheckedResult], Awaitable[ResultCheck | None]]
"""An asynchronous function of the host. It returns None if it does not judge this result."""


@dataclass(frozen=True, slots=True)
class FunctionAddress:
    """Where another process finds a function: `module:name` beneath an import path.

    A function of the main program is `pickled` instead, in base64, with an empty `import_path`.
    `digest` then represents its source in approvals.
    """

    module: str
    name: str
    import_path: str
    pickled: str = ""
    digest: str = ""


HostFunction = Callable[[JsonObject], Coroutine[Any, Any, Any]]
"""An asynchronous function of the host that takes validated arguments as one dictionary."""


M = TypeVar("M", bound=BaseModel)

_set = object.__setattr__


def replaced(model: M, **fields: Any) -> M:
    """A copy with these fields, which must be valid already: as `model_copy`, at half its cost.

    What counts as set is the model's: its maker sets every field that a copy may set.
    *Source*: `BaseModel.model_construct` of pydantic sets the same four attributes.
    """
    copied = object.__new__(type(model))
    _set(copied, "__dict__", {**model.__dict__, **fields})
    _set(copied, "__pydantic_fields_set__", model.__pydantic_fields_set__)
    _set(copied, "__pydantic_extra__", None)
    _set(copied, "__pydantic_private__", None)
    return copied
