"""All errors: one class for each error code. The error tables in the docs are generated from them.

Values only. Every stage raises these, and `pipeline/run.py` turns them into the envelope.

    EngineError
    ├── CallerError      the caller can correct it
    ├── RuleError        a rule or a human refuses
    ├── GuestError       the program that ran caused it
    ├── HostError        the engine or its host failed
    └── UpstreamError    another service failed

`Fault` names the responsible party, and `retryable` allows repeating the same call unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self

from fumehood.core.json_types import JsonObject

if TYPE_CHECKING:
    from pydantic import ValidationError

    from fumehood.core.envelope import Envelope


class Fault(StrEnum):
    """The party responsible for an error."""

    CALLER = "caller"
    RULES = "rules"
    GUEST = "guest"
    HOST = "host"
    UPSTREAM = "upstream"


class FumehoodError(Exception):
    """Root of every exception that the public API raises.

    If the API itself is used wrongly, the exception is a `TypeError` or a `ValueError` instead.
    """


class EngineNotRunning(FumehoodError, RuntimeError):
    """A call was made before the engine's `async with` block was entered, or after the block was
    left.
    """


class EngineError(FumehoodError):
    """Root of all refusals and failures that an envelope can contain.

    `message` is safe to show to a model: it contains no stack, path or secret, and names the next
    step. `extra` contains keys of the envelope's error that only some errors have, for example
    `replacement`.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    human_review: ClassVar[bool] = False
    fault: ClassVar[Fault] = Fault.HOST
    exit_code: ClassVar[int] = 1
    """Exit status of the command line: 1 if the tool failed, 3 if the call waits for approval, 4 if
    the engine or a sandbox is unavailable.
    """
    was_sent = True
    """Whether data may have reached another service. False only if certainly no byte was sent."""

    def __init__(
        self,
        message: str,
        *,
        fields: Sequence[str] = (),
        retry_after_ms: int | None = None,
        details: JsonObject | None = None,
        retryable: bool | None = None,
        extra: JsonObject | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fields = tuple(fields)
        self.retry_after_ms = retry_after_ms
        self.details = details
        self.may_retry = type(self).retryable if retryable is None else retryable
        self.extra = dict(extra or {})


class CallerError(EngineError):
    fault = Fault.CALLER
    http_status = 400


class RuleError(EngineError):
    fault = Fault.RULES
    http_status = 403


class GuestError(EngineError):
    fault = Fault.GUEST


class HostError(EngineError):
    fault = Fault.HOST


class UpstreamError(EngineError):
    fault = Fault.UPSTREAM
    http_status = 503
    retryable = True


class InvalidParams(CallerError):
    """The arguments, options or body are wrong."""

    code = "INVALID_PARAMS"


class Unauthorized(RuleError):
    """The caller could not be authenticated."""

    code = "UNAUTHORIZED"
    http_status = 401


class PermissionDenied(RuleError):
    """The caller lacks the right, or a rule forbids the call."""

    code = "PERMISSION_DENIED"


class RequiresHumanApproval(RuleError):
    """The call needs approval first."""

    code = "REQUIRES_HUMAN_APPROVAL"
    human_review = True
    exit_code = 3


class ApprovalDenied(RuleError):
    """An approver denied the call."""

    code = "APPROVAL_DENIED"


class ApprovalExpired(RuleError):
    """The approval expired, its session ended, or the call changed after it was approved."""

    code = "APPROVAL_EXPIRED"


class SandboxViolation(GuestError):
    """The program tried an operation that its sandbox forbids."""

    code = "SANDBOX_VIOLATION"
    http_status = 403


class ToolDisabled(RuleError):
    """The tool exists but is disabled."""

    code = "TOOL_DISABLED"


class ToolNotFound(CallerError):
    """No tool has this name and version."""

    code = "TOOL_NOT_FOUND"
    http_status = 404


class ResourceNotFound(CallerError):
    """The resource does not exist, or belongs to another principal."""

    code = "RESOURCE_NOT_FOUND"
    http_status = 404


class MethodNotAllowed(CallerError):
    """The address exists, but not with this HTTP method."""

    code = "METHOD_NOT_ALLOWED"
    http_status = 405


class IdempotencyConflict(CallerError):
    """The idempotency key was used with other arguments."""

    code = "IDEMPOTENCY_CONFLICT"
    http_status = 409


class OutcomeUnknown(HostError):
    """The call may have taken effect, but its answer was lost."""

    code = "OUTCOME_UNKNOWN"
    http_status = 409
    human_review = True


class CallInProgress(CallerError):
    """The same call, or another call with this idempotency key, is still running."""

    code = "CALL_IN_PROGRESS"
    http_status = 409
    retryable = True


class ToolDeprecated(CallerError):
    """The tool's sunset date has passed."""

    code = "TOOL_DEPRECATED"
    http_status = 410


class RequestTooLarge(CallerError):
    """The request is over 8 MB, or a file is larger than its session's workspace."""

    code = "REQUEST_TOO_LARGE"
    http_status = 413


class OutputLimitExceeded(GuestError):
    """The program produced more output than its limit."""

    code = "OUTPUT_LIMIT_EXCEEDED"
    http_status = 413


class UnsupportedMediaType(CallerError):
    """The content type of the body is not JSON."""

    code = "UNSUPPORTED_MEDIA_TYPE"
    http_status = 415


class RateLimited(RuleError):
    """A rate limit is used up, or there are too many calls or connections at a time."""

    code = "RATE_LIMITED"
    http_status = 429
    retryable = True


class QuotaExceeded(RuleError):
    """A budget is used up."""

    code = "QUOTA_EXCEEDED"
    http_status = 429


class Cancelled(CallerError):
    """The call was cancelled before it ended."""

    code = "CANCELLED"
    http_status = 499


class ExecutionError(GuestError):
    """The tool ran and failed."""

    code = "EXECUTION_ERROR"
    http_status = 500


class InternalError(HostError):
    """The engine itself failed."""

    code = "INTERNAL_ERROR"


class NetworkError(UpstreamError):
    """Another service could not be reached."""

    code = "NETWORK_ERROR"


class SandboxUnavailable(HostError):
    """No suitable sandbox is available; the engine never falls back to a weaker one."""

    code = "SANDBOX_UNAVAILABLE"
    http_status = 503
    retryable = True
    exit_code = 4


class StateUnavailable(HostError):
    """The engine's database, or the bucket with its files, cannot be used now."""

    code = "STATE_UNAVAILABLE"
    http_status = 503
    retryable = True
    exit_code = 4


class CircuitOpen(UpstreamError):
    """Another service failed too often; calls to it are suspended."""

    code = "CIRCUIT_OPEN"
    was_sent = False


class ShuttingDown(HostError):
    """The engine is stopping and takes no new calls."""

    code = "SHUTTING_DOWN"
    http_status = 503
    retryable = True
    exit_code = 4


class Timeout(GuestError):
    """The call took longer than its limit. It is retryable only if another service was too slow."""

    code = "TIMEOUT"
    http_status = 504


class MemoryLimitExceeded(GuestError):
    """The program needed more memory than its limit."""

    code = "MEMORY_LIMIT_EXCEEDED"
    http_status = 507


def _leaves(root: type[EngineError]) -> list[type[EngineError]]:
    children = root.__subclasses__()
    return [leaf for child in children for leaf in _leaves(child)] if children else [root]


ERROR_CODES: Mapping[str, type[EngineError]] = MappingProxyType(
    {error.code: error for error in _leaves(EngineError)}
)
"""All error codes; the reference page is generated from this table."""

NO_FAULT = frozenset(
    {"OK"}
    | {code for code, kind in ERROR_CODES.items() if kind.fault in (Fault.CALLER, Fault.RULES)}
)
"""Codes of calls that succeeded, or were refused because of the caller or a rule."""


class ArgumentsRefused(InvalidParams):
    """The arguments match the tool's schema, but not the types of its function."""


class UpstreamTimeout(Timeout):
    """Another service did not answer in time."""

    fault = Fault.UPSTREAM
    retryable = True


class WorkspaceChanged(ApprovalExpired):
    """The files changed after the approver had seen them, so nothing was done."""


TOOL_CODE = re.compile(r"^[A-Z][A-Z0-9_]{2,63}$")
TOOL_CODE_HTTP_STATUS = 422
MAX_MESSAGE_CHARACTERS = 2000
"""Maximum characters of a tool's error message. Longer messages are cut."""

MAX_RETRY_AFTER_MS = 24 * 3600 * 1000
"""The longest delay that a tool or a service can request."""


class ToolError(EngineError):
    """An error that a tool defines, with the tool's own code, for example `CITY_NOT_FOUND`.

    Raise this error in a tool's function. The caller gets the code, the message and the details
    unchanged. `retry_after_ms` is ignored unless it is an integer from 0 to 86,400,000, which is
    one day.

    Raises:
        ValueError: the code does not consist of upper-case words, or belongs to the engine.
    """

    http_status = TOOL_CODE_HTTP_STATUS
    fault = Fault.GUEST

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        retry_after_ms: int | None = None,
        details: JsonObject | None = None,
    ) -> None:
        if not TOOL_CODE.fullmatch(code) or code in ERROR_CODES:
            raise ValueError(f"{code!r} cannot be a tool's own error code")
        is_time = type(retry_after_ms) is int and 0 <= retry_after_ms <= MAX_RETRY_AFTER_MS
        super().__init__(
            str(message),
            retryable=bool(retryable),
            retry_after_ms=retry_after_ms if is_time else None,
            details=details,
        )
        self.tool_code = code


