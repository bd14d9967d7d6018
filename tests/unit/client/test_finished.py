"""Programs that have ended, as adapters see them."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.client.finished import finished, program_arguments
from fumehood.core.envelope import CallFailed, Envelope
from support.answers import envelope_of, failure

pytestmark = pytest.mark.row("S7", "D1")


def envelope(code: str | None = None, **result: Any) -> Envelope:
    if code is None:
        return envelope_of(result)
    return envelope_of(error=failure(code, "Why.", details=result or None))


@pytest.mark.parametrize(
    ("code", "result", "exit_code", "limit"),
    [
        (None, {"exit_code": 0, "ended_by": "ok"}, 0, None),
        ("EXECUTION_ERROR", {"exit_code": 7, "ended_by": "exit"}, 7, None),
        ("EXECUTION_ERROR", {"exit_code": 1, "ended_by": "exception"}, 1, None),
        ("EXECUTION_ERROR", {"exit_code": None, "signal": 9, "ended_by": "signal"}, 137, None),
        ("TIMEOUT", {"exit_code": None, "ended_by": "wall_time"}, 124, "TIMEOUT"),
        ("TIMEOUT", {"exit_code": None, "signal": 24, "ended_by": "cpu_time"}, 124, "TIMEOUT"),
        ("OUTPUT_LIMIT_EXCEEDED", {"exit_code": None, "ended_by": "output"}, 1,
         "OUTPUT_LIMIT_EXCEEDED"),
        ("MEMORY_LIMIT_EXCEEDED", {"exit_code": None, "signal": 9, "ended_by": "memory"}, 137,
         "MEMORY_LIMIT_EXCEEDED"),
    ],
)  # fmt: skip
def test_every_run_ending_has_an_exit_code_and_named_limits(
    code: str | None, result: dict[str, Any], exit_code: int, limit: str | None
) -> None:
    ran = finished(envelope(code, stdout="o", **result), "o", "e")
    assert (ran.exit_code, ran.code, ran.is_timeout) == (exit_code, limit, limit == "TIMEOUT")
    assert ran.output == ("o\ne" if limit is None else "o\ne\nWhy.")


@pytest.mark.parametrize(
    "refused",
    [
        envelope("REQUIRES_HUMAN_APPROVAL"),
        envelope("RESOURCE_NOT_FOUND", state="ended"),
        envelope("CANCELLED", stdout="o", ended_by="cancelled"),
        envelope("SANDBOX_UNAVAILABLE", stdout="", ended_by="sandbox_lost"),
        envelope("INVALID_PARAMS", stdout="", ended_by="exception"),
    ],
    ids=lambda one: one.error.code,
)
def test_envelope_that_is_not_from_a_program_is_raised(refused: Envelope) -> None:
    with pytest.raises(CallFailed, match="Why"):
        finished(refused, "", "")


def test_commands_and_programs_are_converted_to_arguments() -> None:
    assert program_arguments("ls", None, None) == {"command": "ls", "return_files": False}
    assert program_arguments(("ls", "-l"), {"A": "b"}, "d") == {
        "argv": ["ls", "-l"], "env": [{"name": "A", "value": "b"}], "working_directory": "d",
        "return_files": False,
    }  # fmt: skip
