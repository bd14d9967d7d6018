"""Result: turn the ending of a call into its envelope, whether it ran, failed or was refused.

Eighth stage; `build_envelope` fills the metadata from the call's context, and records nothing.
`shape` converts the data to a JSON object and checks the size limit and the output schema. If the
data does not fit, the result is an error. `shorten` cuts long texts in `data` and `error.details`
to head and tail, and stores each whole text as a blob of the caller. It never cuts the contents of
files. `account` computes tokens and cost from measurements, in decimal arithmetic; `budgets/ledger`
adds them up. Parts may add fields to the metadata (`part.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import anyio
import anyio.to_thread
from pydantic_core import to_jsonable_python

from fumehood.core.call import CallRequest, CheckedResult, replaced
from fumehood.core.envelope import (
    Envelope,
    ErrorInfo,
    FallbackReport,
    LimitsApplied,
    Metadata,
    Performance,
    Resources,
    SandboxReport,
    UsageReport,
)
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
from fumehood.core.limits import MB, Limits
from fumehood.core.long_text import INLINE_BYTES, ends_of, head_and_tail, is_long
from fumehood.core.returned_file import FILE_CONTENT, without_contents
from fumehood.core.tool import ToolDefinition
from fumehood.core.usage import Prices, TextKind, TokenCounter, money
from fumehood.executors.claims import unfit
from fumehood.executors.function import HostFunctionFailed
from fumehood.executors.outcome import CutText, Outcome
from fumehood.observe.clock import timestamp
from fumehood.pipeline.check_result import CheckedData, ResultCheckers
from fumehood.pipeline.context import CallContext, FallbackAnswer, PipelineServices
from fumehood.pipeline.plan import Plan
from fumehood.pipeline.resolve import ResolvedCall
from fumehood.pipeline.validate import mask_fixed_arguments
from fumehood.protocol import strict_json
from fumehood.redaction.redactor import Redactor
from fumehood.registry.index import RegisteredTool
from fumehood.registry.json_schema import TooCostly
from fumehood.storage.blobs import BlobStore, NotKept

MAX_DATA_DEPTH = 60
"""Maximum nesting of data. The envelope adds levels of its own, so this is slightly less than
strict JSON parsers accept."""

MAX_DETAILS_BYTES = 64 * 1024
"""Maximum size of a tool's error details as JSON, in bytes."""

NAME_CHARACTERS = 64
"""`max_length` never shortens texts of up to this many characters, because these are names and
codes."""

MAX_RESULT_BYTES = MB
"""Maximum size of the result that a program receives from a call, in bytes of JSON. If a result is
larger, its long texts are shortened. If it is still larger, the program gets OutputLimitExceeded
instead."""

PLAIN_TEXT = "text/plain; charset=utf-8"

MAX_FIELDS = 200
"""Maximum number of texts of one answer that are stored as blobs. Any further long text is
shortened without being stored."""

Path = tuple[str | int, ...]
"""The keys and indexes that lead to a value in JSON."""


@dataclass(frozen=True, slots=True)
class ShapedOutcome:
    """An outcome whose data fits into an envelope. `text` is the data as JSON.

    If the error's details were shortened, `details` contains the shortened details. Otherwise it is
    None.
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
    """Return the error as it appears in the envelope. Empty optional fields are omitted.

    If `details` are given, they replace the error's own details.
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
    """Redact the texts of `error` in place, including an error code that the tool defines. Return
    the number of matches that were replaced.
    """
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


def brief_error(error: EngineError, redact: Callable[[str], str]) -> ErrorInfo:
    """Return the error of one attempt as an event reports it: redacted, and without details."""
    info = shape_error(_shape_tool_error(error) if isinstance(error, ToolError) else error)
    # Redact before the message is cut: a key that was cut in half would not be found.
    message = redact(_whole_text(error.message))[:MAX_MESSAGE_CHARACTERS]
    code = redact(info.code)
    return info.model_copy(update={"code": code, "message": message, "details": None})


