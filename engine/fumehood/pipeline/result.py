"""Result: turn an outcome into the data, the error and the usage of an envelope.

Eighth stage, in three steps. `shape` turns the data into a JSON object that keeps its size limit
and its output schema, or into an error. `shorten` cuts long texts in `data` and `error.details` to
head and tail, and stores each whole text as a blob of the caller (mission E6); contents of files do
not count as texts (E7). `account` computes tokens and cost from measurements, in decimal
arithmetic; `budgets/ledger` adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import anyio
from pydantic_core import to_jsonable_python

from fumehood.core.envelope import ErrorInfo, UsageReport
from fumehood.core.errors import (
    MAX_MESSAGE_CHARACTERS,
    EndedBy,
    EngineError,
    ExecutionError,
    OutputLimitExceeded,
    ToolError,
    code_of,
)
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Limits
from fumehood.core.long_text import INLINE_BYTES, ends_of, head_and_tail
from fumehood.core.returned_file import FILE_CONTENT, without_contents
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage import Prices, TextKind, TokenCounter, money
from fumehood.executors.claims import unfit
from fumehood.executors.outcome import CutText, Outcome
from fumehood.observe.clock import timestamp
from fumehood.protocol import strict_json
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool
from fumehood.registry.json_schema import TooCostly
from fumehood.storage.blobs import BlobStore, NotKept

MAX_DATA_DEPTH = 60
"""Maximum nesting of data. It is slightly less than strict readers accept, because data is nested
in the envelope."""

MAX_DETAILS_BYTES = 64 * 1024
"""Maximum size of a tool's error details as JSON, in bytes."""

NAME_CHARACTERS = 64
"""Texts up to this many characters are never shortened by `max_length`: they are names and
codes."""

PLAIN_TEXT = "text/plain; charset=utf-8"

MAX_FIELDS = 200
"""Maximum number of texts of one answer that are stored as blobs. Further ones are only
shortened."""

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value in JSON."""


@dataclass(frozen=True, slots=True)
class ShapedOutcome:
    """An outcome whose data fits an envelope. `text` is the data as JSON.

    `details` are the error's details if they were shortened, otherwise None.
    """

    outcome: Outcome
    data: JsonObject
    text: str
    details: JsonObject | None = None


def shape(
    outcome: Outcome, tool: RegisteredTool, max_bytes: int, redactor: Redactor
) -> ShapedOutcome:
    """Redact the data or the error of an outcome, and check the data.

    If the data is not JSON, is larger than `max_bytes` or does not match the tool's output schema,
    the outcome becomes an error.
    """
    max_bytes = outcome.max_data_bytes or max_bytes
    if isinstance(outcome.error, ToolError):
        # Redact before the message is cut: a key that was cut in half would not be found.
        outcome.error.message, redacted = redactor.text(str(outcome.error.message))
        outcome = replace(
            outcome,
            error=_shape_tool_error(outcome.error),
            redacted=outcome.redacted + redacted,
        )
    if outcome.error is not None:
        redacted = redact_error(outcome.error, redactor)
        if redacted:
            outcome = replace(outcome, redacted=outcome.redacted + redacted)
        return ShapedOutcome(outcome, {}, "")
    try:
        data, encoded = _as_json_object(outcome.data, is_result=True)
        if redactor.may_match(encoded):
            data, redacted = redactor.value(data)
            encoded = strict_json.dumps(data) if redacted else encoded
            outcome = replace(outcome, redacted=outcome.redacted + redacted)
        if len(encoded) > max_bytes:
            raise OutputLimitExceeded(
                f"The result has {len(encoded)} bytes, {max_bytes} are allowed. Ask for less."
            )
        if not outcome.is_dry_run:  # the data of a dry run is not the tool's
            _check_output(data, tool)
    except EngineError as error:
        ended_by = EndedBy.OUTPUT if isinstance(error, OutputLimitExceeded) else EndedBy.EXCEPTION
        failed = replace(outcome, data=None, error=error, ended_by=ended_by)
        return ShapedOutcome(failed, {}, "")
    if outcome.output_bytes is None:
        outcome = replace(outcome, output_bytes=len(encoded))
    return ShapedOutcome(outcome, data, encoded.decode())


def shape_error(error: EngineError, details: JsonObject | None = None) -> ErrorInfo:
    """Return the error in the form of the envelope, without empty optional keys.

    `details` replace the error's own details if they are given.
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


def redact_error(error: EngineError, redactor: Redactor) -> int:
    """Redact an error's texts, including a tool's own code. Return the number of matches."""
    error.message, total = redactor.text(error.message)
    if isinstance(error, ToolError):
        error.tool_code, in_code = redactor.text(error.tool_code)
        total += in_code
    if error.fields:
        fields, in_fields = redactor.value(error.fields)
        error.fields, total = tuple(fields), total + in_fields
    if error.details is not None:
        error.details, in_details = redactor.value(error.details)
        total += in_details
    return total


def brief_error(error: EngineError) -> ErrorInfo:
    """Return the error of one attempt without its details, for an event."""
    if isinstance(error, ToolError):
        error = _shape_tool_error(error)
    return shape_error(error).model_copy(update={"details": None})


