"""Parts that a state needs: an engine without one of them leaves the state alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select

from fumehood import Config, Engine, engine_parts
from fumehood.core.part import PartError
from fumehood.storage.database import FILE_NAME, Database, open_database
from fumehood.storage.needed_parts import need_part, require_parts
from fumehood.storage.schema import META

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


def test_promise_that_is_rolled_back_needs_no_part(database: Database) -> None:
    def job(connection: Connection) -> None:
        need_part(connection, "copies")
        raise LookupError

    with pytest.raises(LookupError):
        database.write_now(job)
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
