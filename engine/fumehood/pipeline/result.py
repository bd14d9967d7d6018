"""Shape: from what a tool gave to what an envelope may carry.

Eighth stage. Data becomes a JSON object within its size and, where the tool promised one,
of its output schema; an error becomes `ErrorInfo`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticSerializationError, to_jsonable_python

from fumehood.core.envelope import ErrorInfo
from fumehood.core.errors import (
    EndedBy,
    EngineError,
    ExecutionError,
    OutputLimitExceeded,
    ToolError,
    code_of,
)
from fumehood.core.json_types import JsonObject
from fumehood.executors.outcome import Outcome
from fumehood.protocol import strict_json
from fumehood.registry.index import RegisteredTool
from fumehood.registry.json_schema import TooCostly

MAX_MESSAGE_CHARACTERS = 2000
MAX_DATA_DEPTH = 60
"""A little under what a reader accepts: data stands inside the envelope."""
MAX_DETAILS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ShapedOutcome:
    """An outcome whose data an envelope can carry; `text` is that data as JSON.

    `details` are the error's, where they are shown otherwise than they are.
    """

    outcome: Outcome
    data: JsonObject
    text: str
    details: JsonObject | None = None


def shape(outcome: Outcome, tool: RegisteredTool, max_bytes: int) -> ShapedOutcome:
    """Make the data fit, or turn the outcome into the error that says why it does not."""
    max_bytes = outcome.max_data_bytes or max_bytes
    if isinstance(outcome.error, ToolError):
        outcome = replace(outcome, error=_shape_tool_error(outcome.error))
    if outcome.error is not None:
        return ShapedOutcome(outcome, {}, "")
    try:
        data, encoded = _as_json_object(outcome.data)
        if len(encoded) > max_bytes:
            raise OutputLimitExceeded(
                f"The result has {len(encoded)} bytes, {max_bytes} are allowed. Ask for less."
            )
        if not outcome.is_rehearsal:  # whose data is not the tool's
            _check_promise(data, tool)
    except EngineError as error:
        ended_by = EndedBy.OUTPUT if isinstance(error, OutputLimitExceeded) else EndedBy.EXCEPTION
        failed = replace(outcome, data=None, error=error, ended_by=ended_by)
        return ShapedOutcome(failed, {}, "")
    if outcome.output_bytes is None:
        outcome = replace(outcome, output_bytes=len(encoded))
    return ShapedOutcome(outcome, data, encoded.decode())


def shape_error(error: EngineError, details: JsonObject | None = None) -> ErrorInfo:
    """The error as the envelope shows it; optional keys only where they say something.

    `details` stand in place of the error's own.
    """
    return ErrorInfo(
        code=code_of(error),
        message=error.message,
        retryable=error.may_retry,
        human_review=type(error).human_review,
        fields=error.fields or None,
        retry_after_ms=error.retry_after_ms,
        details=error.details if details is None else details,
        **{key: value for key, value in error.extra.items() if value is not None},
    )


def _shape_tool_error(error: ToolError) -> EngineError:
    """A tool's own error, with a message and details that an envelope can carry."""
    message = str(error.message).encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARACTERS]
    try:
        details, encoded = _as_json_object(error.details if error.details is not None else {})
    except ExecutionError as unfit:
        return unfit
    if len(encoded) > MAX_DETAILS_BYTES:
        return OutputLimitExceeded(
            f"The tool's error details have {len(encoded)} bytes, {MAX_DETAILS_BYTES} are allowed."
        )
    return ToolError(
        error.tool_code,
        message,
        retryable=error.may_retry,
        retry_after_ms=error.retry_after_ms,
        details=details or None,
    )


def _as_json_object(value: Any) -> tuple[JsonObject, bytes]:
    """`data` is always an object: a plain value stands under `value`.

    Raises:
        ExecutionError: JSON cannot hold the value.
    """
    try:
        # Tools return whatever Python has (models, dates, decimals); guests sent JSON.
        plain = to_jsonable_python(value)
        data = plain if isinstance(plain, dict) else {"value": plain}
        encoded = strict_json.dumps(data)
        # An escaped surrogate: a pair is a character, a lone one is not. And without that
        # many brackets the data cannot be nested too deeply to be read again.
        if b"\\ud" in encoded or encoded.count(b"[") + encoded.count(b"{") > MAX_DATA_DEPTH:
            strict_json.loads(encoded, max_depth=MAX_DATA_DEPTH)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError):
        raise ExecutionError(
            "The tool returned something that JSON cannot hold. Do not retry; its author "
            "must return plain data."
        ) from None
    return data, encoded


def _check_promise(data: JsonObject, tool: RegisteredTool) -> None:
    if tool.output is None:
        return
    try:
        violations = tool.output.violations(data)
    except TooCostly:
        violations = []
        raise ExecutionError("The tool's result is too large to check.") from None
    if violations:
        paths = ", ".join(violation.path or "data" for violation in violations[:5])
        raise ExecutionError(
            f"The tool's result does not have the form that it promised ({paths}). Do not retry."
        )
