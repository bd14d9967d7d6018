"""The table of approval channels, and what the engine does for each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import Connection

from fumehood.approvals.channels import ApprovalChannel, ChannelContext, Show
from fumehood.approvals.model import ApprovalState
from fumehood.compose import CHANNELS
from fumehood.config import Config
from fumehood.core.identity import Principal, Scope
from support.asking import YES, asking

pytestmark = [pytest.mark.anyio, pytest.mark.row("A6")]


class Noticeboard(ApprovalChannel):
    """A channel that records what it is notified of. Its `owe` fails while `is_full`."""

    name = "noticeboard"
    decides_as = "noticeboard"

    def __init__(self, settings: Any, context: ChannelContext) -> None:
        self.owed: list[tuple[str, str]] = []
        self.shown: list[ApprovalState] = []
        self.wakes = 0
        self.is_full = False
        self.show: Show | None = None

    def owe(self, connection: Connection, approval_id: str, event: str, at: datetime) -> None:
        if self.is_full:
            raise RuntimeError("no room")
        self.owed.append((approval_id, event))

    def wake(self) -> None:
        self.wakes += 1

    @asynccontextmanager
    async def running(self, show: Show) -> AsyncIterator[None]:
        self.show = show
        yield
        self.show = None


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[Noticeboard]:
    """Add a channel to the table, always configured."""
    made: list[Noticeboard] = []

    def make(settings: Any, context: ChannelContext) -> ApprovalChannel:
        made.append(Noticeboard(settings, context))
        return made[-1]

    monkeypatch.setattr(Config, "noticeboard", True, raising=False)
    monkeypatch.setattr("fumehood.compose.CHANNELS", {**CHANNELS, "noticeboard": make})
    return made


async def test_registered_channel_is_notified_runs_and_may_decide(
    boards: list[Noticeboard],
) -> None:
    async with asking(approver=False) as desk:
        (board,) = boards
        approval_id = await desk.parked("a")  # the channel is the only approver
        assert board.owed == [(approval_id, "approval.created")]
        assert board.wakes == 1
        assert board.show is not None
        assert (await board.show(approval_id)).state is ApprovalState.PENDING
        by = Principal(board.name, frozenset({Scope.APPROVE}))
        await desk.decide(approval_id, YES, by)
        assert (await desk.ended(approval_id)).success
        events = [event for _, event in board.owed]
        assert events == ["approval.created", "approval.decided", "approval.ended"]
        assert board.wakes >= 3
    assert board.show is None


async def test_failed_notification_rolls_back_the_decision(
    boards: list[Noticeboard],
) -> None:
    async with asking() as desk:
        (board,) = boards
        approval_id = await desk.parked("a")
        board.is_full = True
        with pytest.raises(RuntimeError):
            await desk.decide(approval_id)
        assert (await desk.engine.approvals.show(approval_id)).state is ApprovalState.PENDING
        board.is_full = False
        await desk.decide(approval_id)
        assert (await desk.ended(approval_id)).success
        assert desk.deeds.done == ["a"]


def test_each_channel_has_a_configuration_section() -> None:
    assert set(CHANNELS) <= set(Config.model_fields)
