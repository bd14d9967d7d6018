"""Frames and messages between host and guest."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.limits import Limit
from fumehood.protocol import strict_json
from fumehood.protocol.container_frames import (
    OUTPUT_START,
    parse_container_body,
)
from fumehood.protocol.framing import Decoder, FrameError, FrameTooLarge, encode
from fumehood.protocol.messages import (
    GuestReady,
    parse_guest_frame,
)

CAP = 1 << 16
MESSAGES = st.lists(
    st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers() | st.text("aé😀")),
    max_size=5,
)


def _frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def _cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


@given(MESSAGES, st.lists(st.integers(0, 10_000), max_size=20))
def test_messages_are_decoded_from_any_chunks(
    messages: list[dict[str, Any]], places: list[int]
) -> None:
    decoder = Decoder(CAP)
    stream = b"".join(encode(message) for message in messages)
    seen = [message for chunk in _cut(stream, places) for message in decoder.feed(chunk)]
    assert seen == messages


def test_frame_at_the_size_limit_is_accepted_and_a_larger_one_refused() -> None:
    frame = encode({"a": "b"})
    body_bytes = len(frame) - 4
    assert Decoder(body_bytes).feed(frame) == [{"a": "b"}]
    with pytest.raises(FrameTooLarge):
        Decoder(body_bytes - 1).feed(frame)


def test_oversized_frame_length_is_refused_before_its_body() -> None:
    with pytest.raises(FrameTooLarge):
        Decoder(CAP).feed(struct.pack("!I", CAP + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{",
        b"\xff\xff",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\\ud800"}',
        b"[" * 100 + b"]" * 100,
        b"[]",
        b"1",
        b"null",
    ],
)
def test_frame_without_a_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match=r"a frame is|holds no object"):
        Decoder(CAP).feed(_frame(body))


# -- Messages ------------------------------------------------------------------------------

ENDED: dict[str, Any] = {
    "op": "ended",
    "id": 7,
    "ended_by": "ok",
    "cpu_ms": 1.5,
    "peak_memory_bytes": None,
    "output_bytes": 12,
    "exit_code": None,
    "signal": None,
    "claim": {"result": {"value": 4}},
}
READY: dict[str, Any] = {"op": "ready", "enforces": {"memory": True, "files": False}, "faults": []}

PROGRESS = {"op": "progress", "id": 1, "percent": 50.0, "message": "half"}

WRONG: list[tuple[dict[str, Any], dict[str, list[Any]]]] = [
    (ENDED, {
        "op": [None, "", "Ended", "run", 1, ["ended"], {}],
        "id": ["7", 7.5, None, True, [7]],
        "ended_by": ["OK", "victory", None, 0, ["ok"]],
        "cpu_ms": [-1, -0.1, "1", True, [1]],
        "peak_memory_bytes": [-1, 1.5, "1", True],
        "output_bytes": [-1, None, 1.5, "12", True],
        "exit_code": ["0", 1.5, [], False],
        "signal": ["9", 1.5, {}, True],
        "claim": ["text", [], 1, True],
        "host_path": ["/"],
        "isolation": ["resident"],  # the host knows it
    }),
    (READY, {
        "enforces": [None, [], {"memory": "yes"}, {"memory": 1}, True],
        "faults": [None, "text", [1]],
        "host_path": ["/"],
    }),
    (PROGRESS, {
        "percent": [-1, 101, float("nan"), "5", None],
        "message": ["x" * 201, 1],
        "id": ["1"],
        "run": ["os.system"],
    }),
]  # fmt: skip
WRONG_FIELDS = [
    (frame, field, value)
    for frame, fields in WRONG
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("frame", "field", "value"), WRONG_FIELDS)
def test_frame_with_a_wrong_or_unknown_field_is_refused(
    frame: dict[str, Any], field: str, value: Any
) -> None:
    assert parse_guest_frame(frame) is not None
    with pytest.raises(FrameError, match=r"wrong in|an unknown kind"):
        parse_guest_frame({**frame, field: value})


def test_ready_frame_lists_limits_seen_as_enforced() -> None:
    ready = parse_guest_frame(
        {**READY, "enforces": {"memory": True, "files": False, "gravity": True}}
    )
    assert isinstance(ready, GuestReady)
    assert ready.enforced == {Limit.MEMORY}


@pytest.mark.parametrize("frame", [ENDED, READY])
def test_frame_with_a_missing_field_is_refused(frame: dict[str, Any]) -> None:
    for field in frame:
        with pytest.raises(FrameError):
            parse_guest_frame({key: value for key, value in frame.items() if key != field})


def test_frame_error_repeats_no_guest_content() -> None:
    with pytest.raises(FrameError) as caught:
        parse_guest_frame({**ENDED, "claim": "SECRET", "SECRET": "SECRET"})
    assert "SECRET" not in str(caught.value)


# -- Output read in one step is what it would be in two, and what is wrong stays wrong -----


@pytest.mark.row("S8", "S4")
@given(st.text(max_size=200), st.sampled_from(["stdout", "stderr"]))
def test_fast_and_general_output_parsers_agree(text: str, stream: str) -> None:
    message = {
        "op": "output",
        "id": 1,
        "stream": stream,
        "text": text.encode("utf-8", "replace").decode(),
    }
    body = strict_json.dumps(message)
    assert body.startswith(OUTPUT_START)
    in_other_order = strict_json.dumps(dict(reversed(message.items())))
    assert parse_container_body(body) == parse_container_body(in_other_order)


@pytest.mark.row("S8", "S4")
@pytest.mark.parametrize(
    "rest",
    [b'"id":1,"stream":"stdout","text":"\\ud800"}', b'"id":1,"stream":"stdout","text":1}',
     b'"id":"1","stream":"stdout","text":""}', b'"id":1,"stream":"log","text":""}',
     b'"id":1,"stream":"stdout","text":"","more":1}', b'"id":1,"stream":"stdout"}',
     b'"id":1,"stream":"stdout","text":"\xff"}', b'"id":1,"stream":"stdout","text":""} {}',
     b'"id":1,"stream":"stdout","text":"", "x":' + b"[" * 5000, b""],
)  # fmt: skip
def test_malformed_output_frame_is_refused(rest: bytes) -> None:
    with pytest.raises(FrameError):
        parse_container_body(OUTPUT_START + rest)
