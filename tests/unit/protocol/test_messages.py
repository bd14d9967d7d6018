"""Messages: a guest's frame that is wrong in any field never becomes a value."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.errors import EndedBy
from fumehood.core.limits import Limit, Limits
from fumehood.protocol.framing import FrameError
from fumehood.protocol.messages import (
    GuestEnding,
    GuestProgress,
    GuestReady,
    parse_guest_frame,
    run_frame,
)

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
    "faults": [None, "text", [1], ["x"] * 9],
}


def test_the_frame_of_an_ending_becomes_a_value() -> None:
    ending = parse_guest_frame(ENDED)
    assert isinstance(ending, GuestEnding)
    assert (ending.id, ending.ended_by, ending.cpu_ms) == (7, EndedBy.OK, 1.5)
    assert ending.claim == {"result": {"value": 4}}


@pytest.mark.parametrize("ended_by", list(EndedBy))
def test_every_ending_can_be_told(ended_by: EndedBy) -> None:
    ending = parse_guest_frame({**ENDED, "ended_by": ended_by.value})
    assert isinstance(ending, GuestEnding)
    assert ending.ended_by is ended_by


def test_a_guest_enforces_only_what_it_says_it_saw() -> None:
    ready = parse_guest_frame(READY)
    assert isinstance(ready, GuestReady)
    assert ready.enforced == {Limit.MEMORY}


def test_an_unknown_limit_of_a_guest_is_no_limit() -> None:
    ready = parse_guest_frame({**READY, "enforces": {"gravity": True}})
    assert isinstance(ready, GuestReady)
    assert ready.enforced == frozenset()


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_ending_that_is_wrong_in_one_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(FrameError, match="wrong in"):
        parse_guest_frame({**ENDED, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in WRONG_READY.items() for value in values],
)
def test_ready_that_is_wrong_in_one_field_is_refused(field: str, value: Any) -> None:
    with pytest.raises(FrameError, match="wrong in"):
        parse_guest_frame({**READY, field: value})


@pytest.mark.parametrize("frame", [ENDED, READY])
def test_frame_with_a_field_missing_is_refused(frame: dict[str, Any]) -> None:
    for field in frame:
        with pytest.raises(FrameError):
            parse_guest_frame({key: value for key, value in frame.items() if key != field})


@pytest.mark.parametrize("frame", [ENDED, READY])
def test_frame_with_a_field_too_many_is_refused(frame: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="wrong in 1 places"):
        parse_guest_frame({**frame, "host_path": "/"})


@pytest.mark.parametrize("op", [None, "", "Ended", "run", 1, ["ended"], {}])
def test_frame_of_no_known_kind_is_refused(op: Any) -> None:
    with pytest.raises(FrameError, match="an unknown kind"):
        parse_guest_frame({**ENDED, "op": op})


def test_refusal_repeats_nothing_of_what_the_guest_said() -> None:
    with pytest.raises(FrameError) as caught:
        parse_guest_frame({**ENDED, "isolation": "SECRET", "SECRET": "SECRET"})
    assert "SECRET" not in str(caught.value)


def test_run_frame_gives_limits_in_bytes_and_seconds() -> None:
    frame = run_frame(3, "calculator", {"expression": "1"}, Limits(5.0, 2.0, 64, 1024))
    assert frame["limits"] == {
        "wall_s": 5.0,
        "cpu_s": 2.0,
        "memory_bytes": 64 * 1024 * 1024,
        "output_bytes": 1024,
    }
    assert (frame["op"], frame["id"], frame["program"]) == ("run", 3, "calculator")


def test_run_without_a_memory_limit_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="memory limit"):
        run_frame(3, "calculator", {}, Limits(5.0, 2.0, None, 1024))


PROGRESS = {"op": "progress", "id": 1, "percent": 50.0, "message": "half"}


@pytest.mark.row("S8")
def test_progress_of_a_guest_is_read() -> None:
    report = parse_guest_frame(PROGRESS)
    assert isinstance(report, GuestProgress)
    assert (report.id, report.percent, report.message) == (1, 50.0, "half")


@pytest.mark.parametrize(
    "change",
    [{"percent": -1}, {"percent": 101}, {"percent": float("nan")}, {"percent": "5"}, {"percent": None},
     {"message": "x" * 201}, {"message": 1}, {"id": "1"}, {"run": "os.system"}],
)  # fmt: skip
def test_progress_of_any_other_form_ends_the_guest(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        parse_guest_frame({**PROGRESS, **change})
