"""Projects in one engine: whose session has one, and what a killed engine left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fumehood import Config, Engine
from fumehood.core.errors import StateUnavailable
from fumehood.projects.home import ProjectHome
from fumehood.projects.in_engine import FOLDER, ProjectsPart
from fumehood.projects.rules import STAGING_PREFIX
from fumehood.projects.writing import Journals, _Journal
from fumehood.storage.database import FILE_NAME, open_database
from fumehood.testing import CONTAINER_LIMITS, FakeWall

pytestmark = pytest.mark.anyio


async def test_tools_of_a_project_find_that_of_their_session_only(home: Path) -> None:
    database = open_database(home / FILE_NAME)
    config = Config.model_validate({"home": home, "sessions": {"image": "python"}})
    wall = FakeWall(limits=CONTAINER_LIMITS)
    async with Engine(config=config, database=database, container=wall) as engine:
        other = await engine.sessions.create(engine.owner)
        session = await engine.sessions.create(engine.owner)
        kept = ProjectHome("/home/a/shop", "gone", 7).value
        assert (await engine.sessions.keep(session.id, "project", kept)).project == "shop"
        refused = await engine.call("workspace_diff", {}, session_id=other.id)
        assert refused.error is not None
        assert refused.error.message == "This session was not made from a project directory."
        found = await engine.call("workspace_diff", {}, session_id=session.id)
        assert found.error is not None
        assert found.error.code == "STATE_UNAVAILABLE"
        assert "What was copied into this session is not known any more." in found.error.message
    database.close()


async def test_journal_of_a_killed_engine_is_kept_until_its_outcome_is_stored(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = tmp_path / f"{STAGING_PREFIX}1"
    staging.mkdir()
    (staging / "new-0").write_text("unfinished\n")
    Journals(home / FOLDER).write(_Journal(str(tmp_path), staging.name, "call_1"))
    seen: list[tuple[object, bool]] = []
    before = ProjectsPart.recovered

    def journals() -> list[Path]:
        return list((home / FOLDER).glob("*.json"))

    async def recovered(part: ProjectsPart) -> None:
        seen.append((await part.outcomes(), bool(journals())))
        await before(part)

    monkeypatch.setattr(ProjectsPart, "recovered", recovered)
    database = open_database(home / FILE_NAME)
    async with Engine(config=Config(home=home), database=database):
        ((known, is_kept),) = seen
    database.close()
    assert isinstance(known, dict)
    assert isinstance(known["call_1"], StateUnavailable)
    assert is_kept
    assert not staging.exists()
    assert journals() == []
