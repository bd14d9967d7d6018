"""Frames: however a stream is cut into chunks, the same messages come out."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.framing import Decoder, FrameError, FrameTooLarge, encode

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
def test_messages_do_not_depend_on_how_the_stream_is_cut(
    messages: list[dict[str, Any]], places: list[int]
) -> None:
    decoder = Decoder(CAP)
    stream = b"".join(encode(message) for message in messages)
    seen = [message for chunk in _cut(stream, places) for message in decoder.feed(chunk)]
    assert seen == messages


def test_single_bytes_make_the_whole_message() -> None:
    decoder = Decoder(CAP)
    stream = encode({"a": 1})
    answers = [decoder.feed(stream[i : i + 1]) for i in range(len(stream))]
    assert answers == [[]] * (len(stream) - 1) + [[{"a": 1}]]


def test_two_frames_in_one_chunk_come_out_in_order() -> None:
    assert Decoder(CAP).feed(encode({"n": 1}) + encode({"n": 2})) == [{"n": 1}, {"n": 2}]


def test_half_of_the_next_frame_is_kept_for_later() -> None:
    decoder = Decoder(CAP)
    second = encode({"n": 2})
    assert decoder.feed(encode({"n": 1}) + second[:6]) == [{"n": 1}]
    assert decoder.feed(second[6:]) == [{"n": 2}]


def test_a_frame_at_the_cap_passes_and_one_byte_more_is_refused() -> None:
    frame = encode({"a": "b"})
    body_bytes = len(frame) - 4
    assert Decoder(body_bytes).feed(frame) == [{"a": "b"}]
    with pytest.raises(FrameTooLarge):
        Decoder(body_bytes - 1).feed(frame)


def test_too_large_length_is_refused_before_any_body_arrives() -> None:
    with pytest.raises(FrameTooLarge):
        Decoder(CAP).feed(struct.pack("!I", CAP + 1))


def test_the_cap_may_change_between_frames() -> None:
    decoder = Decoder(CAP)
    assert decoder.feed(encode({"a": "b" * 100})) == [{"a": "b" * 100}]
    decoder.max_bytes = 50
    with pytest.raises(FrameTooLarge):
        decoder.feed(encode({"a": "b" * 100}))


def test_last_size_is_the_length_of_the_newest_body() -> None:
    decoder = Decoder(CAP)
    frame = encode({"a": "b"})
    decoder.feed(encode({"a": "b" * 100}) + frame + frame[:5])
    assert decoder.last_size == len(frame) - 4


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
    ],
)
def test_body_that_is_not_strict_json_ends_the_channel(body: bytes) -> None:
    with pytest.raises(FrameError, match="a frame is"):
        Decoder(CAP).feed(_frame(body))


def test_spaces_around_the_document_mean_nothing() -> None:
    assert Decoder(CAP).feed(_frame(b' {"a": 1} ')) == [{"a": 1}]


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"true"])
def test_body_that_is_no_object_ends_the_channel(body: bytes) -> None:
    with pytest.raises(FrameError, match="holds no object"):
        Decoder(CAP).feed(_frame(body))


@given(st.binary(max_size=300))
def test_garbage_gives_messages_or_a_frame_error_and_nothing_else(chunk: bytes) -> None:
    decoder = Decoder(64)
    try:
        messages = decoder.feed(chunk)
    except FrameError:
        return
    assert all(isinstance(message, dict) for message in messages)


def test_message_that_json_cannot_hold_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"a": float("nan")})
