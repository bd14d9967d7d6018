"""Frames and messages between host and guest."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fumehood.core.errors import EndedBy
from fumehood.core.limits import Limit, Limits
from fumehood.protocol import framing, strict_json
from fumehood.protocol.container_frames import (
    OUTPUT_START,
    parse_container_body,
    parse_container_frame,
)
from fumehood.protocol.framing import Decoder, FrameError, FrameTooLarge, encode
from fumehood.protocol.messages import (
    GuestEnding,
    GuestProgress,
    GuestReady,
    parse_guest_frame,
    run_frame,
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


def test_frame_size_limit_can_change_between_frames() -> None:
    decoder = Decoder(CAP)
    assert decoder.feed(encode({"a": "b" * 100})) == [{"a": "b" * 100}]
    decoder.max_bytes = 50
    with pytest.raises(FrameTooLarge):
        decoder.feed(encode({"a": "b" * 100}))


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
def test_frame_without_strict_json_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="a frame is"):
        Decoder(CAP).feed(_frame(body))


@pytest.mark.parametrize("body", [b"[]", b"1", b'"text"', b"null", b"true"])
def test_frame_without_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="holds no object"):
        Decoder(CAP).feed(_frame(body))


@given(st.binary(max_size=300))
def test_garbage_bytes_give_messages_or_a_frame_error(chunk: bytes) -> None:
    decoder = Decoder(64)
    try:
        messages = decoder.feed(chunk)
    except FrameError:
        return
    assert all(isinstance(message, dict) for message in messages)


def test_message_that_json_cannot_represent_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        encode({"a": float("nan")})


# -- Messages ------------------------------------------------------------------------------

ENDED: dict[str, Any] = {
    "op": "ended",
    "id": 7,
    "ended_by": "ok",
    "isolation": "resident",
    "cpu_ms": 1.5,
    "peak_memory_bytes": None,
    "output_bytes": 12,
    "exit_code": None,
    "signal": None,
    "claim": {"result": {"value": 4}},
}
READY: dict[str, Any] = {"op": "ready", "enforces": {"memory": True, "files": False}, "faults": []}

WRONG: dict[str, list[Any]] = {
    "id": ["7", 7.5, None, True, [7]],
    "ended_by": ["OK", "victory", None, 0, ["ok"]],
    "isolation": ["", "none", "resident\n", "session", None, 1],
    "cpu_ms": [-1, -0.1, "1", True, [1]],
    "peak_memory_bytes": [-1, 1.5, "1", True],
    "output_bytes": [-1, None, 1.5, "12", True],
    "exit_code": ["0", 1.5, [], False],
    "signal": ["9", 1.5, {}, True],
    "claim": ["text", [], 1, True],
}
WRONG_READY: dict[str, list[Any]] = {
    "enforces": [None, [], {"memory": "yes"}, {"memory": 1}, True],
    "faults": [None, "text", [1]],
}


def test_ended_frame_is_parsed() -> None:
    ending = parse_guest_frame(ENDED)
    assert isinstance(ending, GuestEnding)
    assert (ending.id, ending.ended_by, ending.cpu_ms) == (7, EndedBy.OK, 1.5)
    assert ending.claim == {"result": {"value": 4}}


@pytest.mark.parametrize("ended_by", list(EndedBy))
def test_every_run_ending_can_be_parsed(ended_by: EndedBy) -> None:
    ending = parse_guest_frame({**ENDED, "ended_by": ended_by.value})
    assert isinstance(ending, GuestEnding)
    assert ending.ended_by is ended_by


def test_ready_frame_lists_limits_seen_as_enforced() -> None:
    ready = parse_guest_frame(READY)
    assert isinstance(ready, GuestReady)
    assert ready.enforced == {Limit.MEMORY}


def test_unknown_limit_in_a_ready_frame_is_ignored() -> None:
    ready = parse_guest_frame({**READY, "enforces": {"gravity": True}})
    assert isinstance(ready, GuestReady)
    assert ready.enforced == frozenset()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_ended_frame_with_an_invalid_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(FrameError, match="wrong in"):
        parse_guest_frame({**ENDED, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in WRONG_READY.items() for value in values],
)
def test_ready_frame_with_an_invalid_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(FrameError, match="wrong in"):
        parse_guest_frame({**READY, field: value})


@pytest.mark.parametrize("frame", [ENDED, READY])
def test_frame_with_a_missing_field_is_refused(frame: dict[str, Any]) -> None:
    for field in frame:
        with pytest.raises(FrameError):
            parse_guest_frame({key: value for key, value in frame.items() if key != field})


@pytest.mark.parametrize("frame", [ENDED, READY])
def test_frame_with_an_unknown_field_is_refused(frame: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="wrong in 1 places"):
        parse_guest_frame({**frame, "host_path": "/"})


@pytest.mark.parametrize("op", [None, "", "Ended", "run", 1, ["ended"], {}])
def test_frame_of_an_unknown_kind_is_refused(op: Any) -> None:
    with pytest.raises(FrameError, match="an unknown kind"):
        parse_guest_frame({**ENDED, "op": op})


def test_frame_error_repeats_no_guest_content() -> None:
    with pytest.raises(FrameError) as caught:
        parse_guest_frame({**ENDED, "isolation": "SECRET", "SECRET": "SECRET"})
    assert "SECRET" not in str(caught.value)


def test_run_frame_has_limits_in_bytes_and_seconds() -> None:
    frame = run_frame(3, "calculator", {"expression": "1"}, Limits(5.0, 2.0, 64, 1024))
    assert frame["limits"] == {
        "wall_s": 5.0,
        "cpu_s": 2.0,
        "memory_bytes": 64 * 1024 * 1024,
        "output_bytes": 1024,
    }
    assert (frame["op"], frame["id"], frame["program"]) == ("run", 3, "calculator")


def test_run_frame_without_a_memory_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="memory limit"):
        run_frame(3, "calculator", {}, Limits(5.0, 2.0, None, 1024))


PROGRESS = {"op": "progress", "id": 1, "percent": 50.0, "message": "half"}


@pytest.mark.row("S8")
def test_progress_frame_is_parsed() -> None:
    report = parse_guest_frame(PROGRESS)
    assert isinstance(report, GuestProgress)
    assert (report.id, report.percent, report.message) == (1, 50.0, "half")


@pytest.mark.parametrize(
    "change",
    [{"percent": -1}, {"percent": 101}, {"percent": float("nan")}, {"percent": "5"}, {"percent": None},
     {"message": "x" * 201}, {"message": 1}, {"id": "1"}, {"run": "os.system"}],
)  # fmt: skip
def test_malformed_progress_frame_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        parse_guest_frame({**PROGRESS, **change})


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
    assert parse_container_body(body) == parse_container_frame(framing.parse_body(body))


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


@pytest.mark.row("S8", "S4")
def test_other_frames_are_parsed_strictly() -> None:
    with pytest.raises(FrameError, match="twice"):
        parse_container_body(b'{"op":"reset","id":1,"id":2,"clean":true,"why":null}')
