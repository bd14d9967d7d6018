"""The standard envelope: the shape of every answer, whether a call succeeded or not.

It always has the same five keys, and `debug_info` as a sixth if the call requests it and the
configuration allows it. A metric that was not measured for the call is null.
"""

from __future__ import annotations

import json
from operator import not_
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from fumehood.core.errors import EndedBy, EnvelopeError
from fumehood.core.json_types import JsonObject
from fumehood.core.limits import Grade, Held, Limit
from fumehood.core.returned_file import ReturnedFile, returned_files


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ErrorInfo(_Value):
    """The reason why a call did not succeed. Keys that do not apply are absent."""

    code: str
    message: str
    retryable: bool
    human_review: bool
    fields: tuple[str, ...] | None = None
    retry_after_ms: int | None = None
    max_retries: int | None = None
    approval_id: str | None = None
    approval_url: str | None = None
    replacement: str | None = None
    sunset_date: str | None = None
    migration_guide: str | None = None
    details: JsonObject | None = None

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        return {key: value for key, value in handler(self).items() if value is not None}


class Performance(_Value):
    """Durations in milliseconds. `total_ms` also includes work that the other fields do not."""

    total_ms: float
    validation_ms: float | None = None
    queue_ms: float | None = None
    approval_ms: float | None = None
    processing_ms: float | None = None
    network_ms: float | None = None


class LimitsApplied(_Value):
    """The enforced limits of a run. A limit that the wall lacks is null."""

    timeout_seconds: float
    memory_mb: int | None


class NetworkReport(_Value):
    """A program's use of the network gateway. `requests` includes the requests that were refused
    (`denied`) and those that waited for human approval (`held`).
    """

    requests: int
    denied: int
    held: int
    """Requests that waited for human approval."""
    bytes_in: int
    bytes_out: int
    hosts: dict[str, int]
    """Maps each host to the number of requests to it."""
    tunnels: int = Field(default=0, exclude_if=not_)
    """Connections that were forwarded without decrypting them."""
    misused: int = Field(default=0, exclude_if=not_)
    """Requests with a secret's placeholder in a place where it is not allowed."""
    replayed: int = Field(default=0, exclude_if=not_)
    """Requests that were not sent, because the answer was taken from a receipt: the record of an
    earlier run of the same program."""


class SandboxReport(_Value):
    """Where the call ran, and how the run ended. The envelope has null instead of this report if
    nothing ran, or if it is unknown what ran.
    """

    placement: str
    isolation: str
    ended_by: EndedBy
    limits: LimitsApplied
    node: str | None = None
    """The node on which the call ran, if the engine has nodes."""
    image: str | None = Field(default=None, exclude_if=not_)
    """The name of the container's image. Absent if the call ran in no container."""
    runtime: str | None = Field(default=None, exclude_if=not_)
    """What ran the container, such as `docker`. Absent if the call ran in no container."""
    grade: Grade | None = Field(default=None, exclude_if=not_)
    """How strongly the container held the program. Absent if it ran in no container."""
    held: dict[Limit, Held] = Field(default_factory=dict, exclude_if=not_)
    """How the container held each limit. Absent if the program ran in no container."""
    network: NetworkReport | None = Field(default=None, exclude_if=not_)
    """Absent if the program had no network access."""


class Resources(_Value):
    """Resources used by the run, measured outside the program."""

    cpu_ms: float | None = None
    peak_memory_mb: float | None = None
    output_bytes: int | None = None


class UsageReport(_Value):
    """Tokens and money that a call used. `estimated` is true if the token counts are estimates."""

    input_tokens: int = 0
    output_tokens: int = 0
    estimated: bool = True
    tokens_used: int = 0
    cost: str = "0.000000"
    currency: str = "USD"


class Metacognition(_Value):
    """The verdict of the operator's result checkers on a result.

    `checked` is false if a checker failed or took too long.
    """

    checked: bool
    needs_correction: bool = False
    correction: str | None = Field(default=None, exclude_if=lambda value: value is None)


class CacheReport(_Value):
    """Whether the answer was taken from the result cache. `ttl_remaining` is in seconds."""

    hit: bool
    cached_at: str | None = Field(default=None, exclude_if=not_)
    ttl_remaining: float | None = Field(default=None, exclude_if=lambda value: value is None)


