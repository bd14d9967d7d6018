"""Values of the provider formats: losses, exports, requests and answers of `/v1/tool_calls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fumehood.batches.model import MAX_CALLS
from fumehood.call_options import CallOptions
from fumehood.core.envelope import Envelope
from fumehood.core.errors import RequiresHumanApproval
from fumehood.core.json_types import JsonObject
from fumehood.core.value import Value

FormatName = Literal["openai", "openai-responses", "anthropic", "gemini", "mcp"]
MessageFormat = Literal["openai", "openai-responses", "anthropic", "gemini"]

MODEL_TEXT_CHARACTERS = 2000
"""Maximum number of characters of one result in a message for the model, unless the option
`max_length` is set. A longer result is shortened."""


class Loss(Value):
    """An aspect of a tool that a format cannot express. `where` is its place in the tool's
    definition, `what` says what is lost, and `change` what the tool's author can change.
    """

    tool: str
    where: str
    what: str
    change: str


class ExportedTools(Value):
    """Tools in the format of one model provider, and what the format cannot express."""

    format: FormatName
    tools: tuple[JsonObject, ...]
    losses: tuple[Loss, ...]


class HandleOptions(CallOptions):
    """Options for all calls of a message: call options, and how the calls are parsed and run."""

    idempotency_key: str | None = Field(default=None, json_schema_extra={"type": "null"})
    """Always None, because a key belongs to a single call and these options apply to several."""
    max_parallel: int = Field(default=8, ge=1, le=32)
    parallel_tool_calls: bool = True
    repair_arguments: bool = False
    tools: list[str] | None = Field(default=None, max_length=MAX_CALLS)
    """Names of the tools that may be called. None allows every tool."""

    @model_validator(mode="after")
    def _is_for_all(self) -> Self:
        if self.idempotency_key is not None:
            raise ValueError("idempotency_key belongs to one call, and these are several")
        return self


_ANY_OBJECT: dict[str, JsonValue] = {"type": "object", "additionalProperties": True}


class HandleBody(Value):
    """The body of `POST /v1/tool_calls`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: MessageFormat
    message: Any = Field(
        description="An object or, for `openai-responses`, also a list of objects.",
        json_schema_extra={"anyOf": [_ANY_OBJECT, {"type": "array", "items": _ANY_OBJECT}]},
    )
    options: HandleOptions = Field(default_factory=HandleOptions)


class HandledCalls(Value):
    """The result messages for the model, and the calls' envelopes in the order of the calls."""

    messages: tuple[JsonObject, ...]
    envelopes: tuple[Envelope, ...]


class AgentRun(Value):
    """The state in which an agent's run ended. It can be stored as JSON and continued.

    `messages` is the whole conversation so far, in the provider's format. If calls wait for
    approval, its last messages report this to the model. `envelopes` are the envelopes of the last
    turn's calls.
    """

    format: MessageFormat
    messages: tuple[JsonObject, ...]
    ended_by: Literal["answer", "max_turns", "approval"]
    turns: int
    envelopes: tuple[Envelope, ...] = ()
    last_turn: int = 0
    """Index in `messages` at which the model's last turn begins."""

    @property
    def waiting(self) -> tuple[Envelope, ...]:
        """The envelopes of the calls that wait for approval."""
        return tuple(filter(waits, self.envelopes))


def waits(envelope: Envelope) -> bool:
    """Return True if the envelope reports that its call waits for approval."""
    error = envelope.error
    return (
        error is not None
        and error.code == RequiresHumanApproval.code
        and error.approval_id is not None
    )


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One tool call in an assistant's message, as the model wrote it.

    `arguments` is an object or the JSON text of an object, unless the model wrote something
    malformed. `id` is None if the provider does not identify calls by ids. It is "" if the provider
    requires an id, and the call has none.
    """

    id: str | None
    name: str
    arguments: Any
