"""Tracing: where calls stand in traces, and the spans that are made of them."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import CapturingLogger

from fumehood.core.call import TraceParent
from fumehood.observe.ended_call import EndedStage, EndedTrace
from fumehood.observe.trace_context import context_of, read_traceparent, span_id_of
from fumehood.sight.spans import BURST_S, TIME_SHARE, CallSpans, otlp_provider

pytestmark = pytest.mark.row("D5")

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_traceparent_round_trips() -> None:
    assert str(read_traceparent(PARENT)) == PARENT
    newer = read_traceparent(f"cc-{TRACE}-b7ad6b7169203331-03-what-will-be")
    assert str(newer) == PARENT


@pytest.mark.parametrize(
    "text",
    [
        "", None, 7, "00", PARENT.upper(), PARENT + "-more", PARENT + "\n", " " + PARENT,
        f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[1:]}-b7ad6b7169203331-01",
        f"cc-{TRACE}-b7ad6b7169203331-01-{'x' * 4096}", PARENT.replace("0", "\u0660"),
    ],
)  # fmt: skip
def test_what_is_no_header_begins_no_trace(text: object) -> None:
    assert read_traceparent(text) is None


def test_non_w3c_trace_id_is_hashed() -> None:
    assert context_of(TRACE, "call_1", None).trace_id == TRACE
    for other in ("trace_20260101_aaaaaaaaaaaa", "0" * 32, TRACE.upper()):
        hashed = context_of(other, "call_1", None).trace_id
        assert len(hashed) == 32
        assert hashed not in (other, "0" * 32)


def test_unsampled_trace_stays_unsampled() -> None:
    parent = TraceParent(TRACE, "b7ad6b7169203331", "00")
    assert str(context_of("mine", "call_1", parent)) == f"00-{TRACE}-{span_id_of('call_1')}-00"


class Exported:
    """Spans that stay in memory."""

    def __init__(self) -> None:
        self.time = 0.0
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.spans = CallSpans(self.provider, lambda: self.time)


def ended(call_id: str = "call_1", parent: TraceParent | None = None, **more: object) -> EndedTrace:
    trace = EndedTrace(
        tool="calculator",
        call_id=call_id,
        span=context_of("trace_1", call_id, parent),
        parent_span=parent.span_id if parent is not None else None,
        code="OK",
        attributes={"fumehood.retries": 1},
        stages=[EndedStage("resolve", 10, 11), EndedStage("execute", 11, 14, {"a": "b"})],
    )
    return replace(trace, **more)  # type: ignore[arg-type]


def test_call_without_a_parent_starts_the_propagated_trace() -> None:
    exported = Exported()
    told = ended()
    exported.spans.record(told)
    call = exported.exporter.get_finished_spans()[-1]
    assert call.parent is None
    assert f"{call.context.trace_id:032x}" == told.span.trace_id


def test_span_of_a_failed_call_has_its_error_code() -> None:
    exported = Exported()
    exported.spans.record(ended(code="TIMEOUT"))
    call = exported.exporter.get_finished_spans()[-1]
    assert (call.attributes or {})["error.type"] == "TIMEOUT"
    assert not call.status.is_ok


def test_unsampled_call_has_no_spans() -> None:
    exported = Exported()
    exported.spans.record(ended(parent=TraceParent(TRACE, "b7ad6b7169203331", "00")))
    assert exported.exporter.get_finished_spans() == ()


def test_second_engine_in_a_process_has_correct_span_ids() -> None:
    exported = Exported()
    for spans in (exported.spans, CallSpans(exported.provider, lambda: 0.0), exported.spans):
        exported.exporter.clear()
        spans.record(ended("call_2"))
        call = exported.exporter.get_finished_spans()[-1]
        assert call.context.span_id == int(span_id_of("call_2"), 16)


def test_span_recording_is_limited_to_its_share_of_time() -> None:
    exported = Exported()
    made = 0
    for _ in range(10_000):  # each call takes a millisecond, and its spans take half of one
        exported.time += 0.001
        if exported.spans.wants():
            made += 1
            exported.spans._monotonic = lambda: _advanced(exported)
            exported.spans.record(ended())
            exported.spans._monotonic = lambda: exported.time
    most = (BURST_S + exported.time * TIME_SHARE) / 0.0005
    assert 0.9 * most < made <= most + 1
    assert exported.spans.left_out == 10_000 - made
    exported.time += 60
    assert exported.spans.wants()


def _advanced(exported: Exported) -> float:
    """A clock on which each look takes half a millisecond."""
    exported.time += 0.0005
    return exported.time


# -- where spans go -------------------------------------------------------------------------


def test_no_otlp_provider_without_its_variable() -> None:
    log = CapturingLogger()
    assert otlp_provider({"OTEL_SERVICE_NAME": "x"}, log) is None
    assert log.calls == []


def test_missing_otlp_extra_is_logged_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert importlib.util.find_spec("opentelemetry.exporter.otlp") is not None
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    log = CapturingLogger()
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert otlp_provider(endpoint, log) is None
    (call,) = log.calls
    assert (call.method_name, call.args) == ("warning", ("traces.not_sent",))
    assert "'PATH_OF_THE_CHECKOUT[otel]'" in call.kwargs["remedy"]