def _shape_tool_error(error: ToolError) -> EngineError:
    """Return a copy of a tool's own error for the envelope. Its message is valid UTF-8 and has at
    most `MAX_MESSAGE_CHARACTERS` characters.

    If the error's details are not JSON or exceed `MAX_DETAILS_BYTES`, return an error that says
    this instead.
    """
    message = _whole_text(error.message)[:MAX_MESSAGE_CHARACTERS]
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


def _whole_text(message: object) -> str:
    """Return a tool's message as text that can be encoded in UTF-8."""
    return str(message).encode("utf-8", "replace").decode()


def _as_json_object(value: Any, *, is_result: bool) -> tuple[JsonObject, bytes]:
    """Return a value as a JSON object, and this object encoded as JSON text.

    A non-object becomes `{"value": …}`.

    Raises:
        EngineError: JSON cannot represent the value. The message calls it a result if `is_result`
            is True, and an error's details otherwise.
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
    except Exception:  # the value's own code may raise anything
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
    """A value that is too long for the answer, with its path and its shortened form."""

    path: Path
    whole: str
    shown: str | None
    content_type: str
    length: int
    """Number of characters of the complete text. If this text is already stored, `whole` is
    empty."""

    @property
    def name(self) -> str:
        """The path as text, with dots between its elements."""
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

    The whole texts become blobs of the principal, or of the session if `session_id` is given.
    Without a principal, no blobs are stored.

    `with_value` also replaces a long list or object in the field `value` by null. `with_summary`
    adds a summary in words of what was shortened. `max_length` is the caller's own limit in
    characters. The lower of the caller's and the engine's limit applies.
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
    """Return data with its long texts shortened. No blobs are stored, because the caller itself
    sent this data.
    """
    found = {long.path: long.shown for long in _long_values(data, with_value=False)}
    short: JsonObject = _put(data, found) if found else data
    return short


def _long_values(
    target: JsonObject, *, with_value: bool, max_length: int | None = None
) -> Iterator[_Long]:
    """Yield every text that is too long, in order. With `with_value`, also yield a list or object
    in the field `value` if it is too long. `max_length` is the caller's own limit in characters.
    """
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
    """Describe a text that was too long to keep in memory and is already stored."""
    shown = ends_of(cut.head, cut.tail, cut.length, max_length)
    return _Long((cut.field,), "", shown, PLAIN_TEXT, cut.length)


def _walk(node: Any, path: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield each text in `node`, a JSON value, except the contents of files. `path` is the path of
    `node`.

    Each item has three values: the text's path, the text, and a bool. The bool is True if the text
    is part of a file's description, such as its URL.
    """
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
    """Return a copy of a JSON value in which the values at the paths in `values` are replaced."""
    if path in values:
        return values[path]
    if isinstance(target, dict):
        return {key: _put(value, values, (*path, key)) for key, value in target.items()}
    if isinstance(target, list | tuple):
        return [_put(value, values, (*path, index)) for index, value in enumerate(target)]
    return target


def _note(found: list[_Long], links: list[JsonObject], *, with_summary: bool) -> JsonObject:
    """Return the fields of the answer that describe the shortened values `found`. `links` has one
    item for each value, which says where the whole value is stored. With `with_summary`, a summary
    in words is included.

    The field `resource_url` is the first link.
    """
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
    return f"of which the beginning{' and end are' if is_both else ' is'} here"


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
    """Compute the tokens and the cost of a call.

    `arguments_json` and `data_json` are the JSON texts of the arguments and of `data`, the answer's
    data. `outcome` is None if the call did not run. It then costs nothing. `processing_s` is the
    duration of the run in seconds.
    """
    cost = Decimal(0)
    if tool is not None and outcome is not None:
        cost = (
            tool.cost_per_use + outcome.cost + _resource_cost(outcome, limits, processing_s, prices)
        )
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


