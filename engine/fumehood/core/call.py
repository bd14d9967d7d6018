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
from fumehood.core.limits import MIN_MEMORY_MB
from fumehood.core.tool import Megabytes, Seconds
from fumehood.core.value import StrictValue

MAX_USE = 10**12
"""The highest cost of one call, and the highest number of tokens that it can report. A higher cost
would lose its sixth decimal place."""

MAX_KEY_CHARACTERS = 255
"""Maximum characters of an idempotency key."""

MAX_KEYS = 1000
"""Maximum number of arguments of one call. Each unknown argument causes a message or a warning."""

MAX_TOOL_CHARACTERS = 256
"""Maximum characters of a tool's name and version in a batch."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]
PrincipalId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$")]


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
    """Options of one call. An absent limit means the limit of the tool or of the wall."""

    # `fumehood.call_options` adds the options of parts.

    enable_retry: bool = True
    debug: bool = False
    timeout_seconds: Seconds | None = None
    memory_limit_mb: Megabytes | None = Field(
        default=None, json_schema_extra={"minimum": MIN_MEMORY_MB}
    )
    """The memory limit of the call. It must be at least the smallest limit of the tool's wall."""
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
    network: NetworkHosts | None = None


DECIDING_OPTIONS = (
    "timeout_seconds", "memory_limit_mb", "isolation", "network",
)  # fmt: skip
"""The call options that change what a call does, without the options that parts add. `agent_id` and
`session_id` also change what a call does."""

_NO_OPTIONS = CallOptions()


class CallBody(StrictValue):
    """A call's arguments and options."""

    arguments: dict[str, Any] = Field(
        default_factory=dict, json_schema_extra={"maxProperties": MAX_KEYS}
    )
    options: CallOptions = Field(default_factory=lambda: _NO_OPTIONS)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """One span of a trace, as in W3C Trace Context. `str` returns the value of the header
    `traceparent`.
    """

    trace_id: str
    span_id: str
    flags: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


Need = Literal["program", "trial"]
"""What a held action depends on. `program` is the running program whose request the action sends,
and `trial` is the effect of a trial. Both exist only in the engine's memory."""


class Held(Protocol):
    """An action that waits in the engine's memory for a human's approval.

    The implementation is `executors.base.HeldAction`. The action is carried out at most once, and
    never after the program to which it belongs has ended.
    """

    @property
    def needs(self) -> Need: ...

    @property
    def always_asks(self) -> bool:
        """Whether a human must decide on the action even if the policy or a remembered rule allows
        the call.
        """


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One call before any check: its tool may not exist, and its arguments may be invalid."""

    tool: str
    arguments: JsonObject
    options: CallOptions
    principal: Principal | None
    call_id: str
    trace_id: str
    context: JsonObject | None = None
    """Additional input of an `external:` tool, such as its working directory."""
    is_fallback: bool = False
    """Whether this call is the fallback for a failed call of another tool."""
    parent_id: str | None = None
    """The id of the call whose program makes this call, or None."""
    traceparent: TraceParent | None = None
    """The caller's span to which this call belongs."""
    held: Held | None = None
    """The action that the call does after approval instead of running its tool, or None."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result with the tokens and the money that the tool spent.

    `tokens_used` are tokens that the tool itself spent, for example by calling an LLM. `cost` is
    charged in addition to the tool's `cost_per_use`.
    """

    data: Any
    tokens_used: int = 0
    cost: Decimal = field(default_factory=Decimal)

    @classmethod
    def of(cls, returned: Any) -> ToolResult:
        """Return a function's return value as a `ToolResult`. A `ToolResult` is returned unchanged.

        The value is untrusted and may misreport its class, so this method runs no code of the
        value.
        """
        return returned if issubclass(type(returned), cls) else cls(returned)

    def __post_init__(self) -> None:
        """Raise ValueError if the tokens or the cost are invalid or out of range."""
        # Checked here, so that the error is raised inside the tool that creates the result.
        if type(self.tokens_used) is not int or not 0 <= self.tokens_used <= MAX_USE:
            raise ValueError(f"tokens_used must be an integer from 0 to {MAX_USE}")
        cost: object = self.cost
        if not isinstance(cost, Decimal) or not cost.is_finite() or not 0 <= cost <= MAX_USE:
            raise ValueError(f"cost must be a Decimal from 0 to {MAX_USE}")


@dataclass(frozen=True, slots=True)
class CheckedResult:
    """A successful result in the form in which the caller gets it. It also names the call's tool,
    arguments, principal, agent, session and trace. An operator's result checker receives this
    object.
    """

    tool: str
    arguments: JsonObject
    """The call's arguments, except for arguments that the agent's configuration fixes."""
    data: JsonObject
    principal: str | None
    agent_id: str | None
    session_id: str | None
    trace_id: str


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """A checker's verdict on a result. `correction` advises the caller's model what to do about the
    result.
    """

    needs_correction: bool = False
    correction: str | None = None


ResultChecker = Callable[[CheckedResult], Awaitable[ResultCheck | None]]
"""An asynchronous function of the host that checks a result. It returns None if it has no
verdict."""


@dataclass(frozen=True, slots=True)
class FunctionAddress:
    """How another process finds a function: by `module`, `name` and `import_path`.

    A function of the main program cannot be imported. It has an empty `import_path`, and `pickled`
    contains the function itself, in base64. An approval of such a function applies to `digest`
    instead of the function's source.
    """

    module: str
    name: str
    import_path: str
    pickled: str = ""
    digest: str = ""


HostFunction = Callable[[JsonObject], Coroutine[Any, Any, Any]]
"""An asynchronous function of the host that takes the validated arguments as one dictionary."""


M = TypeVar("M", bound=BaseModel)

_set = object.__setattr__


def replaced(model: M, **fields: Any) -> M:
    """Return a copy of `model` with new values of some fields. The keyword arguments are the new
    values.

    The values are not validated. The caller must give only fields that are explicitly set in
    `model`, because the copy has the same set of explicitly set fields.
    """
    # This takes half the time of `model_copy`. *Source*: `BaseModel.model_construct` of pydantic
    # sets the same four attributes.
    copied = object.__new__(type(model))
    _set(copied, "__dict__", {**model.__dict__, **fields})
    _set(copied, "__pydantic_fields_set__", model.__pydantic_fields_set__)
    _set(copied, "__pydantic_extra__", None)
    _set(copied, "__pydantic_private__", None)
    return copied
