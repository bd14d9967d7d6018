"""SIGKILL around every commit: the audit chain stays intact, under an announced key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.storage.database import open_database
from support.audit import append, look, rows_of
from support.crash_points import CrashPoint, crash_at_every_point
from support.state import keys

SCENARIOS = "support.crash_scenarios"


@pytest.mark.row("D6")
def test_database_killed_at_any_commit_keeps_every_acknowledged_row(home: Path) -> None:
    points = []
    for crash in crash_at_every_point(f"{SCENARIOS}:three_writes", home, CLEAN_ENVIRONMENT):
        database = open_database(crash.home / "state.db")
        kept = database.read_now(keys)
        database.close()
        assert set(crash.said) <= kept
        assert len(kept) <= len(crash.said) + 1
        points.append(crash.point)
    assert points == [
        *(CrashPoint(moment, number) for number in (1, 2, 3) for moment in ("before", "after")),
        None,
    ]


@pytest.mark.row("D6")
def test_control_acknowledgement_before_commit_is_detected_as_lost(home: Path) -> None:
    broken = []
    for crash in crash_at_every_point(f"{SCENARIOS}:liar", home, CLEAN_ENVIRONMENT):
        database = open_database(crash.home / "state.db")
        if not set(crash.said) <= database.read_now(keys):
            broken.append(str(crash.point))
        database.close()
    assert broken == ["before-1", "before-2", "before-3"]


@pytest.mark.row("A7")
def test_chain_with_key_rotations_killed_at_any_commit_stays_intact(home: Path) -> None:
    """Rotations among them: whichever key is next, it is there and the chain has announced it."""
    points = 0
    for crash in crash_at_every_point(f"{SCENARIOS}:rotations", home, CLEAN_ENVIRONMENT):
        database = open_database(crash.home / "state.db")
        append(database, 1)
        database.close()
        verdict = look(crash.home)
        assert verdict.is_intact, (crash.point, verdict.findings)
        told = [json.loads(row.body) for row in rows_of(crash.home)]
        announced = {row["next_key_id"] for row in told if row["kind"] == "audit.rotated"}
        added = {row["subject"] for row in told if row["kind"] == "change.approver.add"}
        for promise in crash.said:
            what, _, which = promise.partition(" ")
            assert which in {"rotated": announced, "added": added}.get(what, {""})
        assert rows_of(crash.home)[-1].key_id in {*announced, rows_of(crash.home)[0].key_id}
        points += crash.point is not None
    assert points >= 12
