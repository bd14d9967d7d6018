"""Results: size and schema checks, truncation of long texts, and exact usage and cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fumehood import Config, Engine, ToolError, tool
from fumehood.core.envelope import UsageReport
from fumehood.core.errors import (
    ArgumentsRefused,
    EndedBy,
    EngineError,
    ExecutionError,
    RateLimited,
    code_of,
)
from fumehood.core.limits import Limits
from fumehood.core.usage import EstimatingCounter, Prices
from fumehood.executors.outcome import CutText, Outcome
from fumehood.pipeline.result import (
    INLINE_BYTES,
    ShapedOutcome,
    account,
    head_and_tail,
    redact_error,
    shape,
    shape_error,
    shorten,
    shortened,
)
from fumehood.protocol import strict_json
from fumehood.redaction.redactor import Redactor
from fumehood.storage.blobs import BlobStore
from fumehood.testing import FakeWall
from support.blobs import blob_store, read_blob
from support.definitions import function_definition, registered

pytestmark = pytest.mark.anyio


@dataclass
class Pair:
    left: int
    right: int


class City(BaseModel):
    name: str


def _shape(data: Any, max_bytes: int = 1000, **fields: Any) -> ShapedOutcome:
    tool = registered(function_definition(**fields))
    return shape(Outcome(EndedBy.OK, "none", data=data), tool, max_bytes, Redactor())


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"a": 1}, {"a": 1}),
        ({}, {}),
        (4, {"value": 4}),
        (None, {"value": None}),
        ("text", {"value": "text"}),
        ([1, 2], {"value": [1, 2]}),
        ((1, 2), {"value": [1, 2]}),
        ({1}, {"value": [1]}),
        (date(2026, 1, 2), {"value": "2026-01-02"}),
        (Decimal("1.50"), {"value": "1.50"}),
        (City(name="Bonn"), {"name": "Bonn"}),
        (Pair(1, 2), {"left": 1, "right": 2}),
        ({"city": City(name="Bonn")}, {"city": {"name": "Bonn"}}),
        ({1: "a"}, {"1": "a"}),
        ("\U0001f600", {"value": "\U0001f600"}),
        ("a\x00b", {"value": "a\x00b"}),
    ],
)
def test_python_value_becomes_a_json_object(value: Any, data: Any) -> None:
    shaped = _shape(value)
    assert shaped.outcome.error is None
    assert shaped.data == data


@pytest.mark.row("S4")
def test_result_at_size_limit_passes_and_one_byte_more_is_refused() -> None:
    exact = len('{"value":"xxxx"}')
    assert _shape("xxxx", exact).outcome.error is None
    refused = _shape("xxxx", exact - 1)
    assert refused.outcome.error.code == "OUTPUT_LIMIT_EXCEEDED"
    assert refused.outcome.ended_by is EndedBy.OUTPUT


@pytest.mark.row("T1")
def test_output_schema_violation_is_an_execution_error_with_path() -> None:
    promise = {"required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert _shape({"a": 1}, output_schema=promise).outcome.error is None
    for wrong in ({"a": "SECRET"}, {}, "SECRET"):
        error = _shape(wrong, output_schema=promise).outcome.error
        assert error.code == "EXECUTION_ERROR"
        assert "(a)" in error.message
        assert "SECRET" not in error.message


@pytest.mark.row("E1")
def test_error_info_has_only_applicable_fields() -> None:
    extra = {"replacement": "act_2", "migration_guide": None}
    error = RateLimited("Slow down.", retry_after_ms=5, fields=["a"], details={"b": 1}, extra=extra)
    assert shape_error(error).model_dump() == {
        "code": "RATE_LIMITED",
        "message": "Slow down.",
        "retryable": True,
        "human_review": False,
        "fields": ("a",),
        "retry_after_ms": 5,
        "details": {"b": 1},
        "replacement": "act_2",
    }


@pytest.mark.row("E8")
def test_key_in_long_tool_message_is_redacted_before_truncation() -> None:
    key = "ghp_" + "a1B2" * 9
    error = ToolError("BAD", "w " * 985 + key + " rest" * 50)
    failed = Outcome(EndedBy.EXCEPTION, "none", error=error)
    shaped = shape(failed, registered(function_definition()), 1000, Redactor())
    assert "ghp_" not in shaped.outcome.error.message
    assert "[redacted]" in shaped.outcome.error.message
    assert shaped.outcome.redacted == 1


@pytest.mark.row("E8")
def test_key_in_tool_error_code_and_argument_names_is_redacted() -> None:
    key = "AKIA" + "IOSFODNN7EXAMPLE"
    failed = Outcome(EndedBy.EXCEPTION, "none", error=ToolError(key, "No."))
    shaped = shape(failed, registered(function_definition()), 1000, Redactor())
    assert shaped.outcome.error is not None
    assert code_of(shaped.outcome.error) == "[redacted]"
    assert shaped.outcome.redacted == 1
    refused = ArgumentsRefused("No.", fields=["a", key])
    assert redact_error(refused, Redactor()) == 1
    assert refused.fields == ("a", "[redacted]")


# -- long texts ----------------------------------------------------------------------------


OWNER = "uid:1"
LONG = "head " + "x" * 30_000 + " tail"


@pytest.fixture
async def store(home: Path) -> AsyncIterator[BlobStore]:
    async with blob_store(home) as made:
        yield made


async def _short(store: BlobStore, data: Any, **how: Any) -> dict[str, Any]:
    shaped = ShapedOutcome(Outcome(EndedBy.OK, "call", data=data), data, "")
    found = await shorten(shaped, blobs=store, **{"principal_id": OWNER, **how})
    assert found.text in ("", strict_json.dumps(found.data).decode())
    return found.data


async def _whole(store: BlobStore, url: str) -> str:
    return (await read_blob(store, url)).decode()


@pytest.mark.row("E6")
@pytest.mark.parametrize(
    "data",
    [{}, {"a": "x" * INLINE_BYTES}, {"a": "ä" * (INLINE_BYTES // 2)}, {"a": ["x" * 9000] * 5, "b": 1},
     {"value": list(range(10_000))},
     {"filename": "a", "content_base64": "x" * 50_000},
     {"files": [{"filename": "a", "content_base64": "x" * 50_000}]}],
    ids=lambda data: str(data)[:30],
)  # fmt: skip
async def test_short_text_and_non_text_data_is_not_truncated(store: BlobStore, data: Any) -> None:
    assert await _short(store, data) == data
    assert store.room.share.total == 0


@pytest.mark.row("E6")
async def test_long_text_is_truncated_in_the_middle_with_a_blob_link(
    store: BlobStore,
) -> None:
    data = await _short(store, {"stdout": LONG, "more": 1})
    assert data["stdout"].startswith("head xxx")
    assert data["stdout"].endswith("xxx tail")
    assert len(data["stdout"]) <= INLINE_BYTES
    assert data["more"] == 1
    assert data["truncated"] is True
    info = data["truncation_info"]
    assert (info["original_length"], info["returned_length"]) == (len(LONG), len(data["stdout"]))
    assert (
        info["summary"]
        == f"stdout has {len(LONG)} characters, of which the beginning and end are here."
    )
    assert await _whole(store, data["resource_url"]) == LONG
    (field,) = info["fields"]
    assert (field["field"], field["resource_url"]) == ("stdout", data["resource_url"])
    assert field["expires_at"] == "2026-01-01T00:01:00.000Z"


@pytest.mark.row("E6")
async def test_several_long_texts_have_one_blob_link_each(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG, "b": {"c": ["short", LONG + "!"]}})
    info = data["truncation_info"]
    assert [field["field"] for field in info["fields"]] == ["a", "b.c.1"]
    assert data["b"]["c"][0] == "short"
    assert data["b"]["c"][1].endswith("tail!")
    assert info["original_length"] == 2 * len(LONG) + 1
    assert data["resource_url"] == info["fields"][0]["resource_url"]
    assert await _whole(store, info["fields"][1]["resource_url"]) == LONG + "!"


@pytest.mark.row("E6")
@pytest.mark.row("S7")
async def test_long_code_value_is_replaced_by_a_blob_link(store: BlobStore) -> None:
    value = list(range(10_000))
    data = await _short(store, {"value": value, "value_repr": "[…]"}, with_value=True)
    assert (data["value"], data["value_repr"]) == (None, "[…]")
    assert strict_json.loads((await _whole(store, data["resource_url"])).encode()) == value
    assert data["truncation_info"]["fields"][0]["returned_length"] == 0
    short = {"value": [1]}
    assert await _short(store, short, with_value=True) == short


@pytest.mark.row("E6")
async def test_error_details_are_truncated_like_data(store: BlobStore) -> None:
    error: EngineError = ExecutionError("No.", details={"stdout": LONG})
    shaped = ShapedOutcome(Outcome(EndedBy.EXCEPTION, "call", error=error), {}, "")
    found = await shorten(shaped, blobs=store, principal_id=OWNER)
    assert found.details["truncated"] is True
    assert await _whole(store, found.details["resource_url"]) == LONG
    assert error.details == {"stdout": LONG}
    assert found.data == {}


@pytest.mark.row("E6")
async def test_truncated_text_without_storage_reports_why_it_is_not_kept(store: BlobStore) -> None:
    data = await _short(store, {"a": LONG * 20})
    assert "resource_url" not in data
    assert "your share" in data["truncation_info"]["fields"][0]["not_kept"]
    assert data["a"].startswith("head")


@pytest.mark.row("E6")
@given(st.text("ä😀x\n€", min_size=1, max_size=12), st.text(max_size=3))
def test_truncated_text_keeps_true_ends_and_fits_for_any_characters(part: str, start: str) -> None:
    text = start + part * (INLINE_BYTES // len(part.encode()) + 1)
    shown = head_and_tail(text)
    head, rest = shown.split("\n… ", 1)
    missing, tail = rest.split(" characters left out …\n", 1)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(missing) + len(tail) == len(text)
    assert len(shown.encode("utf-8", "replace")) <= INLINE_BYTES


@pytest.mark.row("E6")
def test_shortened_truncates_long_texts_without_storage() -> None:
    assert shortened({"a": "x", "b": {"c": LONG}})["b"]["c"].endswith("tail")
    short = {"a": "x"}
    assert shortened(short) is short


@tool(sandboxed=False)
async def talk(n: int) -> dict[str, Any]:
    """Say much.

    Args:
        n: How much.
    """
    return {"text": "w" * n}


@pytest.mark.row("E6")
@pytest.mark.row("D1")
async def test_embedded_engine_truncates_long_result_and_keeps_full_text(
    home: Path,
) -> None:
    async with Engine(tools=[talk], config=Config(home=home), interpreter=FakeWall()) as engine:
        envelope = await engine.call("talk", {"n": 50_000})
        assert envelope.data["truncated"] is True
        assert await engine.blob(envelope.data["resource_url"]) == b"w" * 50_000
        (field,) = envelope.data["truncation_info"]["fields"]
        assert await engine.whole(envelope, field["field"]) == "w" * 50_000
        assert envelope.metadata.usage.output_tokens < 4000
        with pytest.raises(ValueError, match="not the address"):
            await engine.blob("/v1/health")
        asked = await engine.call("talk", {"n": 500}, max_length=100, return_summary=False)
        assert len(asked.data["text"]) <= 100
        assert asked.data["truncation_info"]["summary"] is None
        assert await engine.blob(asked.data["resource_url"]) == b"w" * 500


@pytest.mark.row("E6")
@pytest.mark.row("S8")
@pytest.mark.parametrize("link", [{"resource_url": "/v1/blobs/x"}, {"not_kept": "no room"}])
async def test_text_cut_by_the_wall_is_reported_like_other_truncation(
    store: BlobStore, link: dict[str, Any]
) -> None:
    """Twin of a long text: the same note, but no second copy is stored."""
    data = {"stdout": "", "other": "x" * 20_000}
    cut = CutText("stdout", "h" * 9000, "t" * 9000, 10**9, link)
    shaped = ShapedOutcome(Outcome(EndedBy.OK, "call", data=data, cuts=(cut,)), data, "")
    short = (await shorten(shaped, blobs=store, principal_id=OWNER)).data
    missing = 10**9 - 2 * 5000
    assert short["stdout"] == f"{'h' * 5000}\n… {missing} characters left out …\n{'t' * 5000}"
    first, second = short["truncation_info"]["fields"]
    assert (first["field"], first["original_length"]) == ("stdout", 10**9)
    assert first.items() >= link.items()
    assert second["field"] == "other"
    assert short["truncation_info"]["original_length"] == 10**9 + 20_000
    assert short["resource_url"] == link.get("resource_url", second["resource_url"])
    assert store.room.share.total == 20_000
    shorter = await shorten(shaped, blobs=store, principal_id=OWNER, max_length=80)
    assert 64 < len(shorter.data["stdout"]) <= 80


# -- the caller's own limit ----------------------------------------------------------------


@pytest.mark.row("P11", "E6")
@pytest.mark.parametrize(
    "data",
    [
        {"ended_by": "exception", "session": {"id": "s" * 64}},
        {"files": [{"filename": "f" * 200, "url": "/v1/blobs/" + "0" * 200}]},
        {"filename": "a", "content_base64": "x" * 500},
    ],
)
async def test_identifiers_and_file_metadata_are_not_truncated(store: BlobStore, data: Any) -> None:
    assert await _short(store, data, max_length=1) == data


@pytest.mark.row("P11", "E6")
async def test_whole_fields_are_exempt_from_max_length(store: BlobStore) -> None:
    data = {"content": "x" * 500, "other": "y" * 500}
    outcome = Outcome(EndedBy.OK, "call", data=data, whole_fields=frozenset({"content"}))
    short = (await shorten(ShapedOutcome(outcome, data, ""), blobs=store, principal_id=OWNER,
                           max_length=100)).data  # fmt: skip
    assert short["content"] == "x" * 500
    assert len(short["other"]) <= 100


@pytest.mark.row("P11", "E6")
async def test_only_the_beginning_is_kept_if_both_ends_do_not_fit(store: BlobStore) -> None:
    data = await _short(store, {"a": "0123456789" * 10}, max_length=5)
    assert data["a"] == "01234"
    assert data["truncation_info"]["summary"] == (
        "a has 100 characters, of which the beginning is here."
    )


@pytest.mark.row("P11", "E6")
@given(st.text("ä😀x\n€", min_size=1, max_size=12), st.integers(1, 20_000), st.integers(1, 4000))
def test_shown_text_never_exceeds_either_limit(part: str, max_length: int, times: int) -> None:
    text = part * times
    shown = head_and_tail(text, max_length)
    assert len(shown) <= max_length or len(text) <= max_length
    assert len(shown.encode()) <= INLINE_BYTES


# -- usage and cost ------------------------------------------------------------------------


PRICES = Prices(cpu_second=Decimal("0.10"), gb_second=Decimal("0.02"), currency="EUR")


def _outcome(**fields: Any) -> Outcome:
    return Outcome(EndedBy.OK, "none", **fields)


def _account(**fields: Any) -> UsageReport:
    values: dict[str, Any] = {
        "arguments_json": "",
        "data": {},
        "data_json": "",
        "tool": function_definition(cost_per_use="0.01"),
        "outcome": _outcome(),
        "limits": Limits(5, 5, 512, 1000),
        "processing_s": 2.0,
        "counter": EstimatingCounter(),
        "prices": Prices(),
    }
    return account(**{**values, **fields})


@pytest.mark.row("E3")
def test_cpu_and_memory_cost_follow_configured_prices_if_measured_and_limited() -> None:
    # 0.01 + 0.5 s × 0.10 + 0.5 GB × 2 s × 0.02
    report = _account(outcome=_outcome(cpu_ms=500.0), prices=PRICES)
    assert (report.cost, report.currency) == ("0.080000", "EUR")
    assert _account(prices=PRICES, limits=Limits(5, 5, None, 10)).cost == "0.010000"
    assert _account(prices=PRICES, limits=None).cost == "0.010000"


@pytest.mark.row("E3")
@given(st.decimals(0, 1000, places=6), st.decimals(0, 1000, places=6))
def test_sums_of_money_are_exact(per_use: Decimal, reported: Decimal) -> None:
    tool = function_definition(cost_per_use=str(per_use))
    assert Decimal(_account(tool=tool, outcome=_outcome(cost=reported)).cost) == per_use + reported


@pytest.mark.row("E2")
def test_tokens_are_counted_in_arguments_and_data() -> None:
    report = _account(arguments_json="x" * 7, data_json="x" * 8, outcome=_outcome(tokens_used=11))
    assert (report.input_tokens, report.output_tokens, report.tokens_used) == (2, 3, 11)
    assert report.estimated is True


FILE = {"filename": "plot.png", "content_type": "image/png", "size": 30_000}
CONTENT = "QUJD" * 10_000


def _tokens_of(data: dict[str, Any]) -> int:
    return _account(data=data, data_json=strict_json.dumps(data).decode()).output_tokens


@pytest.mark.row("E2", "E7")
@pytest.mark.parametrize("key", ["images", "files"])
def test_image_and_file_content_is_not_counted_as_tokens(key: str) -> None:
    with_content = {"stdout": "hello", key: [{**FILE, "content_base64": CONTENT}, FILE]}
    without = {"stdout": "hello", key: [{**FILE, "content_base64": ""}, FILE]}
    assert _tokens_of(with_content) == _tokens_of(without)


@pytest.mark.row("E2", "E7")
@pytest.mark.parametrize(
    "data",
    [
        {"text": CONTENT},
        {"files": [{**FILE, "content_base64": "These are words, and a model reads them. " * 1000}]},
        {"files": [{"content_base64": CONTENT}]},
        {"files": {**FILE, "content_base64": CONTENT}},
    ],
    ids=["text", "not-base64", "without-filename", "not-a-list"],
)
def test_data_that_only_looks_like_a_file_still_counts_as_tokens(data: dict[str, Any]) -> None:
    assert _tokens_of(data) > 10_000
