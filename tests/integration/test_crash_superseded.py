"""SIGKILL at every commit of a deletion that is asked about twice: files go by a yes that saw them."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.approvals.model import ApprovalQuery, ApprovalState
from support.crash_points import Crash, crash_at_every_point
from support.crash_superseded import (
    agreed_in,
    engine_in,
    is_deleted,
    prepare,
    rests,
)

pytestmark = [pytest.mark.row("A2", "A5", "D6")]

SCENARIO = "support.crash_superseded:play"
WAITING = frozenset({ApprovalState.PENDING, ApprovalState.APPROVED, ApprovalState.STARTED})


def test_killed_at_every_commit_no_file_goes_that_no_yes_has_seen(home: Path) -> None:
    here = Path.cwd()
    seen: Counter[str] = Counter()
    try:
        for crash in crash_at_every_point(SCENARIO, home, CLEAN_ENVIRONMENT, prepare=prepare):
            seen[asyncio.run(_examined(crash))] += 1
    finally:
        os.chdir(here)
    assert seen.keys() == {"asked 0 times", "asked 1 times", "asked 2 times", "done"}


async def _examined(crash: Crash) -> str:
    """Open what is left, look, and see what still waits end; how far it had come.

    A session ends with its engine, so that nothing can be deleted any more.
    """
    place, said = crash.home, [line.partition(" ") for line in crash.said]
    about = (str(crash.point), crash.said)
    was_deleted = is_deleted(place)
    assert not was_deleted or len(agreed_in(place)) == 2, about
    assert {what for kind, _, what in said if kind == "agreed"} <= agreed_in(place), about
    async with engine_in(place) as engine:
        page = await engine.approvals.list(ApprovalQuery())
        chain = [await rests(engine, one.id) for one in reversed(page.items)]
        assert {what for kind, _, what in said if kind == "waits"} <= {one.id for one in chain}
        assert len(chain) <= 2, about
        for one, following in pairwise(chain):  # both of one commit, or neither
            assert (one.state, one.superseded_by) == (ApprovalState.EXPIRED, following.id), about
            assert one.call_id == following.call_id, about
        assert sum(one.state is ApprovalState.DONE for one in chain) <= 1, about
        if chain and chain[-1].state is ApprovalState.PENDING:
            assert chain[-1].superseded_by is None, about
            chain[-1] = await rests(engine, chain[-1].id, WAITING)
            assert chain[-1].has_lost_session, about
        assert all(one.state not in WAITING for one in chain), about
        assert is_deleted(place) is was_deleted, about
        answered = chain and chain[-1].state is ApprovalState.DONE
        assert "answered" not in crash.said or answered, about
        if chain:  # whoever repeats it by its key, or asks for the call, hears of its end
            kept = await engine.approvals.answer_of(chain[-1].call_id, engine.owner)
            assert kept is not None, about
            assert kept.success is answered, (about, kept.error)
    return "done" if answered else f"asked {len(chain)} times"