class FallbackReport(_Value):
    """The call of the fallback tool, which was made because the requested tool failed.

    If `answered` is true, the envelope has the fallback tool's `data`. `error` is then the error of
    the requested tool.

    If `answered` is false, the envelope has the error of the requested tool. `error` is then the
    reason why the fallback tool gave no answer.

    The call log has the fallback tool's call under `call_id`. `usage` is the usage of this call.
    The envelope's own `usage` does not include it.
    """

    tool: str
    tool_version: str | None
    call_id: str | None
    answered: bool
    error: ErrorInfo | None
    usage: UsageReport


class ReceiptLink(_Value):
    """The address of a call's receipt (`url`). If there is no receipt, `not_kept` is the reason
    instead.

    A receipt holds the inputs and results of a program's call, so that the program can be run
    again.
    """

    url: str | None = Field(default=None, exclude_if=not_)
    expires_at: str | None = Field(default=None, exclude_if=not_)
    not_kept: str | None = Field(default=None, exclude_if=not_)


class Metadata(_Value):
    """Information about a call other than its result."""

    tool_name: str | None
    tool_version: str | None
    call_id: str | None
    trace_id: str
    timestamp: str
    execution_time_ms: float
    performance: Performance
    sandbox: SandboxReport | None
    resources: Resources
    usage: UsageReport
    retry_count: int = 0
    warnings: tuple[str, ...] = ()
    idempotent_replay: bool = Field(default=False, exclude_if=not_)
    """Whether this is the stored answer of an earlier call with the same idempotency key."""
    redacted: int = Field(default=0, exclude_if=not_)
    """How many secrets and private texts were replaced by `[redacted]`."""
    metacognition: Metacognition | None = Field(default=None, exclude_if=not_)
    cache: CacheReport | None = Field(default=None, exclude_if=not_)
    """Absent if the result cache was not used for the call."""
    fallback: FallbackReport | None = Field(default=None, exclude_if=not_)
    receipt: ReceiptLink | None = Field(default=None, exclude_if=not_)


class Envelope(_Value):
    """The standard form of every answer: success, result or error, and metadata."""

    success: bool
    status: Literal["success", "error"]
    data: JsonObject
    error: ErrorInfo | None
    metadata: Metadata
    debug_info: JsonObject | None = Field(default=None, exclude_if=lambda value: value is None)

    def raise_for_error(self) -> Self:
        """Return this envelope if the call succeeded, and raise an exception otherwise.

        Raises:
            CallFailed: the call did not succeed.
        """
        if self.error is not None:
            raise CallFailed(self)
        return self

    @property
    def images(self) -> tuple[ReturnedFile, ...]:
        """The images that the program produced, even if the program failed. Notebooks display
        them.
        """
        return returned_files(self._result.get("images"))

    @property
    def files(self) -> tuple[ReturnedFile, ...]:
        """The files that the program returned, even if the program failed."""
        return returned_files(self._result.get("files"))

    def shortened(self, field: str) -> str | None:
        """Return the URL of a field's whole content, or None if the field was not shortened.

        `field` is the dotted path of a field in `data` or, after an error, in `error.details`.

        Raises:
            ValueError: there is no such field, or its whole content was not kept.
        """
        notes = self._result.get("truncation_info")  # or a field of the tool's own
        fields = notes.get("fields") if isinstance(notes, dict) else None
        for one in fields if isinstance(fields, list) else ():
            if isinstance(one, dict) and one.get("field") == field:
                address = one.get("resource_url")
                if not isinstance(address, str):
                    reason = one.get("not_kept", "too many texts are long")
                    raise ValueError(f"The whole {field} was not kept: {reason}.")
                return address
        self.at(field)
        return None

    def at(self, field: str) -> Any:
        """Return the value at a dotted path in `data` or, after an error, in `error.details`.

        Raises:
            ValueError: the path leads to no value.
        """
        found: Any = self._result
        for name in field.split("."):
            try:
                found = found[int(name) if isinstance(found, list) else name]
            except (LookupError, TypeError, ValueError):
                raise ValueError(f"The answer has no {field}.") from None
        return found

    def read_whole(self, field: str, content: bytes) -> Any:
        """Convert the blob of a shortened field to the field's whole content.

        `field` is the dotted path of the field, and `content` is the blob. The result is a text,
        with one exception: if `field` is `value` and the envelope's `value` is null, the blob is
        parsed as JSON.
        """
        text = content.decode("utf-8", "replace")
        return json.loads(text) if field == "value" and self.at(field) is None else text

    @property
    def _result(self) -> JsonObject:
        return self.data if self.error is None else self.error.details or {}


class CallFailed(EnvelopeError):
    """The call did not succeed. Only `Envelope.raise_for_error` raises this exception."""
