"""Docker's attached streams, from any chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.docker.streams import _Records
from fumehood.sandbox.container.runtime import Receiver
from support.fake_docker import record


class Kept(Receiver):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.got = {1: b"", 2: b""}
        self.broken = ""

    def data_received(self, chunk: bytes) -> None:
        self.got[1] += chunk

    def errors_received(self, chunk: bytes) -> None:
        self.got[2] += chunk

    def stream_broken(self, why: str) -> None:
        self.broken = why


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=50)), max_size=20),
    st.lists(st.integers(1, 30), min_size=1, max_size=50),
)
def test_docker_streams_are_reassembled_from_any_chunks(
    records: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    wire = b"".join(record(stream, payload) for stream, payload in records)
    kept = Kept()
    taken = _Records(kept)
    position = turn = 0
    while position < len(wire):
        step = cuts[turn % len(cuts)]
        taken.data_received(wire[position : position + step])
        position, turn = position + step, turn + 1
    for stream in (1, 2):
        assert kept.got[stream] == b"".join(
            payload for which, payload in records if which == stream
        )
    assert not kept.broken


@pytest.mark.parametrize("stream", [0, 3, 255])
def test_attack_header_of_no_output_stream_breaks_the_stream(stream: int) -> None:
    kept = Kept()
    taken = _Records(kept)
    taken.data_received(record(1, b"before") + record(stream, b"after"))
    assert kept.broken == "this is not Docker's attached stream"
    assert kept.got == {1: b"before", 2: b""}