def code_of(error: EngineError) -> str:
    """Return the code that an envelope shows for an error."""
    return error.tool_code if isinstance(error, ToolError) else error.code


class EndedBy(StrEnum):
    """How a run ended, as decided outside the sandbox."""

    OK = "ok"
    EXCEPTION = "exception"
    EXIT = "exit"
    SIGNAL = "signal"
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    POLICY = "policy"
    CANCELLED = "cancelled"
    SANDBOX_LOST = "sandbox_lost"


ENDING_ERRORS: Mapping[EndedBy, type[EngineError] | None] = MappingProxyType(
    {
        EndedBy.OK: None,
        EndedBy.EXCEPTION: ExecutionError,
        EndedBy.EXIT: ExecutionError,
        EndedBy.SIGNAL: ExecutionError,
        EndedBy.WALL_TIME: Timeout,
        EndedBy.CPU_TIME: Timeout,
        EndedBy.MEMORY: MemoryLimitExceeded,
        EndedBy.OUTPUT: OutputLimitExceeded,
        EndedBy.POLICY: SandboxViolation,
        EndedBy.CANCELLED: Cancelled,
        EndedBy.SANDBOX_LOST: SandboxUnavailable,
    }
)
"""Maps an ending to the error that the caller gets, or to None for `ok`."""


def faults_of(error: ValidationError) -> list[tuple[str, str]]:
    """Return the faults that pydantic found, each as a dotted path and a message."""
    return [
        (".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, "))
        for fault in error.errors(include_url=False, include_context=False, include_input=False)
    ]


class EnvelopeError(FumehoodError):
    """Root of the exceptions that carry the envelope of an error."""

    def __init__(self, envelope: Envelope) -> None:
        error = envelope.error
        super().__init__(error.message if error is not None else "refused")
        self.envelope = envelope
        self.code = error.code if error is not None else InternalError.code
        self.message = str(self)
        self.retryable = error.retryable if error is not None else False

    def __reduce__(self) -> tuple[type[Self], tuple[Envelope]]:
        """Let pickle store the envelope and create the exception from it. By default, pickle would
        create the exception from its message, without the envelope.
        """
        return type(self), (self.envelope,)
