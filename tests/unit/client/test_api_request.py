"""Addresses that cannot be led astray, bodies that are JSON, answers that are values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fumehood import Refused
from fumehood.answers import Deleted, ToolDetails
from fumehood.client.api_request import address, data_of, encode, object_of, plain
from fumehood.core.envelope import Envelope
from fumehood.core.status import Health
from fumehood.protocol import strict_json
from support.answers import envelope_bytes


@pytest.mark.parametrize("part", ["", ".", "..", "a/b", "/", "../tools/x", "a/../b", "a\udc80"])
def test_name_that_would_lead_elsewhere_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match=r"can be no name|surrogates"):
        address("agents", part)


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        ("calculator@1.0.0", "calculator@1.0.0"),
        ("a?b=c", "a%3Fb%3Dc"),
        ("a#b", "a%23b"),
        ("a%2fb", "a%252fb"),
        ("...", "..."),
        ("a b\r\nx: y", "a%20b%0D%0Ax%3A%20y"),
        ("ä", "%C3%A4"),
    ],
)
def test_any_other_name_is_one_part_of_the_address(part: str, shown: str) -> None:
    assert address("agents", part, "tools") == f"/v1/agents/{shown}/tools"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), b"bytes"])
def test_body_that_is_no_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        encode({"arguments": value})


def test_circular_body_is_refused() -> None:
    body: dict[str, object] = {}
    body["again"] = body
    with pytest.raises(ValueError, match="not JSON"):
        encode(body)


def test_success_is_read_as_the_data_of_its_kind() -> None:
    assert data_of(Deleted)(envelope_bytes({"deleted": "x"})) == Deleted(deleted="x")


def test_refusal_is_raised_with_its_envelope() -> None:
    raw = envelope_bytes({}, code="TOOL_NOT_FOUND", message="There is none.")
    with pytest.raises(Refused, match="There is none") as caught:
        data_of(ToolDetails)(raw)
    assert caught.value.code == "TOOL_NOT_FOUND"
    assert isinstance(caught.value.envelope, Envelope)


@pytest.mark.parametrize("raw", [b"", b"<hi>", b"[]", b'{"status": 1}', b"\xff"])
@pytest.mark.parametrize("read", [data_of(Deleted), plain(Health)], ids=["envelope", "plain"])
def test_what_is_no_answer_is_a_value_error(raw: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        read(raw)


def test_data_of_another_kind_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="deleted"):
        data_of(Deleted)(envelope_bytes({"removed": "x"}))


@pytest.mark.parametrize("raw", [b"[]", b"1", b'{"a": 1, "a": 2}'])
def test_document_that_is_no_object_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(strict_json.StrictJsonError):
        object_of(raw)
    assert object_of(b'{"a": 1}') == {"a": 1}
