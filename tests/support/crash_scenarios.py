"""Scenarios that die at every commit point; see `crash_points`."""

from __future__ import annotations

from pathlib import Path

from fumehood import Engine
from fumehood.config import Config
from fumehood.core.identity import Principal, Scope
from fumehood.storage.database import open_database
from fumehood.testing import FakeWall

from .crash_points import Hook, Say
from .state import put

ADMIN = Principal("approver:test", frozenset({Scope.ADMIN}))


def three_writes(home: Path, hook: Hook, say: Say) -> None:
    """Acknowledge each row after its write."""
    database = open_database(home / "state.db", commit_hook=hook)
    for key in ("a", "b", "c"):
        database.write_now(put(key))
        say(key)
    database.close()


def liar(home: Path, hook: Hook, say: Say) -> None:
    """Control: acknowledge each row before its write."""
    database = open_database(home / "state.db", commit_hook=hook)
    for key in ("a", "b", "c"):
        say(key)
        database.write_now(put(key))
    database.close()


async def rotations(home: Path, hook: Hook, say: Say) -> None:
    """Start an engine, change approvers, rotate the key twice, and stop."""
    database = open_database(home / "state.db", commit_hook=hook)
    engine = Engine(config=Config(home=home), interpreter=FakeWall(), database=database)
    async with engine:
        say("started")
        for name in ("first", "second"):
            rotation = await engine.audit.rotate(ADMIN)
            say(f"rotated {rotation.key_id}")
            await engine.approvers.add(name, [Scope.APPROVE], by=ADMIN, now=engine.now())
            say(f"added {name}")
    database.close()
