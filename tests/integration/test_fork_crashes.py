"""SIGKILL around every commit of a fork: its sessions have their project, or do not exist."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from conftest import CLEAN_ENVIRONMENT
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.storage.sessions import SessionTable
from support.crash_points import crash_at_every_point

pytestmark = pytest.mark.row("S11")


def test_forks_of_a_killed_engine_are_all_there_with_their_project_or_none_is(home: Path) -> None:
    counts = []
    for crash in crash_at_every_point("support.crash_scenarios:forks", home, CLEAN_ENVIRONMENT):
        with closing(open_database(crash.home / FILE_NAME)) as database:
            sessions = {one.record.id: one for one in SessionTable(database).all_now()}
        said = [line.split() for line in crash.said]
        assert {session_id for _, session_id in said} <= sessions.keys(), crash.point
        if not said:
            continue
        forks = [one for one in sessions.values() if one.record.name is not None]
        assert len(forks) in (0, 2), crash.point
        for one in forks:
            assert one.home is not None
            project = one.home.of_parts.get("project")
            assert project is not None, crash.point
            assert (crash.home / "projects" / project["manifest"]).exists(), crash.point
        counts.append(len(forks))
    assert {0, 2} == set(counts)
    assert counts == sorted(counts)
