"""Validation of claims, which are the reports of untrusted code about its results and failures.

Host side, between the executors and the guests. Untrusted code can write anything in place of its
result. Therefore, a claim is ignored if it does not match a model in this module. A claim never
selects a Python class by name, and never determines whether a run succeeded.
"""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from fumehood.core.call import ToolResult
from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    MAX_RETRY_AFTER_MS,
    ArgumentsRefused,
    EngineError,
    ExecutionError,
    ToolError,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.value import StrictValue
from fumehood.protocol import strict_json
from fumehood.protocol.framing import whole_words


def unfit(*, is_result: bool) -> ExecutionError:
    """Return the error for data of a tool that JSON cannot represent.

    If `is_result` is True, the data is the tool's result. Otherwise, it is the details of a
    `ToolError`.
    """
    what = "The tool's result" if is_result else "The details of the tool's own error"
    return ExecutionError(
        f"{what} cannot be represented in JSON. It may contain NaN, instances of other classes, "
        "bytes that are not UTF-8, a reference to itself, or too many levels. Do not retry; the "
        "tool's author must return plain data."
    )


class Unreadable(Exception):
    """The process that runs a function sent an invalid reply. Only the engine's own code writes
    these replies.
    """


class Claim(StrictValue):
    """Base class for reports from guests. They are validated strictly."""


M = TypeVar("M", bound=Claim)


def read_claim(model: type[M], claim: JsonObject | None) -> M | None:
    """Parse a claim as `model`. Return None if the claim is None or invalid."""
    try:
        return model.model_validate(claim)
    except ValidationError:
        return None


# -- functions -----------------------------------------------------------------------------


class _Result(Claim):
    data: Any
    tokens_used: int
    cost: Annotated[str, Field(max_length=60, pattern=r"^[0-9.eE+-]+$")]


class _ToolError(Claim):
    kind: Literal["tool_error"]
    code: str = Field(max_length=64)
    message: str
    details: dict[str, Any] | None
    retryable: bool
    retry_after_ms: int | None = Field(ge=0, le=MAX_RETRY_AFTER_MS)


class _ArgumentsRefused(Claim):
    kind: Literal["arguments"]
    message: str
    fields: list[str]


class Raised(Claim):
    """An exception that a function raised. The traceback contains only frames of the function's own
    package.
    """

    kind: Literal["exception"]
    type: str = Field(max_length=100)
    message: str
    traceback: list[Annotated[str, Field(max_length=200)]] = Field(max_length=20)


def read_result(result: JsonObject | None) -> ToolResult:
    """Parse a function's result.

    Raises:
        Unreadable: the result has the wrong form, or an invalid cost or token count.
    """
    try:
        claim = _Result.model_validate(result)
        return ToolResult(claim.data, claim.tokens_used, Decimal(claim.cost))
    except (ValidationError, ArithmeticError, ValueError):
        raise Unreadable("the reply of a function's process is invalid") from None


def read_error(claim: JsonObject) -> EngineError | None:
    """Return the error that a claim describes, or None if the claim is invalid or describes
    something else.

    The error is a `ToolError` of the tool, a refusal of the arguments by the tool, or an error
    about data that JSON cannot represent.
    """
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
                message = whole_words(refused.message, MAX_MESSAGE_CHARACTERS)
                return ArgumentsRefused(message, fields=refused.fields)
            case "unfit" | "unfit_details" as kind:
                return unfit(is_result=kind == "unfit")
    except (ValidationError, ValueError):  # ValueError: the code is reserved for the engine
        return None
    return None


# -- programs ------------------------------------------------------------------------------


class ValueClaim(Claim):
    """The value of a program's last expression. `has_value` is False if the program has no such
    value.
    """

    value: Any
    has_value: bool
    value_repr: str | None
    notes: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=5)
    """Notes about Matplotlib figures that could not be included in the answer."""


class ExceptionClaim(Claim):
    """The exception that ended a program. The traceback contains only the program's own lines."""

    type: str = Field(min_length=1, max_length=500)
    message: str
    line: int | None = Field(ge=0, le=2**31)
    traceback: str


class FailureClaim(Claim):
    """A program's report of its own failure. If the failure was an `OSError`, `errno` is its error
    number. Only the supervisor uses `errno`.
    """

    kind: Literal["exception", "memory", "policy", "invalid"]
    message: str
    errno: int | None = None
    exception: ExceptionClaim | None = None


NO_VALUE = ValueClaim(value=None, has_value=False, value_repr=None)


def read_value(result: JsonObject | None) -> ValueClaim:
    """Parse the value that a program claims. Return `NO_VALUE` if the claim is invalid."""
    claim = read_claim(ValueClaim, result) or NO_VALUE
    if not claim.has_value:
        return NO_VALUE.model_copy(update={"notes": claim.notes})
    try:
        strict_json.exact(claim.value, sys.maxsize)  # the frame's size was limited
    except strict_json.Inexact:
        return claim.model_copy(update={"value": None})
    return claim
