"""Tracing: the place of a call in a distributed trace, and its spans when it has ended.

Host side. Only this module knows the names of OpenTelemetry's attributes. It needs only
OpenTelemetry's API, which it imports when it creates spans. The ids of a call's span are derived
from the ids of the call. So they are known from the beginning, to be sent to the services that the
call reaches, and are the same after a restart. Spans are created from measured times when the call
has ended: a call that waited for a human has one span, even if the engine was restarted meanwhile.
Invariants: arguments, results and names of unknown tools are never attributes; spans take a bounded
part of the engine's time.
*Source*: W3C Trace Context; OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fumehood.core.call import TraceParent
from fumehood.observe.log import Logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

OPERATION = "gen_ai.operation.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
CALL_ID = "gen_ai.tool.call.id"
ERROR_TYPE = "error.type"
EXECUTE_TOOL = "execute_tool"
"""The value of `OPERATION`, which is also the beginning of the span's name."""

TIME_SHARE = 0.002
"""The part of its time that the engine may spend on creating spans. Sending them takes about twice
as much, in a thread. If there are too many calls, some get no spans."""

BURST_S = 0.05
"""Seconds of that time that may be spent at once."""

SHUTDOWN_S = 2.0
"""Seconds that a stopping engine waits for unsent spans."""

HEADER = "traceparent"
"""The header with a request's trace and span. *Source*: W3C Trace Context."""

VARIABLE = "TRACEPARENT"
"""The environment variable with a program's trace and span. *Source*: OpenTelemetry, "Environment
variables as context propagation carriers"."""

