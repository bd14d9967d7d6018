"""The spans of calls that have ended.

Host side. Only this module knows the names of OpenTelemetry's attributes. To create spans, it needs
only OpenTelemetry's API, which it imports at that time. The ids of a call's span come from
`observe/trace_context.py`, and are the same after a restart. Spans are created after the call has
ended, from the times that were measured. So a call that waited for a human has one span, even if
the engine was restarted meanwhile. Invariants: arguments, results and names of unknown tools are
never attributes; spans take a bounded part of the engine's time. *Source*: OpenTelemetry's semantic
conventions for generative AI.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fumehood.core.call import TraceParent
from fumehood.observe.ended_call import EndedTrace
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
"""The maximum share of the engine's time that is spent on creating spans. Sending the spans takes
about twice as much time, in a thread. If there are too many calls, some calls get no spans."""

BURST_S = 0.05
"""Maximum seconds of the time allowed by `TIME_SHARE` that may be used at once."""

SHUTDOWN_S = 2.0
"""Seconds that a stopping engine waits for unsent spans."""


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
        """Return whether the spans of one more call can be created now.

        Creating spans can take at most the share `TIME_SHARE` of the engine's time. If this share
        is used up, count the call in `left_out`, and return False.
        """
        now = self._monotonic()
        self._left_s = min(BURST_S, self._left_s + (now - self._looked_at) * TIME_SHARE)
        self._looked_at = now
        if self._left_s <= 0:
            self.left_out += 1
            return False
        return True

    def record(self, told: EndedTrace) -> None:
        """Create a span for the call that `told` describes, and a span for each of its stages."""
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
            context=_remote(told.span, told.parent_span),
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
        """Replace the tracer's id generator by one with which this object can set the ids of new
        spans.

        If another engine in this process has already replaced it, use that generator. If the tracer
        does not belong to OpenTelemetry's SDK, do nothing.
        """
        tracer: Any = self._tracer
        if not hasattr(tracer, "id_generator"):
            return
        if hasattr(tracer.id_generator, "next_span"):  # replaced by another engine in this process
            self._ids = tracer.id_generator
            return
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class ChosenIds(RandomIdGenerator):
            """An id generator that gives the next span the id `next_span`. If the span begins a new
            trace, the trace gets the id `next_trace`. Without these ids, it generates random ids.
            """

            next_span: int | None = None
            next_trace: int | None = None

            def generate_span_id(self) -> int:
                chosen, self.next_span = self.next_span, None
                return chosen or super().generate_span_id()

            def generate_trace_id(self) -> int:
                return self.next_trace or super().generate_trace_id()

        self._ids = tracer.id_generator = ChosenIds()


def _remote(span: TraceParent, parent_span: str | None) -> Context:
    """Return the context in which to create the span `span` of a call. The context contains the
    parent span, which has the id `parent_span` and the trace of `span`. If `parent_span` is None,
    the context is empty.
    """
    from opentelemetry import trace
    from opentelemetry.context import Context

    if parent_span is None:
        return Context()
    flags = trace.TraceFlags(int(span.flags, 16))
    parent = trace.SpanContext(int(span.trace_id, 16), int(parent_span, 16), True, flags)
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def otlp_provider(environment: Mapping[str, str], log: Logger) -> TracerProvider | None:
    """Return a provider that sends spans to the collector that the environment names.

    Return None if the environment names no collector. Log the reason and return None if the
    provider cannot be created, for example without the extra `otel`. OpenTelemetry's own
    environment variables configure everything else.
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
