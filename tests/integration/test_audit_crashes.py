"""SIGKILL around every commit: the audit chain stays intact, under an announced key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.audit.keys import make_current
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


def test_crash_harness_fails_on_a_scenario_error(home: Path) -> None:
    with pytest.raises(AssertionError, match="failed with status"):
        list(crash_at_every_point(f"{SCENARIOS}:fails", home, CLEAN_ENVIRONMENT))


def test_crash_harness_prepares_the_state_for_each_run(home: Path) -> None:
    def prepare(place: Path) -> None:
        database = open_database(place / "state.db")
        append(database, 1)
        database.close()

    found = list(
        crash_at_every_point(f"{SCENARIOS}:three_writes", home, CLEAN_ENVIRONMENT, prepare=prepare)
    )
    assert all(len(rows_of(crash.home)) == 1 for crash in found)


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


@pytest.mark.row("A7")
def test_interrupted_key_rotation_is_completed_at_the_next_start(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new key is announced, but `audit.key` is still the old one, as after a kill there."""
    from support import audit

    database = open_database(home / "state.db")
    append(database, 1)
    old = (home / "audit.key").read_text()
    monkeypatch.setattr(audit, "make_current", lambda state, key: None)
    audit.rotate(database, home)
    database.close()
    assert (home / "audit.key").read_text() == old
    database = open_database(home / "state.db")
    assert append(database, 3) == 3
    database.close()
    assert (home / "audit.key").read_text() != old
    assert {path.read_text() for path in home.glob("audit-*.key")} > {old}
    assert look(home).is_intact
    assert make_current is not audit.make_current


@pytest.mark.row("A7")
def test_unannounced_key_is_never_used(home: Path) -> None:
    from fumehood.audit.keys import keep_key, new_key

    database = open_database(home / "state.db")
    append(database, 1)
    keep_key(home, new_key())
    (home / "audit.key.new").write_text("half a dra")
    database.close()
    database = open_database(home / "state.db")
    append(database, 2)
    database.close()
    assert len({row.key_id for row in rows_of(home)}) == 1
    assert look(home).is_intact