def _resource_cost(
    outcome: Outcome, limits: Limits | None, processing_s: float, prices: Prices
) -> Decimal:
    """Return the cost of the measured CPU time and of the reserved memory. Memory is charged for
    `processing_s` seconds, the duration of the run.
    """
    cost = Decimal(0)
    if prices.cpu_second and outcome.cpu_ms is not None:
        cost += prices.cpu_second * Decimal(repr(outcome.cpu_ms)) / 1000
    if prices.gb_second and limits is not None and limits.memory_mb is not None:
        cost += prices.gb_second * Decimal(limits.memory_mb) / 1024 * Decimal(repr(processing_s))
    return cost


# -- the envelope ---------------------------------------------------------------------------

NOT_CHECKED = CheckedData()
"""The findings of the checkers if none of them ran."""


async def build_envelope(
    call: CallContext, ending: Outcome | EngineError, services: PipelineServices
) -> Envelope:
    """Build the envelope of a call from its outcome, or from the error with which it was
    refused.
    """
    shaped: ShapedOutcome | None = None
    error = ending if isinstance(ending, EngineError) else ending.error
    redacted, added = 0, dict[str, Any]()
    if isinstance(ending, EngineError):
        redacted = redact_error(ending, services.redactor)
    else:
        if call.resolved is not None:
            max_bytes = call.plan.limits.output_bytes if call.plan is not None else MB
            shaped = await _shaped(ending, call.resolved.tool, max_bytes, services.redactor)
            added = await services.parts.answered(call, shaped.outcome, shaped.data)
            shaped = await _shorten(shaped, call.request, call.resolved, services)
            error = shaped.outcome.error
        if isinstance(error, HostFunctionFailed):
            call.trace.fault("call.tool_failed", error.cause)
    if call.validated is not None:
        error = mask_fixed_arguments(error, call.validated)
    if shaped is not None:
        redacted = shaped.outcome.redacted
    checked = NOT_CHECKED
    if services.answers.checkers is not None and shaped is not None and error is None:
        checked = await _check(call, shaped, services.answers.checkers)
    envelope = _envelope(call, shaped, error, services, redacted, checked)
    if added:
        envelope = _with_added(envelope, added)
    return _with_fallback(envelope, call.fallback) if call.fallback is not None else envelope


async def _shaped(
    outcome: Outcome, tool: RegisteredTool, max_bytes: int, redactor: Redactor
) -> ShapedOutcome:
    """Call `shape`, in a thread if the outcome is long."""
    error = outcome.error
    content = outcome.data if error is None else (error.message, error.details)
    if not is_long(content):
        return shape(outcome, tool, max_bytes, redactor)
    return await anyio.to_thread.run_sync(shape, outcome, tool, max_bytes, redactor)


async def _check(call: CallContext, shaped: ShapedOutcome, checkers: ResultCheckers) -> CheckedData:
    """Run the result checkers on the data. The data of a dry run is not checked."""
    request, validated = call.request, call.validated
    if shaped.outcome.is_dry_run or validated is None:
        return NOT_CHECKED
    result = CheckedResult(
        tool=validated.tool.definition.name,
        arguments=copy.deepcopy(validated.shown_arguments),
        data=copy.deepcopy(shaped.data),
        principal=request.principal.id if request.principal is not None else None,
        agent_id=request.options.agent_id,
        session_id=request.options.session_id,
        trace_id=request.trace_id,
    )
    return await checkers.check(result)


async def _shorten(
    shaped: ShapedOutcome,
    request: CallRequest,
    resolved: ResolvedCall,
    services: PipelineServices,
) -> ShapedOutcome:
    """Shorten long texts. A call that a program made may have longer texts. No blobs are stored for
    a dry run.
    """
    is_whole = len(shaped.text) <= MAX_RESULT_BYTES and not shaped.outcome.cuts
    if request.parent_id is not None and is_whole:
        return shaped
    is_owned = request.principal is not None and not shaped.outcome.is_dry_run
    return await shorten(
        shaped,
        blobs=services.stores.blobs,
        principal_id=request.principal.id if request.principal is not None and is_owned else None,
        session_id=request.options.session_id,
        with_value=resolved.tool.definition.executor.startswith("code:"),
        with_summary=request.options.return_summary,
        max_length=request.options.max_length,
    )


