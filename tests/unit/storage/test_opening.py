"""Opening the database or leaving it unchanged, and the id of the state directory."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import Connection, Inspector, create_engine, inspect, select

from fumehood.storage import sqlite as sqlite_module
from fumehood.storage.database import open_database
from fumehood.storage.directory import owner_id
from fumehood.storage.errors import (
    DamagedState,
    ForeignState,
    NewerState,
    ReadFailed,
    StoreError,
    WriteFailed,
)
from fumehood.storage.schema import COUNTERS, METADATA, STEPS
from fumehood.storage.sqlite import APPLICATION_ID
from support.state import Events, keys, pages_of, put

pytestmark = pytest.mark.sqlite

DEADLINE_S = 60.0


@pytest.fixture
def path(home: Path) -> Path:
    return home / "state.db"


def contents(home: Path) -> dict[str, bytes]:
    """All files except the shared-memory index, which SQLite rebuilds from the log."""
    return {
        file.name: file.read_bytes()
        for file in home.iterdir()
        if not file.name.endswith("-shm") and file.stat().st_size
    }


def left_open(path: Path, *statements: str) -> None:
    """Leave all data in a write-ahead log, as a killed engine does."""
    with tempfile.TemporaryDirectory() as elsewhere:
        live = Path(elsewhere) / path.name
        if path.exists():
            shutil.copyfile(path, live)
        connection = sqlite3.connect(live, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        for statement in statements:
            connection.execute(statement)
        for name in (path.name, f"{path.name}-wal"):
            shutil.copyfile(live.with_name(name), path.with_name(name))
        connection.close()
    assert path.with_name(f"{path.name}-wal").stat().st_size > 0


def make(path: Path, *added: str) -> None:
    """Create a database of this engine and close it cleanly."""
    database = open_database(path)
    database.write_now(lambda connection: [put(key)(connection) for key in added])
    database.close()


@pytest.mark.row("D6")
def test_database_files_are_private_with_any_umask(home: Path, path: Path) -> None:
    before = os.umask(0)
    try:
        database = open_database(path)
        database.write_now(put("k"))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in home.iterdir()}
        database.close()
    finally:
        os.umask(before)
    names = {"audit.key", "state.db", "state.db-wal", "state.db-shm"}
    assert modes == dict.fromkeys(names, 0o600)


@pytest.mark.row("D6")
def test_world_readable_database_is_made_private(path: Path) -> None:
    make(path, "k")
    path.chmod(0o644)
    make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.row("D6")
def test_database_path_may_contain_url_characters(home: Path) -> None:
    directory = home / "a b?mode=ro#x%41"
    directory.mkdir()
    make(directory / "state.db", "k")
    assert (directory / "state.db").stat().st_size > 0
    assert [file.name for file in home.iterdir()] == [directory.name]


def tables_of(inspector: Inspector) -> dict[str, object]:
    """The complete schema of each table."""
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(name)],
            inspector.get_pk_constraint(name)["constrained_columns"],
            sorted((index["name"], index["column_names"]) for index in inspector.get_indexes(name)),
            sorted(u["column_names"] for u in inspector.get_unique_constraints(name)),
        )
        for name in inspector.get_table_names()
        if not name.startswith("record_words")  # SQLite's own, for the search in records
    }


@pytest.mark.row("D6")
def test_migrations_produce_exactly_the_declared_schema(path: Path) -> None:
    make(path)
    migrated = create_engine(f"sqlite:///{path}")
    declared = create_engine("sqlite://")
    METADATA.create_all(declared)
    found, expected = tables_of(inspect(migrated)), tables_of(inspect(declared))
    migrated.dispose()
    declared.dispose()
    assert len(expected) >= 9
    assert found == expected


def test_migration_merges_budget_and_rate_limit_counters(path: Path) -> None:
    old = create_engine(f"sqlite:///{path}")
    at = "2026-03-01T12:00:00.000000+00:00"
    with old.begin() as connection:
        for step in STEPS[:12]:
            step(connection)
        run = connection.exec_driver_sql
        for row in (
            ("ever", "agent=a", "total", "money", "1.5", "2.0000001", at),
            ("day", "session=s", "2026-03-01", "calls", "3", "8", at),
        ):
            run("INSERT INTO counters VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        run("INSERT INTO rate_limits VALUES (7, 'rule:x', 'principal=p', 1772366400000000000)")
        run(f"PRAGMA application_id = {APPLICATION_ID}")
        run("PRAGMA user_version = 12")
    old.dispose()
    database = open_database(path)
    rows = database.read_now(lambda connection: connection.execute(select(COUNTERS)).all())
    seen = database.read_now(lambda c: c.exec_driver_sql("SELECT free_at FROM rate_limits").all())
    database.close()
    assert [tuple(row) for row in seen] == [(1772366400000000000,)]
    assert [tuple(row)[1:] for row in rows] == [
        ("ever", "agent=a", "total", "money", 1_500_000, 2_000_001, "9999"),
        ("day", "session=s", "2026-03-01", "calls", 3, 8, "2026-03-31T12:00:00.000000+00:00"),
        ("rule:x", "principal=p", "rate", "free_at", 0, 1772366400000000000, at),
    ]  # fmt: skip


NOT_OURS = {
    "foreign-tables": (["CREATE TABLE theirs (x)"], ForeignState, "not fumehood's"),
    "foreign-tables-with-a-version": (
        ["CREATE TABLE theirs (x)", "PRAGMA user_version = 1"], ForeignState, "not fumehood's",
    ),
    "foreign-application-id": (
        ["PRAGMA application_id = 7"], ForeignState, "not fumehood's",
    ),
    "newer-version": (
        [f"PRAGMA application_id = {sqlite_module.APPLICATION_ID}", "PRAGMA user_version = 99"],
        NewerState, "newer engine",
    ),
    "own-application-id-without-tables": (
        [f"PRAGMA application_id = {sqlite_module.APPLICATION_ID}",
         f"PRAGMA user_version = {len(STEPS)}"],
        DamagedState, "damaged",
    ),
}  # fmt: skip


@pytest.mark.row("D6")
@pytest.mark.parametrize("how", ["closed", "left-open", "rollback-journal"])
@pytest.mark.parametrize("kind", NOT_OURS)
def test_foreign_newer_or_damaged_database_is_left_unchanged(
    home: Path, path: Path, kind: str, how: str
) -> None:
    statements, error, words = NOT_OURS[kind]
    if how == "left-open":
        left_open(path, *statements)
    else:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute(f"PRAGMA journal_mode = {'WAL' if how == 'closed' else 'DELETE'}")
        for statement in statements:
            connection.execute(statement)
        connection.close()
    path.chmod(0o640)
    before = contents(home)
    for _ in range(2):
        with pytest.raises(error, match=words):
            open_database(path)
    assert contents(home) == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.row("D6")
def test_control_plain_connection_changes_the_file(home: Path, path: Path) -> None:
    left_open(path, "PRAGMA user_version = 99")
    before = contents(home)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA query_only = ON")
    assert connection.execute("PRAGMA user_version").fetchone() == (99,)
    connection.close()
    assert contents(home) != before


def spoil(path: Path, where: int, length: int = 200) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        file.write(os.urandom(length))


@pytest.mark.row("D6")
@pytest.mark.parametrize("damage", ["no-database", "header", "schema", "half"])
def test_damaged_database_is_reported_with_remedy_and_left_unchanged(
    home: Path, path: Path, damage: str
) -> None:
    make(path, *(f"k{number}" for number in range(200)))
    if damage == "no-database":
        path.write_bytes(b"Dear diary, " * 1000)
    elif damage == "half":
        os.truncate(path, path.stat().st_size // 2)
    else:
        spoil(path, 0 if damage == "header" else 100)
    before = contents(home)
    with pytest.raises(StoreError) as caught:
        open_database(path)
    assert isinstance(caught.value, DamagedState)
    assert ".recover" in str(caught.value)
    assert "move it away" in str(caught.value)
    assert contents(home) == before


@pytest.mark.row("D6")
def test_deep_damage_is_detected_on_open_after_a_crash(home: Path, path: Path) -> None:
    make(path, *(f"k{number}" for number in range(2000)))
    left_open(path, "INSERT INTO meta VALUES ('last', '')")
    spoil(path, path.stat().st_size - 4096 * 3, 4096)
    before = contents(home)
    with pytest.raises(DamagedState):
        open_database(path)
    assert contents(home) == before


@pytest.mark.row("D6")
def test_damage_found_while_running_is_an_error_logged_once(path: Path) -> None:
    make(path, *(f"k{number}" for number in range(2000)))
    for page in pages_of(path, "meta", "sqlite_autoindex_meta_1"):
        spoil(path, 4096 * (page - 1), 4096)
    events = Events()
    database = open_database(path, events)
    for _ in range(3):
        with pytest.raises(ReadFailed, match="malformed"):
            database.read_now(keys)
    with pytest.raises(WriteFailed, match="malformed"):
        database.write_now(put("k2000"))
    database.close()
    assert events.named("state.read_failed") == [{"reason": "database disk image is malformed"}]
    assert len(events.named("state.write_failed")) <= 1


@pytest.mark.row("D6")
def test_damaged_audit_chain_is_detected_on_open(home: Path, path: Path) -> None:
    make(path, "k")
    (page,) = pages_of(path, "audit")
    spoil(path, 4096 * (page - 1), 4096)
    before = contents(home)
    with pytest.raises(DamagedState, match="is damaged"):
        open_database(path)
    assert contents(home) == before


@pytest.mark.row("D6")
@pytest.mark.parametrize("side", ["-wal", "-journal"])
def test_journal_without_its_database_is_not_deleted(home: Path, path: Path, side: str) -> None:
    path.with_name(f"state.db{side}").write_bytes(b"what was not yet in the database")
    before = contents(home)
    with pytest.raises(DamagedState, match="is missing"):
        open_database(path)
    assert contents(home) == before
    assert not path.exists()


@pytest.mark.row("D6")
@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_directory_symlink_or_fifo_as_database_is_refused(
    home: Path, path: Path, kind: str
) -> None:
    target = home / "target"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        make(target, "k")
        path.symlink_to(target)
    before = target.read_bytes() if target.exists() else b""
    with pytest.raises(StoreError, match="is not a file"):
        open_database(path)
    assert before == (target.read_bytes() if target.exists() else b"")


@pytest.mark.row("D6")
def test_missing_directory_is_a_clear_error(home: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        open_database(home / "nowhere" / "state.db")


@pytest.mark.row("D6")
def test_file_system_without_wal_support_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shared memory SQLite keeps its rollback journal and reports it."""
    connect = sqlite3.connect

    class Stubborn(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            return super().execute(sql.replace("= WAL", "= DELETE"), *rest)

    monkeypatch.setattr(
        sqlite_module.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Stubborn)
    )
    with pytest.raises(StoreError, match="FUMEHOOD_HOME"):
        open_database(path)