def _shape_tool_error(error: ToolError) -> EngineError:
    """Return a tool's own error with a message and details that fit an envelope.

    Unsuitable details give another error instead.
    """
    message = str(error.message).encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARACTERS]
    try:
        details, encoded = _as_json_object(
            error.details if error.details is not None else {}, is_result=False
        )
    except ExecutionError as unfit_details:
        return unfit_details
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


def _as_json_object(value: Any, *, is_result: bool) -> tuple[JsonObject, bytes]:
    """Return a value as a JSON object, and encoded. Any other value is wrapped as `{"value": …}`.

    Raises:
        EngineError: JSON cannot represent the value. `is_result` tells whether it is a result or
            an error's details.
    """
    try:
        # Tools return any Python value (models, dates, decimals); guests send JSON.
        plain = to_jsonable_python(value)
        data = plain if isinstance(plain, dict) else {"value": plain}
        encoded = strict_json.dumps(data)
        # Parse only if needed: an escaped surrogate may be unpaired, which is invalid, and only
        # data with this many brackets can be nested too deeply.
        if b"\\ud" in encoded or encoded.count(b"[") + encoded.count(b"{") > MAX_DATA_DEPTH:
            strict_json.loads(encoded, max_depth=MAX_DATA_DEPTH)
    except Exception:  # also whatever the value's own code raises
        raise unfit(is_result=is_result) from None
    return data, encoded


def _check_output(data: JsonObject, tool: RegisteredTool) -> None:
    if tool.output is None:
        return
    try:
        violations = tool.output.violations(data)
    except TooCostly:
        raise ExecutionError("The tool's result is too large to check.") from None
    if violations:
        paths = ", ".join(violation.path or "data" for violation in violations[:5])
        raise ExecutionError(
            f"The tool's result does not match its declared schema ({paths}). Do not retry."
        )


# -- long texts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Long:
    """One value that is too long, with its path and its shortened form."""

    path: Path
    whole: str
    shown: str | None
    content_type: str
    length: int
    """Number of characters of the whole text. `whole` is empty if the text is already stored."""

    @property
    def name(self) -> str:
        """The path with dots."""
        return ".".join(map(str, self.path))[:200]


async def shorten(
    shaped: ShapedOutcome,
    *,
    blobs: BlobStore,
    principal_id: str | None,
    session_id: str | None = None,
    with_value: bool = False,
    with_summary: bool = True,
    max_length: int | None = None,
) -> ShapedOutcome:
    """Shorten long texts in the data, or in the details of an error, and store the whole texts.

    They are stored as blobs of the principal, or of the session if it is given. Without a principal
    nothing is stored. `with_value` also replaces a long list or object in the field `value` by
    null. `max_length` is the caller's own limit in characters; the smaller limit counts.
    """
    error = shaped.outcome.error
    cuts = shaped.outcome.cuts
    shortest = INLINE_BYTES if max_length is None else min(INLINE_BYTES, max_length)
    if error is None and not cuts and 0 < len(shaped.text) <= shortest:
        return shaped  # no text can be longer than the whole JSON
    target = shaped.data if error is None else error.details
    if not target:
        return shaped
    kept = shaped.outcome.whole_fields
    found = [
        long
        for long in _long_values(target, with_value=with_value, max_length=max_length)
        if len(long.path) > 1 or long.path[0] not in kept
    ]
    if not found and not cuts:
        return shaped
    with anyio.CancelScope(shield=True):  # bounded by the disk; the tool has already acted
        links = [await _link(long, blobs, principal_id, session_id) for long in found[:MAX_FIELDS]]
    links += [{} for _ in found[MAX_FIELDS:]]
    found = [_long_of(cut, max_length) for cut in cuts] + found
    links = [cut.link for cut in cuts] + links
    short = _put(target, {long.path: long.shown for long in found})
    short |= _note(found, links, with_summary=with_summary)
    if error is not None:
        return ShapedOutcome(shaped.outcome, shaped.data, shaped.text, details=short)
    return ShapedOutcome(shaped.outcome, short, strict_json.dumps(short).decode())


def shortened(data: JsonObject) -> JsonObject:
    """Return data with long texts shortened. No blobs are stored: the caller sent this data."""
    found = {long.path: long.shown for long in _long_values(data, with_value=False)}
    short: JsonObject = _put(data, found) if found else data
    return short


def _long_values(
    target: JsonObject, *, with_value: bool, max_length: int | None = None
) -> Iterator[_Long]:
    """Yield every value that is too long, in order. `shape` has bounded the nesting."""
    for path, text, is_of_file in _walk(target, ()):
        limit = None if is_of_file else max_length  # a shortened URL would not work
        if _is_long(text) or (limit is not None and len(text) > max(limit, NAME_CHARACTERS)):
            yield _Long(path, text, head_and_tail(text, limit), PLAIN_TEXT, len(text))
    value = target.get("value")
    if with_value and isinstance(value, dict | list):
        text = strict_json.dumps(value).decode()
        if _is_long(text):
            yield _Long(("value",), text, None, "application/json", len(text))


