"""Output read in one step is what it would be in two, and what is wrong stays wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.protocol import framing, strict_json
from fumehood.protocol.container_frames import (
    OUTPUT_START,
    parse_container_body,
    parse_container_frame,
)
from fumehood.protocol.framing import FrameError

pytestmark = pytest.mark.row("S8", "S4")


@given(st.text(max_size=200), st.sampled_from(["stdout", "stderr"]))
def test_both_ways_give_the_same(text: str, stream: str) -> None:
    message = {
        "op": "output",
        "id": 1,
        "stream": stream,
        "text": text.encode("utf-8", "replace").decode(),
    }
    body = strict_json.dumps(message)
    assert body.startswith(OUTPUT_START)
    assert parse_container_body(body) == parse_container_frame(framing.parse_body(body))


@pytest.mark.parametrize(
    "rest",
    [b'"id":1,"stream":"stdout","text":"\\ud800"}', b'"id":1,"stream":"stdout","text":1}',
     b'"id":"1","stream":"stdout","text":""}', b'"id":1,"stream":"log","text":""}',
     b'"id":1,"stream":"stdout","text":"","more":1}', b'"id":1,"stream":"stdout"}',
     b'"id":1,"stream":"stdout","text":"\xff"}', b'"id":1,"stream":"stdout","text":""} {}',
     b'"id":1,"stream":"stdout","text":"", "x":' + b"[" * 5000, b"",
     b'"id":1,"stream":"stdout","text":"' + b"a" * 70_000 + b'"}'],
)  # fmt: skip
def test_what_is_no_output_is_refused(rest: bytes) -> None:
    with pytest.raises(FrameError):
        parse_container_body(OUTPUT_START + rest)


def test_other_frames_are_read_as_strictly_as_ever() -> None:
    with pytest.raises(FrameError, match="twice"):
        parse_container_body(b'{"op":"reset","id":1,"id":2,"clean":true,"why":null}')
