"""The envelope: its golden files, its errors and its usage."""

from __future__ import annotations

import json
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fumehood import FumehoodError
from fumehood.core.envelope import (
    CallFailed,
    Envelope,
    ErrorInfo,
    LimitsApplied,
    Metadata,
    Performance,
    Resources,
    SandboxReport,
    UsageReport,
)
from fumehood.core.errors import EndedBy
from fumehood.core.returned_file import returned_files
from fumehood.core.usage import EstimatingCounter, TextKind, money
from fumehood.protocol.messages import decode_envelope, encode_envelope
from support.answers import error_of

GOLDEN = Path(__file__).parent / "golden"


def _metadata(**fields: Any) -> Metadata:
    values: dict[str, Any] = {
        "tool_name": "calculator",
        "tool_version": "1.0.0",
        "call_id": "call_0",
        "trace_id": "trace_20260101_0123456789ab",
        "timestamp": "2026-01-01T00:00:00.000Z",
        "execution_time_ms": 1.9,
        "performance": Performance(total_ms=1.9),
        "sandbox": None,
        "resources": Resources(),
        "usage": UsageReport(),
    }
    return Metadata(**{**values, **fields})


def _success(**fields: Any) -> Envelope:
    metadata = _metadata(
        performance=Performance(
            total_ms=1.9,
            validation_ms=0.1,
            queue_ms=0.0,
            approval_ms=0.0,
            processing_ms=1.2,
            network_ms=0.0,
        ),
        sandbox=SandboxReport(
            placement="interpreter",
            isolation="resident",
            ended_by=EndedBy.OK,
            limits=LimitsApplied(timeout_seconds=5, memory_mb=64),
        ),
        resources=Resources(cpu_ms=0.7, output_bytes=2),
        usage=UsageReport(input_tokens=9, output_tokens=3),
    )
    return Envelope(
        **{
            "success": True,
            "status": "success",
            "data": {"value": 4, "text": "4"},
            "error": None,
            "metadata": metadata,
            **fields,
        }
    )


def _error(**fields: Any) -> Envelope:
    info = ErrorInfo(
        code="INVALID_PARAMS",
        message="The arguments are wrong: expression is required.",
        retryable=False,
        human_review=False,
        fields=("expression",),
    )
    return Envelope(success=False, status="error", data={}, error=info, metadata=_metadata())


@pytest.mark.row("E1")
@pytest.mark.parametrize(("name", "envelope"), [("success", _success()), ("error", _error())])
def test_envelope_equals_its_golden_file(name: str, envelope: Envelope) -> None:
    golden = (GOLDEN / f"{name}.json").read_text(encoding="utf-8")
    shown = json.dumps(json.loads(encode_envelope(envelope)), indent=2) + "\n"
    assert shown == golden


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fields", ("a",)),
        ("retry_after_ms", 0),
        ("max_retries", 0),
        ("approval_id", "a"),
        ("approval_url", "a"),
        ("replacement", "a"),
        ("sunset_date", "2026-01-01"),
        ("migration_guide", "a"),
        ("details", {}),
    ],
)
def test_error_keeps_applicable_zero_or_empty_fields(key: str, value: Any) -> None:
    values: dict[str, Any] = {
        "code": "A_B",
        "message": "m",
        "retryable": False,
        "human_review": False,
        key: value,
    }
    assert ErrorInfo(**values).model_dump() == values


@pytest.mark.row("E1")
@pytest.mark.parametrize("envelope", [_success(), _error(), _success(debug_info={"a": 1})])
def test_envelope_round_trips_through_json(envelope: Envelope) -> None:
    assert decode_envelope(encode_envelope(envelope)) == envelope


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"success": true}',
        encode_envelope(_success()).replace(b'"success",', b'"maybe",', 1),
        encode_envelope(_success()).replace(b'{"success"', b'{"more":1,"success"', 1),
    ],
)
def test_malformed_envelope_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode_envelope(body)


def test_raise_for_error_raises_a_failure_with_its_envelope() -> None:
    assert (good := _success()).raise_for_error() is good
    envelope = _error()
    with pytest.raises(CallFailed, match="expression is required") as raised:
        envelope.raise_for_error()
    failed = raised.value
    assert isinstance(failed, FumehoodError)
    assert failed.envelope is envelope
    assert (failed.code, failed.retryable) == ("INVALID_PARAMS", False)
    assert failed.message == str(failed)
    assert pickle.loads(pickle.dumps(failed)).envelope == envelope


INLINE = {"filename": "a.png", "content_type": "image/png", "size": 3, "content_base64": "UE5H"}
FAR = {"filename": "b.png", "content_type": "image/png", "size": 2_000_000, "url": "/v1/blobs/b"}
TRUNCATED = {
    "stdout": "a…z", "a": {"b": ["x", "y…"]}, "value": None,
    "truncation_info": {
        "fields": [
            {"field": "stdout", "resource_url": "/v1/blobs/x"},
            {"field": "a.b.1", "not_kept": "the disk is full"},
            {"field": "value", "resource_url": "/v1/blobs/y"},
        ]
    },
}  # fmt: skip


