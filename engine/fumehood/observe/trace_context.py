"""A call's position in a distributed trace.

Host side. The ids of a call's span are derived from the call's own ids. Therefore, they are known
before the call starts, and can be sent to the services that the call reaches. *Source*: W3C Trace
Context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fumehood.core.call import TraceParent

HEADER = "traceparent"
"""The HTTP header with the trace and span to which a request belongs. *Source*: W3C Trace
Context."""

VARIABLE = "TRACEPARENT"
"""The environment variable with the trace and span to which a program belongs. *Source*:
OpenTelemetry, "Environment variables as context propagation carriers"."""

INCOMING: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The unparsed header `traceparent` of the current request, or None."""

_FORM = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_W3C_ID = re.compile(r"(?!0{32})[0-9a-f]{32}", re.ASCII)


def read_traceparent(text: object) -> TraceParent | None:
    """Parse the header `traceparent`. If the header is invalid, return None, and the call begins a
    new trace.
    """
    match = _FORM.fullmatch(text) if isinstance(text, str) and len(text) <= 200 else None
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceParent(match[2], match[3], f"{int(match[4], 16) & 1:02x}")


@contextmanager
def incoming(text: object) -> Iterator[None]:
    """While the block runs, let new calls continue the trace that `text`, the value of a
    `traceparent` header, names. An invalid `text` has no effect.
    """
    token = INCOMING.set(text) if isinstance(text, str) and read_traceparent(text) else None
    try:
        yield
    finally:
        if token is not None:
            INCOMING.reset(token)


def span_id_of(call_id: str) -> str:
    """Return the id of a call's span, which is derived from the call's id."""
    return hashlib.sha256(call_id.encode()).hexdigest()[:16]


def context_of(trace_id: str, call_id: str, parent: TraceParent | None) -> TraceParent:
    """Return the ids of a call's trace and span. They are sent to the services that the call uses.

    `parent` is the caller's trace and span, or None. If `parent` is given, the call belongs to the
    caller's trace. Otherwise, the trace's id is `trace_id`, or the hash of `trace_id` if `trace_id`
    does not have W3C's format.
    """
    if parent is not None:
        return TraceParent(parent.trace_id, span_id_of(call_id), parent.flags)
    if not _W3C_ID.fullmatch(trace_id):
        trace_id = hashlib.sha256(trace_id.encode()).hexdigest()[:32]
    return TraceParent(trace_id, span_id_of(call_id), "01")
