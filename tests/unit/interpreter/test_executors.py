"""What programs in the interpreter claim: their results and details of failures are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.core.errors import EndedBy
from fumehood.interpreter.executors import is_program_result, program_details
from fumehood.sandbox.wall import RunEnding
from fumehood.testing import FakeWall
from support.answers import code_of

GOOD = {"value": 4, "value_repr": "4", "stdout": "x\n"}
EXCEPTION = {"type": "KeyError", "message": "'a'", "line": 3, "traceback": "Traceback …"}
NOTHING = {"value": None, "value_repr": None, "stdout": None, "exception": None}


FORGED_RESULTS = [
    None, {}, {"value": 1}, {**GOOD, "more": 1}, {**GOOD, "stdout": None}, {**GOOD, "stdout": ["x"]},
    {**GOOD, "value_repr": 4}, {"value": 1, "text": "1"}, {**GOOD, "exception": None},
]  # fmt: skip


@pytest.mark.anyio
@pytest.mark.row("S2", "E1")
async def test_malformed_program_result_makes_the_sandbox_unavailable(home: Path) -> None:
    assert is_program_result(GOOD)
    assert [result for result in FORGED_RESULTS if is_program_result(result)] == []
    wall = FakeWall(answer=lambda run: RunEnding(EndedBy.OK, "call", result={**GOOD, "more": 1}))
    async with Engine(config=Config(home=home), interpreter=wall) as engine:
        envelope = await engine.call("run_restricted_python", {"code": "1"})
    assert (code_of(envelope), envelope.data) == ("SANDBOX_UNAVAILABLE", {})


FORGED_DETAILS = [
    None, {}, {"stdout": 4}, {"stdout": ["x"]}, {"value": 1}, {"ended_by": "ok", "limit": {}},
]  # fmt: skip


@pytest.mark.parametrize("claimed", FORGED_DETAILS, ids=str)
def test_malformed_claimed_details_are_dropped(claimed: Any) -> None:
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
def test_malformed_claimed_exception_is_dropped(exception: Any) -> None:
    said = program_details({"stdout": "x", "exception": exception, "value": "forged"})
    assert said == {**NOTHING, "stdout": "x"}


def test_program_cannot_add_keys_to_the_error_details() -> None:
    said = program_details({"stdout": "", "ended_by": "ok", "limit": 1, "truncated": "yes"})
    assert said.keys() == NOTHING.keys()
    assert program_details({"stdout": "", "truncated": True})["truncated"] is True