@pytest.mark.row("E6")
@pytest.mark.parametrize(
    "own",
    ["words", [1], {"fields": 5}, {"fields": "stdout"}, {"fields": [1, None, {"field": 7}, {}]}],
)
def test_truncation_info_of_a_tool_itself_is_ignored(own: Any) -> None:
    envelope = _success(data={"stdout": "all", "truncation_info": own})
    assert envelope.shortened("stdout") is None


@pytest.mark.row("E6")
def test_shortened_field_has_a_link_to_its_full_value() -> None:
    envelope = _success(data=TRUNCATED)
    assert envelope.shortened("stdout") == "/v1/blobs/x"
    assert envelope.shortened("a.b.0") is None
    assert envelope.at("a.b.0") == "x"
    assert envelope.read_whole("stdout", b"[1]") == "[1]"
    assert envelope.read_whole("value", b"[1]") == [1]
    with pytest.raises(ValueError, match="not kept: the disk is full"):
        envelope.shortened("a.b.1")
    for missing in ("no", "a.b.2", "a.b.x", "stdout.a", ""):
        with pytest.raises(ValueError, match="has no"):
            envelope.shortened(missing)


LOST = {"filename": "c.bin", "content_type": "application/x", "size": 5, "not_kept": "no room"}


@pytest.mark.row("E7")
def test_figures_are_objects_displayable_in_a_notebook() -> None:
    inline, far = _success(data={"images": [INLINE, FAR]}).images
    assert (inline.filename, inline.content_type, inline.size) == ("a.png", "image/png", 3)
    assert inline.data == inline._repr_png_() == b"PNG"
    assert far.data is far._repr_png_() is None
    assert far.url == "/v1/blobs/b"
    assert "PNG" not in repr(inline)


@pytest.mark.row("E7")
def test_figures_of_a_failed_program_are_available() -> None:
    envelope = _error()
    assert envelope.images == ()
    error = error_of(envelope).model_copy(update={"details": {"images": [INLINE]}})
    assert envelope.model_copy(update={"error": error}).images[0].data == b"PNG"


@pytest.mark.row("E7")
def test_files_are_objects_without_image_display() -> None:
    text = {**INLINE, "filename": "a.txt", "content_type": "text/plain"}
    first, lost = _success(data={"files": [text, LOST]}).files
    assert (first.data, first._repr_png_()) == (b"PNG", None)
    assert (lost.data, lost.url) == (None, None)
    (broken,) = _success(data={"files": [{**text, "content_base64": "<no base64>"}]}).files
    assert broken.data is None


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"images": None},
        {"images": "a.png"},
        {"images": {"filename": "a.png"}},
        {"images": [1, None, {"filename": 1, "content_type": "image/png"}, {"filename": "a"}]},
    ],
)
def test_malformed_figure_is_left_out(data: dict[str, Any]) -> None:
    assert _success(data=data).images == ()


# -- Usage ---------------------------------------------------------------------------------


@pytest.mark.row("E2")
@pytest.mark.parametrize(
    ("kind", "characters", "tokens"),
    [
        ("text", 0, 0),
        ("text", 1, 1),
        ("text", 4, 1),
        ("text", 5, 2),
        ("json", 7, 2),
        ("json", 8, 3),
        ("markdown", 7, 2),
        ("code", 2, 1),
        ("code", 3, 2),
    ],
)
def test_tokens_are_estimated_by_the_documented_ratios(
    kind: str, characters: int, tokens: int
) -> None:
    assert EstimatingCounter().count("x" * characters, TextKind(kind)) == tokens
    assert EstimatingCounter().estimated is True


@pytest.mark.row("E3")
@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0", "0.000000"),
        ("0.1", "0.100000"),
        ("1E-7", "0.000000"),
        ("0.0000005", "0.000000"),
        ("0.0000015", "0.000002"),
        ("1E+3", "1000.000000"),
        ("123456789.1234567", "123456789.123457"),
    ],
)
def test_money_has_six_decimal_places_and_no_exponent(amount: str, shown: str) -> None:
    assert money(Decimal(amount)) == shown


@pytest.mark.parametrize(("size", "shown"), [(7, 7), (True, 2), ("7", 2), (None, 2)])
def test_size_of_a_returned_file_is_a_number(size: object, shown: int) -> None:
    item = {"filename": "a", "content_type": "text/plain", "content_base64": "aGk=", "size": size}
    (file,) = returned_files([item])
    assert (file.size, type(file.size)) == (shown, int)