INCOMING: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The header `traceparent` of the current request, unparsed."""

_FORM = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?",
    re.ASCII,
)
_W3C_ID = re.compile(r"(?!0{32})[0-9a-f]{32}", re.ASCII)


def read_traceparent(text: object) -> TraceParent | None:
    """Parse the header `traceparent`. Return None if it is invalid: then a new trace begins
    here."""
    match = _FORM.fullmatch(text) if isinstance(text, str) and len(text) <= 200 else None
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceParent(match[2], match[3], f"{int(match[4], 16) & 1:02x}")


@contextmanager
def incoming(text: object) -> Iterator[None]:
    """Make the calls inside this context part of the trace of a `traceparent`, if it is valid."""
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
    """Return the trace and span of a call, for the services that it calls.

    A trace id that does not have W3C's form is hashed.
    """
    if parent is not None:
        return TraceParent(parent.trace_id, span_id_of(call_id), parent.flags)
    if not _W3C_ID.fullmatch(trace_id):
        trace_id = hashlib.sha256(trace_id.encode()).hexdigest()[:32]
    return TraceParent(trace_id, span_id_of(call_id), "01")


@dataclass(frozen=True, slots=True)
class EndedStage:
    """One stage of a call. Its times are in seconds since 1970."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """The data for the spans of one call. `parent_id` is the id of its parent span, or None."""

    tool: str
    call_id: str
    span: TraceParent
    parent_id: str | None
    code: str
    attributes: Mapping[str, str | int | bool]
    stages: Sequence[EndedStage]


class CallSpans:
    """Creates the spans of calls with a provider of OpenTelemetry's SDK or of another library."""

    def __init__(self, provider: TracerProvider, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._left_s = BURST_S
        self._looked_at = monotonic()
        self._tracer: Tracer = provider.get_tracer("fumehood")
        self._ids: Any = None
        self._take_ids()
        self.left_out = 0
        """Number of calls that got no spans because there was no time for them."""

    def wants(self) -> bool:
        """Whether there is time for the spans of one more call."""
        now = self._monotonic()
        self._left_s = min(BURST_S, self._left_s + (now - self._looked_at) * TIME_SHARE)
        self._looked_at = now
        if self._left_s <= 0:
            self.left_out += 1
            return False
        return True

    def record(self, told: EndedTrace) -> None:
        """Create the span of a call, and one for each of its stages."""
        began = self._monotonic()
        try:
            self._make(told)
        finally:
            self._left_s -= self._monotonic() - began

    def _make(self, told: EndedTrace) -> None:
        from opentelemetry import trace

        failure = {ERROR_TYPE: told.code} if told.code != "OK" else {}
        attributes = {
            OPERATION: EXECUTE_TOOL,
            TOOL_NAME: told.tool,
            TOOL_TYPE: "function",
            CALL_ID: told.call_id,
        }
        if self._ids is not None:
            self._ids.next_span = int(told.span.span_id, 16)
            self._ids.next_trace = int(told.span.trace_id, 16)
        root = self._tracer.start_span(
            f"{EXECUTE_TOOL} {told.tool}",
            context=_remote(told.span, told.parent_id),
            start_time=_ns(min((s.began for s in told.stages), default=0.0)),
            attributes={**attributes, **failure, **told.attributes},
        )
        if root.is_recording():
            if failure:
                root.set_status(trace.StatusCode.ERROR, told.code)
            inside = trace.set_span_in_context(root)
            for stage in told.stages:
                part = self._tracer.start_span(
                    stage.name, inside, attributes=stage.attributes, start_time=_ns(stage.began)
                )
                part.end(_ns(stage.ended))
        root.end(_ns(max((s.ended for s in told.stages), default=0.0)))

    def _take_ids(self) -> None:
        """Replace the tracer's id generator by one that uses chosen ids, if the tracer is the
        SDK's."""
        tracer: Any = self._tracer
        if not hasattr(tracer, "id_generator"):
            return
        if hasattr(tracer.id_generator, "next_span"):  # replaced by another engine in this process
            self._ids = tracer.id_generator
            return
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class ChosenIds(RandomIdGenerator):
            """Uses the chosen ids for the next span, and for its trace if it begins one."""

            next_span: int | None = None
            next_trace: int | None = None

            def generate_span_id(self) -> int:
                chosen, self.next_span = self.next_span, None
                return chosen or super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.next_trace or super().generate_trace_id()

        self._ids = tracer.id_generator = ChosenIds()


def _remote(span: TraceParent, parent_id: str | None) -> Context:
    """Return the context in which a call's span starts: below its parent, or as a new root."""
    from opentelemetry import trace
    from opentelemetry.context import Context

    if parent_id is None:
        return Context()
    flags = trace.TraceFlags(int(span.flags, 16))
    parent = trace.SpanContext(int(span.trace_id, 16), int(parent_id, 16), True, flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def otlp_provider(environment: Mapping[str, str], log: Logger) -> TracerProvider | None:
    """Return a provider that sends spans to the collector that the environment names, or None.

    None if it names no collector, or if the extra `otel` is missing, which is logged.
    OpenTelemetry's own variables configure everything else about the provider.
    """
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if not any(environment.get(name) for name in names):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = environment.get("OTEL_SERVICE_NAME") or "fumehood"
        provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: named}), shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ImportError:
        log.warning(
            "traces.not_sent",
            message=f"{names[0]} is set, but the packages that send traces are not installed.",
            remedy="Install them: pip install 'PATH_OF_THE_CHECKOUT[otel]'; or unset it.",
        )
        return None
    except Exception as fault:  # a variable that OpenTelemetry does not understand
        log.warning("traces.not_sent", message=f"Traces are not sent: {type(fault).__name__}.")
        return None
    return provider


def close_provider(provider: Any) -> None:
    """Send the remaining spans, for a bounded time, and shut the provider down."""
    ending = threading.Thread(target=provider.shutdown, daemon=True)
    ending.start()
    ending.join(SHUTDOWN_S)


__all__ = [
    "HEADER",
    "INCOMING",
    "VARIABLE",
    "CallSpans",
    "EndedStage",
    "EndedTrace",
    "close_provider",
    "context_of",
    "incoming",
    "otlp_provider",
    "read_traceparent",
    "span_id_of",
]
