"""The claims of functions and programs about their results and failures, checked.

Host side, between the executors and the guests. Untrusted code can write anything in place of its
result, so a claim is either a valid value of a model here or ignored. It never chooses a class, and
never decides whether a run succeeded.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fumehood.core.call import MAX_COST, ToolResult
from fumehood.core.errors import (
    MAX_RETRY_AFTER_MS,
    ArgumentsRefused,
    EngineError,
    ExecutionError,
    ToolError,
)
from fumehood.core.json_types import JsonObject
from fumehood.protocol import strict_json

MAX_TOKENS = 10**12
MAX_FIELDS = 50

MAX_VALUE_DEPTH = 50
"""Slightly less than an envelope can hold, because the value is nested in its data."""

MAX_EXACT_INTEGER = 2**53 - 1
"""JSON readers disagree about larger integers, so a value that holds one is left out."""


def unfit(*, is_result: bool) -> ExecutionError:
    """The error for data of a tool that an envelope cannot hold."""
    what = "The tool's result" if is_result else "The details of the tool's own error"
    return ExecutionError(
        f"{what} cannot be given as JSON: there is NaN in it, an object of a class, bytes that "
        "are no text, itself, or too many levels. Do not retry; the tool's author must return "
        "plain data."
    )


class Unreadable(Exception):
    """The reply has not the form that this engine's own code gives it."""


class _Claim(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# -- functions -----------------------------------------------------------------------------


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
    """The error that a function chose itself, or None for any other failure."""
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
            case "unfit" | "unfit_details" as kind:
                return unfit(is_result=kind == "unfit")
    except (ValidationError, ValueError):  # a code that belongs to the engine, too
        return None
    return None


def read_raised(claim: JsonObject) -> Raised | None:
    """The function's exception, or None if its process reported something else."""
    try:
        return Raised.model_validate(claim)
    except ValidationError:
        return None


# -- programs ------------------------------------------------------------------------------


class ValueClaim(_Claim):
    """The value of the last expression; `has_value` tells whether there was one."""

    value: Any
    has_value: bool
    value_repr: str | None
    notes: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=5)
    """Notes about figures that are not in the answer."""


class ExceptionClaim(_Claim):
    """The exception that ended the program. The traceback shows only the program's own lines."""

    type: str = Field(min_length=1, max_length=500)
    message: str
    line: int | None = Field(ge=0, le=2**31)
    traceback: str


class FailureClaim(_Claim):
    """The program's account of its failure; `errno` is an `OSError`'s, for the supervisor."""

    kind: Literal["exception", "memory", "policy", "invalid"]
    message: str
    errno: int | None = None
    exception: ExceptionClaim | None = None


NO_VALUE = ValueClaim(value=None, has_value=False, value_repr=None)


def read_value(result: JsonObject | None) -> ValueClaim:
    """The claimed value; `NO_VALUE` if the claim is invalid."""
    try:
        claim = ValueClaim.model_validate(result)
    except ValidationError:
        return NO_VALUE
    if not claim.has_value:
        return NO_VALUE.model_copy(update={"notes": claim.notes})
    return claim if _is_fit(claim.value) else claim.model_copy(update={"value": None})


def read_failure(claimed: JsonObject | None) -> FailureClaim | None:
    """The claimed failure, or None if the claim is invalid."""
    try:
        return FailureClaim.model_validate(claimed)
    except ValidationError:
        return None


def _is_fit(value: Any) -> bool:
    """Whether an envelope can hold the value, and every JSON reader reads it the same way."""
    level = [value]
    for _ in range(MAX_VALUE_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, int) and abs(item) > MAX_EXACT_INTEGER:
                return False
            if isinstance(item, dict):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return _is_json(value)
        level = deeper
    return False


def _is_json(value: Any) -> bool:
    try:
        strict_json.loads(strict_json.dumps(value))
    except (TypeError, ValueError):
        return False
    return True
