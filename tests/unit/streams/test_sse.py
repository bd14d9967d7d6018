"""Server-sent events: the same come out however the bytes are cut, and nothing else does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.http.event_stream import KEEP_ALIVE
from fumehood.streams.sse import Decoder, Frame, SseError, encode

pytestmark = pytest.mark.row("D2")

kinds = st.sampled_from(["tool_output", "tool_progress", "tool_result"])
events = st.tuples(kinds, st.integers(0, 10**9), st.text(max_size=40))


@given(st.lists(events, max_size=8), st.lists(st.integers(1, 60), max_size=20))
def test_sse_events_are_decoded_from_any_chunks(
    sent: list[tuple[str, int, str]], cuts: list[int]
) -> None:
    wanted = [
        Frame(kind, f"{number}:0", json.dumps(text, ensure_ascii=False).encode())
        for kind, number, text in sent
    ]
    raw = b"".join(KEEP_ALIVE + encode(*frame) for frame in wanted)
    decoder, found = Decoder(), []
    for size in [*cuts, len(raw)]:
        chunk, raw = raw[:size], raw[size:]
        found += decoder.feed(chunk)
    found += decoder.feed(raw)
    assert found == wanted


@pytest.mark.parametrize(
    "raw",
    [b"nonsense\n\n", b"id: 1\n\n", b"id: 1\nevent: a\n\n", b"id: 1\nid: 2\nevent: a\ndata: 1\n\n",
     b"id: \xff\nevent: a\ndata: 1\n\n"],
)  # fmt: skip
def test_malformed_sse_event_is_refused(raw: bytes) -> None:
    with pytest.raises(SseError):
        Decoder().feed(raw)
