"""The frames of streams, on both sides of a container's channel."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol.connections import DATA, PIECE_BYTES, Segment, taken
from fumehood.protocol.framing import Decoder, FrameError
from fumehood.protocol.streams import MESSAGE_PIECE_BYTES, Joiner, StreamFrame, pieces_of

KINDS = st.text(st.characters(codec="ascii"), min_size=1, max_size=255)


@given(st.builds(StreamFrame, KINDS, st.integers(0, (1 << 32) - 1), st.binary(max_size=100)))
def test_frame_survives_a_round_trip(frame: StreamFrame) -> None:
    (body,) = Decoder(1 << 20).bodies(frame.encode())
    assert StreamFrame.parse(body) == frame


@given(st.binary(max_size=30))
def test_attack_any_bytes_are_a_frame_or_refused(body: bytes) -> None:
    with suppress(FrameError):
        frame = StreamFrame.parse(b"\0" + body)
        assert frame.kind
        assert frame.encode()[4:] == b"\0" + body


@given(st.builds(Segment, st.integers(1, 6), st.integers(0, (1 << 32) - 1), st.binary(max_size=9)))
def test_segment_survives_a_round_trip(segment: Segment) -> None:
    assert Segment.parse(segment.encode()) == segment


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\1\0\0\0", b"\0" + b"\0" * 4, b"\7" + b"\0" * 4,
        b"\2" + b"\0" * 4 + b"x" * (PIECE_BYTES + 1),
    ],
)  # fmt: skip
def test_attack_body_that_is_no_segment_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        Segment.parse(body)
    assert Segment.parse(Segment(DATA, 1, b"x" * PIECE_BYTES).encode()).step == DATA  # the twin


def test_number_of_taken_bytes_survives_a_round_trip() -> None:
    assert Segment.parse(taken(3, 70_000).encode()).taken_bytes == 70_000


@pytest.mark.parametrize("size", [0, 1, MESSAGE_PIECE_BYTES, MESSAGE_PIECE_BYTES + 1])
def test_message_is_put_together_from_its_pieces(size: int) -> None:
    joiner = Joiner()
    for message in (b"x" * size, b"y"):
        *first, last = [joiner.add(piece) for piece in pieces_of(message)]
        assert first == [None] * (max(size, 1) - 1 >> 16 if message != b"y" else 0)
        assert last == message