def _envelope(
    call: CallContext,
    shaped: ShapedOutcome | None,
    error: EngineError | None,
    services: PipelineServices,
    redacted: int,
    checked: CheckedData,
) -> Envelope:
    request = call.request
    outcome = shaped.outcome if shaped is not None else None
    tool = call.resolved.tool.definition if call.resolved is not None else None
    stages_ms = call.trace.stages_ms()
    given = call.validated.shown_arguments if call.validated is not None else None
    usage = account(
        arguments_json=strict_json.dumps(given).decode() if given is not None else "",
        data=shaped.data if shaped is not None else {},
        data_json=shaped.text if shaped is not None else "",
        tool=tool,
        outcome=outcome if outcome is not None and not outcome.is_dry_run else None,
        limits=call.plan.limits if call.plan is not None else None,
        processing_s=stages_ms.get("execute", 0.0) / 1e3,
        counter=services.answers.counter,
        prices=services.answers.prices,
    )
    total_ms = _total_ms(call, services)
    waited_ms = call.asked.waited_ms if call.asked is not None else None
    name, version = _tool_names(call)
    return Envelope(
        success=error is None,
        status="success" if error is None else "error",
        data=shaped.data if shaped is not None and error is None else {},
        error=_error_info(error, shaped, call.attempts.max_retries),
        metadata=Metadata(
            tool_name=name,
            tool_version=version,
            call_id=request.call_id,
            trace_id=request.trace_id,
            timestamp=timestamp(services.clock.now()),
            execution_time_ms=total_ms,
            performance=Performance(
                total_ms=total_ms,
                validation_ms=stages_ms.get("validate"),
                queue_ms=_rounded(call.queue_ms),
                approval_ms=waited_ms or stages_ms.get("approve"),
                processing_ms=stages_ms.get("execute"),
                network_ms=_network_ms(stages_ms, outcome),
            ),
            sandbox=_sandbox(outcome, call.plan),
            resources=_resources(outcome),
            usage=usage,
            retry_count=call.attempts.retry_count,
            warnings=_warnings(call, outcome, services) + checked.warnings,
            redacted=redacted,
            metacognition=checked.metacognition,
            **{name: value for _, hold in call.holds for name, value in hold.metadata.items()},
        ),
        debug_info=_debug_info(call, services),
    )


def _error_info(
    error: EngineError | None, shaped: ShapedOutcome | None, max_retries: int | None
) -> ErrorInfo | None:
    if error is None:
        return None
    # `shaped.details` are the shortened details of the outcome's own error, not of another error
    # that has replaced it.
    is_own = shaped is not None and error is shaped.outcome.error
    info = shape_error(error, shaped.details if shaped is not None and is_own else None)
    return info.model_copy(update={"max_retries": max_retries}) if max_retries else info


def _network_ms(stages_ms: dict[str, float], outcome: Outcome | None) -> float | None:
    if "execute" not in stages_ms:
        return None
    return 0.0 if outcome is None else round(outcome.network_ms, 3)


def _total_ms(call: CallContext, services: PipelineServices) -> float:
    """Return the milliseconds from the call's arrival to its answer, including the wait for
    approval.

    The result is at least the sum of the measured times, even if the system clock was set back.
    """
    if call.asked is None:
        return round(call.trace.total_ms, 3)
    since_asked = services.clock.now() - call.asked.at
    measured_ms = (call.asked.waited_ms or 0.0) + call.trace.total_ms
    return round(max(since_asked.total_seconds() * 1e3, measured_ms), 3)


def _tool_names(call: CallContext) -> tuple[str, str | None]:
    """Return the tool's name and version. If the tool is unknown, return the requested name and
    None.
    """
    if call.resolved is not None:
        tool = call.resolved.tool.definition
        return tool.name, tool.version
    if call.asked is not None:  # the tool existed when the call was stored
        return call.asked.tool, call.asked.tool_version
    return call.request.tool[:80], None