def _long_of(cut: CutText, max_length: int | None) -> _Long:
    """Describe a text that was too long for memory and is already stored."""
    shown = ends_of(cut.head, cut.tail, cut.length, max_length)
    return _Long((cut.field,), "", shown, PLAIN_TEXT, cut.length)


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield every text with its path, and whether it belongs to the description of a file."""
    is_file = isinstance(node, dict) and "filename" in node
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list | tuple):
        items = enumerate(node)
    for key, value in items:
        if key == FILE_CONTENT and is_file:
            continue
        if isinstance(value, str):
            yield (*path, key), value, is_file
        elif isinstance(value, dict | list | tuple):
            yield from _walk(value, (*path, key))


def _is_long(text: str) -> bool:
    if len(text) * 4 <= INLINE_BYTES:  # a character has at most 4 bytes
        return False
    return len(text) > INLINE_BYTES or len(text.encode("utf-8", "replace")) > INLINE_BYTES


async def _link(
    long: _Long, blobs: BlobStore, principal_id: str | None, session_id: str | None
) -> JsonObject:
    if principal_id is None:
        return {}
    draft = blobs.draft(principal_id, session_id)
    draft.feed(long.whole.encode("utf-8", "replace"))
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in long.name)
    suffix = ".json" if long.content_type == "application/json" else ".txt"
    try:
        blob = await blobs.keep(draft, name + suffix, long.content_type)
    except NotKept as reason:
        return {"not_kept": f"{reason}, so the rest is lost"}
    return {"resource_url": blob.url, "expires_at": timestamp(blob.expires_at)}


def _put(target: Any, values: dict[Path, str | None], path: Path = ()) -> Any:
    """Return a copy of JSON in which the values at these paths are replaced."""
    if path in values:
        return values[path]
    if isinstance(target, dict):
        return {key: _put(value, values, (*path, key)) for key, value in target.items()}
    if isinstance(target, list | tuple):
        return [_put(value, values, (*path, index)) for index, value in enumerate(target)]
    return target


def _note(found: list[_Long], links: list[JsonObject], *, with_summary: bool) -> JsonObject:
    """Return the answer's fields that describe shortened values. `resource_url` is the first
    link."""
    fields = [
        {
            "field": long.name,
            "original_length": long.length,
            "returned_length": len(long.shown or ""),
            **link,
        }
        for long, link in zip(found, links, strict=True)
    ]
    note: JsonObject = {
        "truncated": True,
        "truncation_info": {
            "original_length": sum(field["original_length"] for field in fields),
            "returned_length": sum(field["returned_length"] for field in fields),
            "summary": _summary(found) if with_summary else None,
            "fields": fields,
        },
    }
    url = next((link["resource_url"] for link in links if "resource_url" in link), None)
    return note if url is None else {**note, "resource_url": url}


def _summary(found: list[_Long]) -> str:
    words = [
        f"{long.name} has {long.length} characters, {_what_is_here(long.shown)}"
        for long in found[:5]
    ]
    more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(words) + more + "."


def _what_is_here(shown: str | None) -> str:
    if shown is None:
        return "and is left out"
    is_both = " characters left out …" in shown
    return "of which both ends are here" if is_both else "of which the beginning is here"


# -- usage and cost ------------------------------------------------------------------------


def account(
    *,
    arguments_json: str,
    data: JsonObject,
    data_json: str,
    tool: ToolDefinition | None,
    outcome: Outcome | None,
    limits: Limits | None,
    processing_s: float,
    counter: TokenCounter,
    prices: Prices,
) -> UsageReport:
    """Return tokens and cost of a call. `outcome` is None if it was refused and costs nothing."""
    cost = Decimal(0)
    if tool is not None and outcome is not None:
        cost = tool.cost_per_use + outcome.cost + _resources(outcome, limits, processing_s, prices)
    return UsageReport(
        input_tokens=counter.count(arguments_json, TextKind.JSON),
        output_tokens=counter.count(_without_files(data, data_json), TextKind.JSON),
        estimated=counter.estimated,
        tokens_used=outcome.tokens_used if outcome is not None else 0,
        cost=money(cost),
        currency=prices.currency,
    )


def _without_files(data: JsonObject, data_json: str) -> str:
    """Return the data as JSON without the contents of figures and files, which models never get."""
    if not data.get("images") and not data.get("files"):
        return data_json
    lists = {key: without_contents(data[key]) for key in ("images", "files") if key in data}
    return strict_json.dumps({**data, **lists}).decode()


def _resources(
    outcome: Outcome, limits: Limits | None, processing_s: float, prices: Prices
) -> Decimal:
    """Return the cost of the measured CPU time, and of the memory limit during the run."""
    cost = Decimal(0)
    if prices.cpu_second and outcome.cpu_ms is not None:
        cost += prices.cpu_second * Decimal(repr(outcome.cpu_ms)) / 1000
    if prices.gb_second and limits is not None and limits.memory_mb is not None:
        cost += prices.gb_second * Decimal(limits.memory_mb) / 1024 * Decimal(repr(processing_s))
    return cost
