"""What a function's process says of its result or failure, made into values of the model.

Host side, between the executors and `inside` on the other end. Everything here is a
stranger's word: it is validated whole or not believed at all, and never chooses a class.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fumehood.core.call import MAX_COST, ToolResult
from fumehood.core.errors import ArgumentsRefused, EngineError, ExecutionError, ToolError
from fumehood.core.json_types import JsonObject

MAX_TOKENS = 10**12
MAX_FIELDS = 50
MAX_RETRY_AFTER_MS = 24 * 3600 * 1000


class Unreadable(Exception):
    """The reply has not the form that this engine's own code gives it."""


class _Claim(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Result(_Claim):
    data: Any
    tokens_used: int = Field(ge=0, le=MAX_TOKENS)
    cost: Annotated[str, Field(max_length=60, pattern=r"^[0-9.eE+-]+$")]


class _ToolError(_Claim):
    kind: Literal["tool_error"]
    code: str = Field(max_length=64)
    message: str
    details: dict[str, Any] | None
    retryable: bool
    retry_after_ms: int | None = Field(ge=0, le=MAX_RETRY_AFTER_MS)


class _ArgumentsRefused(_Claim):
    kind: Literal["arguments"]
    message: str
    fields: list[str] = Field(max_length=MAX_FIELDS)


class Raised(_Claim):
    """An exception of the function: kind, words, and the way through its own modules."""

    kind: Literal["exception"]
    type: str = Field(max_length=100)
    message: str
    traceback: list[Annotated[str, Field(max_length=200)]] = Field(max_length=20)


def read_result(result: JsonObject | None) -> ToolResult:
    """The function's result.

    Raises:
        Unreadable: it has another form, or figures that could not be accounted.
    """
    try:
        claim = _Result.model_validate(result)
        cost = Decimal(claim.cost)
        if not 0 <= cost <= MAX_COST:
            raise ValueError
        return ToolResult(claim.data, claim.tokens_used, cost)
    except (ValidationError, ArithmeticError, ValueError):
        raise Unreadable("the reply of a function's process has no known form") from None


def read_error(claim: JsonObject) -> EngineError | None:
    """The error that a function may choose; None where it is a failure like any other."""
    try:
        match claim.get("kind"):
            case "tool_error":
                refusal = _ToolError.model_validate(claim)
                return ToolError(
                    refusal.code,
                    refusal.message,
                    retryable=refusal.retryable,
                    retry_after_ms=refusal.retry_after_ms,
                    details=refusal.details,
                )
            case "arguments":
                refused = _ArgumentsRefused.model_validate(claim)
                return ArgumentsRefused(refused.message[:2000], fields=refused.fields)
            case "unfit":
                return ExecutionError(
                    "The tool returned something that JSON cannot hold, or holds too deeply. Do "
                    "not retry; its author must return plain data."
                )
    except (ValidationError, ValueError):  # a code that belongs to the engine, too
        return None
    return None


def read_raised(claim: JsonObject) -> Raised | None:
    """An exception of the function; None where its process said something else."""
    try:
        return Raised.model_validate(claim)
    except ValidationError:
        return None
