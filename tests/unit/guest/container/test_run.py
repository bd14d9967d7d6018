"""How a run ended: the supervisor's reason, then the kernel's, then what the program says."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fumehood.guest.container.processes import REQUEST_FAILED
from fumehood.guest.container.run import Run, claimed_limits, ending_of
from fumehood.guest.core.limits import Limits
from fumehood.guest.core.pipes import SEAL_FAILED

RESULT = {"result": {"value": 1, "has_value": True, "value_repr": "1"}}
RAISED = {"error": {"kind": "exception", "message": "ValueError", "exception": {"type": "E"}}}
UNFIT = {"error": {"kind": "invalid", "message": "the file does not fit", "exception": None}}
OUT_OF_MEMORY = {"error": {"kind": "memory", "message": "MemoryError", "exception": None}}


def _run(claim: dict[str, Any] | None = None, killed_for: str | None = None) -> Run:
    limits = Limits(wall_s=1, cpu_s=1, memory_bytes=1, output_bytes=1)
    return Run(1, "python", limits, bytearray(), claim=claim, killed_for=killed_for)


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("claim", "exit_code", "number", "expected"),
    [
        (RESULT, 0, None, ("ok", RESULT)),
        (None, 0, None, ("ok", None)),
        (RAISED, 0, None, ("ok", None)),
        ({"result": "nonsense"}, 0, None, ("ok", None)),
        (RAISED, 1, None, ("exception", RAISED)),
        (OUT_OF_MEMORY, 1, None, ("memory", OUT_OF_MEMORY)),
        (RESULT, 1, None, ("exit", None)),
        (UNFIT, REQUEST_FAILED, None, ("exception", UNFIT)),
        (UNFIT, 1, None, ("exit", None)),
        (None, 3, None, ("exit", None)),
        ({"error": {"kind": "ok"}}, 3, None, ("exit", None)),
        ({"error": "nonsense"}, 3, None, ("exit", None)),
        (RESULT, None, signal.SIGKILL, ("signal", None)),
        (RESULT, None, signal.SIGSEGV, ("signal", None)),
        (RESULT, None, signal.SIGSYS, ("policy", None)),
        (None, None, signal.SIGXCPU, ("cpu_time", None)),
        ({"ready": False, "fault": "x"}, SEAL_FAILED, None, ("sandbox_lost", None)),
        (None, SEAL_FAILED, None, ("exit", None)),
    ],
)
def test_exit_status_decides_the_ending_and_a_claim_only_explains_it(
    claim: dict[str, Any] | None,
    exit_code: int | None,
    number: int | None,
    expected: tuple[str, Any],
) -> None:
    assert ending_of(_run(claim), exit_code, number, out_of_memory=False) == expected


def test_child_that_has_begun_cannot_claim_it_was_not_sealed() -> None:
    run = _run({"ready": False, "fault": "forged"})
    run.has_begun = True
    assert ending_of(run, SEAL_FAILED, None, out_of_memory=False) == ("exit", None)


@pytest.mark.row("S4")
@pytest.mark.parametrize(("cpu_ms", "ended_by"), [(999.0, "signal"), (1000.0, "cpu_time")])
def test_limit_signal_below_the_limit_is_an_ordinary_signal(cpu_ms: float, ended_by: str) -> None:
    ending = ending_of(_run(), None, signal.SIGXCPU, out_of_memory=False, cpu_ms=cpu_ms)
    assert ending == (ended_by, None)


def test_only_known_fields_of_a_claimed_failure_are_passed_on() -> None:
    claim = {"error": {"kind": "memory", "message": "m", "errno": 12, "more": "x"}}
    assert ending_of(_run(claim), 1, None, out_of_memory=False) == (
        "memory",
        {"error": {"kind": "memory", "message": "m", "exception": None}},
    )


@pytest.mark.row("S4")
@pytest.mark.parametrize("reason", ["wall_time", "cpu_time", "output", "cancelled"])
@pytest.mark.parametrize(("exit_code", "number"), [(0, None), (None, 9)])
def test_reason_of_the_supervisor_overrides_the_claim(
    reason: str, exit_code: int | None, number: int | None
) -> None:
    ended = ending_of(_run(RESULT, reason), exit_code, number, out_of_memory=True)
    assert ended == (reason, None)


@pytest.mark.row("S4")
@pytest.mark.parametrize(("exit_code", "number"), [(0, None), (1, None), (None, 9)])
def test_claim_cannot_hide_an_out_of_memory_kill(exit_code: int | None, number: int | None) -> None:
    assert ending_of(_run(RESULT), exit_code, number, out_of_memory=True) == ("memory", None)


@pytest.mark.row("S4")
@pytest.mark.parametrize(
    ("claim", "named"),
    [
        ({"error": {"kind": "exception", "errno": 24}}, {"open_files"}),
        ({"error": {"kind": "exception", "errno": 28}}, {"disk"}),
        ({"error": {"kind": "exception", "errno": 27}}, {"file_size"}),
        ({"error": {"kind": "exception", "errno": 2}}, set()),
        ({"error": {"errno": [24]}}, set()),
        ({"error": 3}, set()),
        ({}, set()),
        (None, set()),
        (RESULT, set()),
    ],
)
def test_uncaught_os_error_names_its_limit(claim: dict[str, Any] | None, named: set[str]) -> None:
    assert claimed_limits(_run(claim)) == named
