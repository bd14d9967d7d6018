"""A call that needs a consent runs first only if a part holds its effect back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from fumehood import Config, Engine
from fumehood.core.envelope import Envelope
from fumehood.core.errors import InternalError, RequiresHumanApproval
from fumehood.executors.around import Given
from fumehood.executors.base import ToolRun
from fumehood.executors.outcome import Outcome
from fumehood.pipeline.approve import ApprovedCall
from fumehood.pipeline.part import CallPart, CallParts
from fumehood.storage.database import open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]

RULES = """
[[rules]]
id = "look-first"
tools = ["run_python", "write_file"]
decision = "ask"
preview = true
"""

CODE = {"code": "open('a', 'w').write('b')"}


async def _as_it_is(outcome: Outcome, held_back: object) -> Outcome:
    return outcome


GIVEN: dict[str, Callable[[ToolRun], Given | None]] = {
    "nothing": lambda run: None,
    "claim": lambda run: Given(holds_back=True),
    "claim-and-outcome": lambda run: Given(holds_back=True, conclude=_as_it_is),
    "claim-and-lease": lambda run: Given(holds_back=True, lease=run.lease),
    "lease-and-outcome": lambda run: Given(lease=run.lease, conclude=_as_it_is),
}
"""What a part gives that says it holds effects back, and does not."""


class Liar(CallPart):
    holds_back_with = MappingProxyType({"preview": True})

    def __init__(self, given: Callable[[ToolRun], Given | None]) -> None:
        self.given = given

    @asynccontextmanager
    async def around(self, run: ToolRun, before: Sequence[Given]) -> AsyncIterator[Given | None]:
        yield self.given(run)


async def called(
    home: Path, holding: CallPart | None, tool: str = "run_python", given: Mapping[str, Any] = CODE
) -> tuple[Envelope, list[str]]:
    """The answer to a call that a rule lets run first, and the programs that ran for it."""
    (home / "policy.toml").write_text(RULES)
    (home / "policy.toml").chmod(0o600)
    config = Config(home=home, policy_file=home / "policy.toml", sessions={"image": "python"})  # type: ignore[arg-type]
    wall, database = FakeWall(limits=CONTAINER_LIMITS), open_database(home / "state.db")
    async with Engine(
        config=config, interpreter=FakeWall(), container=wall, database=database
    ) as engine:
        if holding is not None:
            parts = CallParts(around=(holding.around,), holding=holding)
            object.__setattr__(engine._made.services, "parts", parts)
        session = await engine.sessions.create(engine.owner, durable=True)
        answer = await engine.call(tool, dict(given), session_id=session.id)
        ran = [run.program for run in wall.runs if run.program != "files"]
    database.close()
    return answer, ran


@pytest.mark.parametrize("given", GIVEN)
async def test_program_does_not_run_first_if_no_part_holds_its_effect_back(
    given: str, home: Path
) -> None:
    answer, ran = await called(home, Liar(GIVEN[given]))
    assert answer.error is not None
    assert (answer.error.code, ran) == (InternalError.code, [])


async def test_tool_that_runs_no_program_asks_first(home: Path) -> None:
    answer, ran = await called(
        home, Liar(GIVEN["claim"]), "write_file", {"path": "a", "content": "b"}
    )
    assert answer.error is not None
    assert (answer.error.code, ran) == (RequiresHumanApproval.code, [])


async def test_without_such_a_part_the_call_asks_first(home: Path) -> None:
    answer, ran = await called(home, CallPart())
    assert answer.error is not None
    assert (answer.error.code, ran) == (RequiresHumanApproval.code, [])


async def test_control_without_the_check_the_program_runs_unapproved(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ApprovedCall, "needs_consent", False)
    answer, ran = await called(home, Liar(GIVEN["nothing"]))
    assert (answer.success, ran) == (True, ["python"])
