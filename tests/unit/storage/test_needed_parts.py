"""Parts that a state needs: an engine without one of them leaves the state alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, delete, func, select

from fumehood import Config, Engine, engine_parts
from fumehood.core.part import PartError
from fumehood.identity.approvers import make_first_approver
from fumehood.storage.database import FILE_NAME, Database, open_database
from fumehood.storage.needed_parts import need_part, needed_parts, release_part, require_parts
from fumehood.storage.schema import META
from support.audit import append

pytestmark = pytest.mark.row("A7")


@pytest.fixture
def database(home: Path) -> Iterator[Database]:
    with closing(open_database(home / FILE_NAME)) as opened:
        yield opened


def rows(database: Database) -> int:
    return database.read_now(
        lambda connection: connection.execute(select(func.count()).select_from(META)).scalar_one()
    )


def test_state_is_refused_without_a_part_that_it_needs(database: Database, home: Path) -> None:
    require_parts(database, ())
    before = rows(database)
    for name in ("audit", "copies", "audit"):
        database.write_now(lambda connection, name=name: need_part(connection, name))
    assert rows(database) == before + 2  # each once
    require_parts(database, {"audit", "copies", "another"})
    with pytest.raises(PartError, match="The state needs the part 'copies', which is not inst"):
        require_parts(database, {"audit", "another"})
    database.close()
    with (
        closing(open_database(home / FILE_NAME)) as again,
        pytest.raises(PartError, match="needs the part 'audit'"),
    ):
        require_parts(again, ())


def test_part_whose_promise_has_ended_is_not_needed(database: Database) -> None:
    for name in ("audit", "audit2"):
        database.write_now(partial(need_part, name=name))
    database.write_now(partial(release_part, name="audit"))
    database.write_now(partial(release_part, name="audit"))
    assert database.read_now(needed_parts) == {"audit2"}
    require_parts(database, {"audit2"})


def test_promise_that_is_rolled_back_needs_no_part(database: Database) -> None:
    def job(connection: Connection) -> None:
        need_part(connection, "copies")
        raise LookupError

    with pytest.raises(LookupError):
        database.write_now(job)
    require_parts(database, ())


BEFORE_NEEDS = 22
"""The schema of the last version whose anchored states do not record that they need `audit`."""


@pytest.mark.sqlite
@pytest.mark.parametrize("kind", ["audit.anchored", "call.ended"])
def test_state_that_an_earlier_version_anchored_is_refused_without_audit(
    kind: str, home: Path
) -> None:
    """The twin was never anchored, although one of its rows has these words."""
    with closing(open_database(home / FILE_NAME)) as database:
        append(database, 2)
        words = {"tool": '"kind":"audit.anchored"', "kind ": "audit.anchored"}
        append_row, at = database.audit.append, "2026-01-01T00:00:00Z"
        database.write_now(lambda connection: append_row(connection, kind, at, words))
    for _ in range(2):
        with closing(sqlite3.connect(home / FILE_NAME)) as earlier:
            earlier.execute(f"PRAGMA user_version = {BEFORE_NEEDS}")
            earlier.execute("ALTER TABLE sessions DROP COLUMN least_grade")  # of a later step
        with closing(open_database(home / FILE_NAME)) as database:
            assert rows(database) == (kind == "audit.anchored")  # once, even if it is there
            require_parts(database, {"audit"})
            if kind == "audit.anchored":
                with pytest.raises(PartError, match="needs the part 'audit'"):
                    require_parts(database, ())
            else:
                require_parts(database, ())


def test_no_engine_is_made_for_a_state_that_needs_a_missing_part(
    database: Database, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.write_now(lambda connection: need_part(connection, "audit"))
    Engine(config=Config(home=home), database=database)  # the twin
    others = tuple(part for part in engine_parts.parts() if part.name != "audit")
    monkeypatch.setattr(engine_parts, "parts", lambda: others)
    with pytest.raises(PartError, match="needs the part 'audit'"):
        Engine(config=Config(home=home), database=database)


def test_first_approver_of_a_state_that_needs_a_missing_part_is_not_made(
    database: Database,
) -> None:
    shown: list[str] = []
    now = datetime(2026, 1, 1, tzinfo=UTC)
    database.write_now(lambda connection: need_part(connection, "copies"))
    with pytest.raises(PartError, match="needs the part 'copies'"):
        make_first_approver(database, "alice", now, shown.append)
    assert shown == []
    database.write_now(lambda connection: connection.execute(delete(META)))
    make_first_approver(database, "alice", now, shown.append)  # the twin
    assert len(shown) == 1
