"""Docker's records, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.sandbox.container.demux import Demultiplexer, NotMultiplexed
from support.scripted_guest import record


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=50)), max_size=20),
    st.lists(st.integers(1, 30), min_size=1, max_size=50),
)
def test_streams_come_out_whole_however_the_bytes_are_cut(
    records: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    wire = b"".join(record(stream, payload) for stream, payload in records)
    demultiplexer = Demultiplexer()
    got = {1: b"", 2: b""}
    position = turn = 0
    while position < len(wire):
        step = cuts[turn % len(cuts)]
        for stream, piece in demultiplexer.feed(wire[position : position + step]):
            got[stream] += piece
        position, turn = position + step, turn + 1
    for stream in (1, 2):
        assert got[stream] == b"".join(payload for which, payload in records if which == stream)


@pytest.mark.parametrize("header", [b"\x00\0\0\0\0\0\0\x01", b"\x03\0\0\0\0\0\0\x01", b"HTTP/1.1"])
def test_stream_that_docker_has_not_is_refused(header: bytes) -> None:
    with pytest.raises(NotMultiplexed):
        list(Demultiplexer().feed(header))


def test_length_that_docker_never_sends_is_refused() -> None:
    with pytest.raises(NotMultiplexed):
        list(Demultiplexer().feed(b"\x01\0\0\0\xff\xff\xff\xff"))


def test_long_record_is_handed_on_before_it_is_whole() -> None:
    demultiplexer = Demultiplexer()
    head = b"\x01\0\0\0" + (1 << 20).to_bytes(4, "big")
    assert list(demultiplexer.feed(head + b"abc")) == [(1, b"abc")]
