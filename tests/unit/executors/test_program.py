"""What a restricted program's ending becomes, and what a hostile one cannot make of it."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.core.errors import EndedBy
from fumehood.executors.expression import is_program_result, program_details
from fumehood.sandbox.process.endings import ending_of_reply
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import FakeWall

GOOD = {"value": 4, "value_repr": "4", "stdout": "x\n"}
EXCEPTION = {"type": "KeyError", "message": "'a'", "line": 3, "traceback": "Traceback …"}
NOTHING = {"value": None, "value_repr": None, "stdout": None, "exception": None}


async def _call(home: Any, ending: RunEnding, **options: Any) -> tuple[Any, FakeWall]:
    wall = FakeWall(answer=lambda run: ending)
    async with Engine(config=Config(home=home), interpreter=wall) as engine:
        return await engine.call("run_restricted_python", {"code": "1"}, **options), wall


def _failed(ended_by: EndedBy, **fields: Any) -> RunEnding:
    return RunEnding(ended_by, "call", **fields)


@pytest.mark.anyio
@pytest.mark.row("S1", "S2")
@pytest.mark.parametrize("isolation", [None, "call"])
async def test_program_always_asks_for_a_process_of_its_own(home, isolation) -> None:
    options = {} if isolation is None else {"isolation": isolation}
    envelope, wall = await _call(home, RunEnding(EndedBy.OK, "call", result=GOOD), **options)
    assert envelope.data == GOOD
    (run,) = wall.runs
    assert run.fresh is True
    assert (run.program, run.arguments) == ("restricted_python", {"code": "1"})


@pytest.mark.anyio
@pytest.mark.row("E1", "S4")
async def test_exception_brings_what_was_printed_and_the_programs_own_traceback(home) -> None:
    said = {"value": None, "value_repr": None, "stdout": "so far", "exception": EXCEPTION}
    ending = _failed(
        EndedBy.EXCEPTION,
        claimed_kind="exception",
        claimed_message="KeyError: 'a' (line 3)",
        claimed_error={"details": said},
    )
    envelope, _ = await _call(home, ending)
    assert envelope.error.code == "EXECUTION_ERROR"
    assert envelope.error.message == "The program failed: KeyError: 'a' (line 3)."
    assert envelope.error.details == {"ended_by": "exception", **said}
    assert envelope.error.retryable is False


@pytest.mark.anyio
@pytest.mark.row("E1", "S4")
@pytest.mark.parametrize(
    ("ended_by", "code", "limit"),
    [
        (EndedBy.WALL_TIME, "TIMEOUT", {"timeout_seconds": 5.0}),
        (EndedBy.CPU_TIME, "TIMEOUT", {"cpu_seconds": 5.0}),
        (EndedBy.MEMORY, "MEMORY_LIMIT_EXCEEDED", {"memory_mb": 64}),
        (EndedBy.OUTPUT, "OUTPUT_LIMIT_EXCEEDED", {"output_bytes": 65536}),
    ],
)
async def test_limit_is_named_and_what_cannot_be_known_is_null(home, ended_by, code, limit) -> None:
    envelope, _ = await _call(home, _failed(ended_by))
    assert envelope.error.code == code
    assert envelope.error.details == {"ended_by": ended_by.value, **NOTHING, "limit": limit}
    assert "program" in envelope.error.message


@pytest.mark.anyio
@pytest.mark.row("E1")
async def test_forbidden_system_call_is_a_violation_in_the_words_of_a_program(home) -> None:
    envelope, _ = await _call(home, _failed(EndedBy.POLICY, signal=31))
    assert envelope.error.code == "SANDBOX_VIOLATION"
    assert "forbidden system call" in envelope.error.message


@pytest.mark.anyio
async def test_program_that_took_its_process_down_is_an_execution_error(home) -> None:
    envelope, _ = await _call(home, _failed(EndedBy.SIGNAL, signal=11))
    assert envelope.error.code == "EXECUTION_ERROR"
    assert envelope.error.details == {
        "ended_by": "signal", **NOTHING, "exit_code": None, "signal": 11,
    }  # fmt: skip


FORGED_RESULTS = [
    None, {}, {"value": 1}, {**GOOD, "more": 1}, {**GOOD, "stdout": None}, {**GOOD, "stdout": ["x"]},
    {**GOOD, "value_repr": 4}, {"value": 1, "text": "1"}, {**GOOD, "exception": None},
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.row("S2", "E1")
@pytest.mark.parametrize("result", FORGED_RESULTS, ids=str)
async def test_success_in_another_form_is_nobodys_language(home, result) -> None:
    assert not is_program_result(result)
    envelope, _ = await _call(home, RunEnding(EndedBy.OK, "call", result=result))
    assert envelope.error.code == "SANDBOX_UNAVAILABLE"
    assert envelope.data == {}


FORGED_DETAILS = [
    None, {}, {"stdout": 4}, {"stdout": ["x"]}, {"value": 1}, {"ended_by": "ok", "limit": {}},
]  # fmt: skip


@pytest.mark.parametrize("claimed", FORGED_DETAILS, ids=str)
def test_details_in_another_form_are_not_passed_on(claimed: Any) -> None:
    assert program_details(claimed) == NOTHING


@pytest.mark.parametrize(
    "exception",
    [
        "x",
        {},
        {**EXCEPTION, "more": 1},
        {**EXCEPTION, "line": "3"},
        {**EXCEPTION, "traceback": None},
    ],
    ids=str,
)
def test_exception_in_another_form_is_not_passed_on(exception: Any) -> None:
    said = program_details({"stdout": "x", "exception": exception, "value": "forged"})
    assert said == {**NOTHING, "stdout": "x"}


def test_program_can_add_no_key_to_the_details() -> None:
    said = program_details({"stdout": "", "ended_by": "ok", "limit": 1, "truncated": "yes"})
    assert said.keys() == NOTHING.keys()
    assert program_details({"stdout": "", "truncated": True})["truncated"] is True


@pytest.mark.row("S4")
def test_claim_names_a_failure_and_never_undoes_one() -> None:
    def ending(kind: Any) -> EndedBy:
        reply = {"error": {"kind": kind, "message": "m", "details": {"stdout": ""}}}
        return ending_of_reply(reply, isolation="call", cpu_ms=None, output_bytes=1).ended_by

    assert ending("output") is EndedBy.OUTPUT
    assert ending("memory") is EndedBy.MEMORY
    assert ending("policy") is EndedBy.POLICY
    for kind in ("ok", "wall_time", "cancelled", "sandbox_lost", None, 3):
        assert ending(kind) is EndedBy.EXCEPTION
