"""Held actions: what a yes does if it is in the engine's memory, and what is stored of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fumehood.approvals.model import ApprovalState
from fumehood.core.errors import ApprovalExpired, EndedBy
from fumehood.executors.base import HeldAction, ToolRun
from fumehood.executors.outcome import Outcome
from support.asking import Deeds, asking, change_request

pytestmark = [pytest.mark.anyio, pytest.mark.row("A2")]


class _Counting(HeldAction):
    needs = "program"
    gone = "It is gone."
    count = 0

    async def carry_out(self, run: ToolRun) -> Outcome:
        self.count += 1
        return Outcome(EndedBy.OK, "none")


@pytest.mark.parametrize("is_withdrawn", [False, True])
async def test_held_action_is_done_once_and_never_after_its_withdrawal(is_withdrawn: bool) -> None:
    action, run = _Counting(), object.__new__(ToolRun)
    if is_withdrawn:
        action.withdraw()
    else:
        await action.run(run)
    with pytest.raises(ApprovalExpired, match="It is gone"):
        await action.run(run)
    assert action.count == (0 if is_withdrawn else 1)


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("needs", "code"),
    [("trial", "APPROVAL_EXPIRED"), ("program", "APPROVAL_EXPIRED"), (None, "OK")],
)
async def test_yes_to_an_action_of_another_engine_runs_nothing(
    tmp_path: Path, needs: str | None, code: str
) -> None:
    deeds = Deeds()
    async with asking(tmp_path, deeds=deeds) as desk:
        approval_id = await desk.parked("a")
    change_request(tmp_path, lambda request: request.update(needs=needs))
    async with asking(tmp_path, deeds=deeds) as desk:
        await desk.decide(approval_id)
        await desk.ended(approval_id)
        approval = await desk.engine.approvals.show(approval_id)
    assert (approval.code, approval.changed) == (code, (needs,) if needs else ())
    assert deeds.done == ([] if needs else ["a"])


OF_TRIAL = {"parent_id": "call_1", "options": {"preview": True}}


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("request_fields", "columns", "changed"),
    [
        ({}, {"tool": "net"}, ("program",)),
        (OF_TRIAL, {"session_id": "sess_1"}, ("trial",)),
        ({"parent_id": "call_1"}, {"session_id": "sess_1"}, ("session",)),
    ],
    ids=["request", "trial", "call-of-a-program"],
)
async def test_held_call_of_an_earlier_version_ends_as_lost_with_its_engine(
    tmp_path: Path,
    request_fields: dict[str, Any],
    columns: dict[str, str],
    changed: tuple[str, ...],
) -> None:
    async with asking(tmp_path) as desk:
        approval_id = await desk.parked("a")

    def as_before(request: dict[str, Any]) -> None:
        del request["needs"]
        request.update(request_fields)

    change_request(tmp_path, as_before, **columns)
    async with asking(tmp_path) as desk:
        await desk.looked_round()
        approval = await desk.state(approval_id)
    assert (approval.state, approval.changed) == (ApprovalState.EXPIRED, changed)
