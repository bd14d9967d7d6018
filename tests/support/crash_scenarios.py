"""Scenarios that die at every commit point; see `crash_points`."""

from __future__ import annotations

from pathlib import Path

from fumehood import Engine
from fumehood.config import Config
from fumehood.core.identity import Principal, Scope
from fumehood.projects.changes import Baseline
from fumehood.projects.in_engine import ProjectsPart
from fumehood.snapshots.service import Snapshots
from fumehood.storage.database import open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

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


async def forks(home: Path, hook: Hook, say: Say) -> None:
    """Fork a session with a project twice."""
    database = open_database(home / "state.db", commit_hook=hook)
    wall = FakeWall(limits=CONTAINER_LIMITS, keeps_sessions=True)
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    async with Engine(
        config=config, container=wall, interpreter=FakeWall(), database=database
    ) as engine:
        session = await engine.sessions.create(engine.owner, disk_mb=64)
        store = engine.part(ProjectsPart)._store
        project = await store.put(session.id, home, Baseline({}, {}, everything=False))
        await engine.sessions.keep(session.id, "project", project.value)
        say(f"session {session.id}")
        snapshots = Snapshots(engine.sessions, wall, engine.now)
        for fork in await snapshots.fork(engine.owner, session.id, name="try", count=2):
            say(f"fork {fork.id}")
    database.close()
