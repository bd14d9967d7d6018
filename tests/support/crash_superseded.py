"""A deletion that is asked about again, because its files changed: a scenario to be killed in.

The caller asks, somebody adds a file, an approver says yes, the engine asks again with the file
shown, and the approver says yes to that. What was promised is said on the way.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from fumehood import Config, Engine
from fumehood.approvals.model import Approval, ApprovalState, NewDecision
from fumehood.core.identity import Principal, Scope
from fumehood.registry.discover import GROUP, discover
from fumehood.storage.database import open_database
from fumehood.testing import FakeWall

from .container import scripted_wall
from .crash_points import Hook, Say

ALICE = Principal("approver:alice", frozenset({Scope.APPROVE}))
YES = NewDecision(decision="approve")
OFFERED = tuple(entry_points(group=GROUP, name="delete_files"))
MOVING = frozenset({ApprovalState.APPROVED, ApprovalState.STARTED})


@asynccontextmanager
async def engine_in(home: Path, hook: Hook | None = None) -> AsyncIterator[Engine]:
    """An engine whose sessions' files lie in `home`, with one tool and no other wall."""
    os.chdir(home)
    sessions: Any = {"image": "python"}
    database = open_database(home / "state.db", commit_hook=hook)
    walls = {"interpreter": FakeWall(), "jail": FakeWall(), "container": scripted_wall()}
    try:
        config = Config(home=home, sessions=sessions)
        with patch("fumehood.compose.discover", partial(discover, found=OFFERED)):
            engine = Engine(config=config, database=database, **walls)
        async with engine:
            yield engine
    finally:
        database.close()


def prepare(home: Path) -> None:
    """An approver."""

    async def make() -> None:
        async with engine_in(home) as engine:
            admin = Principal("approver:first", frozenset({Scope.ADMIN}))
            await engine.approvers.add("alice", [Scope.APPROVE], by=admin, now=engine.now())

    anyio.run(make)


def is_deleted(home: Path) -> bool:
    """Whether what was to be deleted had been there, and is gone."""
    return any(home.glob("workspaces/*")) and not any(home.glob("workspaces/*/d"))


async def rests(
    engine: Engine, approval_id: str, moving: frozenset[ApprovalState] = MOVING
) -> Approval:
    """The approval, once nothing more becomes of it by itself."""
    seen = 0
    with anyio.fail_after(20):
        while (one := await engine.approvals.show(approval_id)).state in moving:
            seen = await engine.approvals.next_change(seen, within_s=1)
    return one


async def play(home: Path, hook: Hook, say: Say) -> None:
    """The whole story. Each line that is said was promised to somebody."""
    async with engine_in(home, hook) as engine:
        session = await engine.sessions.create(engine.owner)
        files = home / "workspaces" / session.id / "d"
        files.mkdir(parents=True)
        (files / "shown").write_text("text")
        asked = await engine.call(
            "delete_files", {"paths": ["d"], "recursive": True}, session_id=session.id
        )
        assert asked.error is not None
        assert asked.error.approval_id is not None, asked.error
        say(f"waits {asked.error.approval_id}")
        (files / "new").write_text("never shown")
        await engine.approvals.decide(asked.error.approval_id, YES, ALICE, channel="test")
        say(f"agreed {asked.error.approval_id}")
        first = await rests(engine, asked.error.approval_id)
        assert first.superseded_by is not None, first
        say(f"waits {first.superseded_by}")
        await engine.approvals.decide(first.superseded_by, YES, ALICE, channel="test")
        say(f"agreed {first.superseded_by}")
        second = await rests(engine, first.superseded_by)
        assert second.state is ApprovalState.DONE, second
        say("answered")


def agreed_in(home: Path) -> set[str]:
    """The approvals that a yes is kept of."""
    with closing(sqlite3.connect(home / "state.db")) as connection:
        found = connection.execute("SELECT approval_id FROM decisions WHERE decision = 'approve'")
        return {str(approval_id) for (approval_id,) in found}