def _sandbox(outcome: Outcome | None, plan: Plan | None) -> SandboxReport | None:
    if outcome is None or plan is None or plan.placement.is_outside:
        return None
    limits = LimitsApplied(timeout_seconds=plan.limits.wall_s, memory_mb=plan.limits.memory_mb)
    own = {
        "placement": plan.placement.kind,
        "isolation": outcome.isolation,
        "ended_by": outcome.ended_by,
        "limits": limits,
        "node": outcome.node,
        "image": plan.image,
    }
    return SandboxReport(**{**outcome.sandbox, **own})


def _resources(outcome: Outcome | None) -> Resources:
    if outcome is None or outcome.is_dry_run:
        return Resources()
    peak = outcome.peak_memory_bytes
    return Resources(
        cpu_ms=_rounded(outcome.cpu_ms),
        peak_memory_mb=None if peak is None else round(peak / MB, 2),
        output_bytes=outcome.output_bytes,
    )


def _warnings(
    call: CallContext, outcome: Outcome | None, services: PipelineServices
) -> tuple[str, ...]:
    warnings: tuple[str, ...] = ()
    for source in (call.validated or call.resolved, call.plan, outcome):
        warnings += source.warnings if source is not None else ()
    if call.attempts.warning is not None:
        warnings += (call.attempts.warning,)
    asked = call.asked  # an edit is reported if the call is known to have run
    if asked is not None and asked.edit_warning and (call.is_approved or asked.has_begun):
        warnings += (asked.edit_warning,)
    if call.request.options.debug and not services.answers.allow_debug:
        warnings += ("debug: the engine's configuration does not allow it",)
    return warnings


def _debug_info(call: CallContext, services: PipelineServices) -> JsonObject | None:
    if not (call.request.options.debug and services.answers.allow_debug):
        return None
    return {
        "stages_ms": call.trace.stages_ms(),
        "placement": call.plan.placement.why if call.plan is not None else None,
        "limits_enforced": sorted(call.plan.wall.status.enforced) if call.plan is not None else [],
        "arguments": (
            shortened(call.validated.shown_arguments) if call.validated is not None else None
        ),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _with_added(envelope: Envelope, added: dict[str, Any]) -> Envelope:
    """Return the envelope with the metadata fields that parts add. Fields that are already set stay
    unchanged.
    """
    metadata = envelope.metadata
    free = {name: value for name, value in added.items() if name not in metadata.model_fields_set}
    return replaced(envelope, metadata=metadata.model_copy(update=free))


def _with_fallback(envelope: Envelope, answer: FallbackAnswer) -> Envelope:
    """Replace the answer in a failed call's envelope by the fallback's answer.

    If the fallback also failed, the envelope keeps the first tool's error.
    """
    other, error = answer.envelope, envelope.error
    warnings = tuple(f"fallback: {warning}" for warning in other.metadata.warnings)
    if not other.success:
        code = other.error.code if other.error is not None else ""
        warnings += (f"fallback: {answer.tool} gave no answer ({code})",)
    failed = error if other.success else other.error
    report = FallbackReport(
        tool=answer.tool,
        tool_version=other.metadata.tool_version,
        call_id=other.metadata.call_id,
        answered=other.success,
        error=failed.model_copy(update={"details": None}) if failed is not None else None,
        usage=other.metadata.usage,
    )
    metadata = envelope.metadata.model_copy(
        update={
            "fallback": report,
            "warnings": (*envelope.metadata.warnings, *warnings),
            "redacted": envelope.metadata.redacted + other.metadata.redacted,
            "metacognition": other.metadata.metacognition,
        }
    )
    changes: dict[str, object] = {"metadata": metadata}
    if other.success:
        changes |= {"success": True, "status": "success", "data": other.data, "error": None}
    elif error is not None and answer.may_have_acted:
        changes["error"] = error.model_copy(update={"retryable": False, "retry_after_ms": None})
    return envelope.model_copy(update=changes)