# -- The state directory's own name --------------------------------------------------------


def test_owner_id_is_stable_and_differs_between_directories_and_copies(tmp_path: Path) -> None:
    first, second, copy = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    first.mkdir()
    second.mkdir()
    name = owner_id(first)
    assert owner_id(first) == name
    shutil.copytree(first, copy)
    assert len({name, owner_id(second), owner_id(copy)}) == 3


def test_damaged_owner_id_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "owner").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        owner_id(tmp_path)


def test_symlink_as_owner_id_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"0" * 16)
    (tmp_path / "owner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        owner_id(tmp_path)


def test_close_waits_for_queries_and_refuses_later_ones(path: Path) -> None:
    database = open_database(path)
    begun, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def query(connection: Connection) -> int:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        assert not closed.is_set()
        return int(connection.execute(select(1)).scalar_one())

    def close() -> None:
        database.close()
        closed.set()

    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(database.read_now, query)
        assert begun.wait(DEADLINE_S)
        closing = threads.submit(close)
        with suppress(ReadFailed):  # as soon as it has begun to close
            while not closing.done():
                database.read_now(lambda connection: None)
        assert not closing.done()
        with pytest.raises(ReadFailed, match="it is closed"):
            database.read_now(lambda connection: None)
        may_end.set()
        assert reading.result(DEADLINE_S) == 1
        closing.result(DEADLINE_S)
