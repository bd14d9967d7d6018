"""A database is opened, or left as it is; the name of its owner."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import Inspector, create_engine, inspect, select

from fumehood.storage import database as database_module
from fumehood.storage.database import APPLICATION_ID, open_database
from fumehood.storage.directory import owner_id
from fumehood.storage.errors import (
    DamagedState,
    ForeignState,
    NewerState,
    ReadFailed,
    StoreError,
    WriteFailed,
)
from fumehood.storage.migrations import STEPS
from fumehood.storage.schema import COUNTERS, METADATA
from support.state import Events, keys, pages_of, put


@pytest.fixture
def path(home: Path) -> Path:
    return home / "state.db"


def contents(home: Path) -> dict[str, bytes]:
    """Every file but the shared-memory index, which SQLite makes anew from the log."""
    return {
        file.name: file.read_bytes()
        for file in home.iterdir()
        if not file.name.endswith("-shm") and file.stat().st_size
    }


def left_open(path: Path, *statements: str) -> None:
    """Leave a write-ahead log that holds everything, as a killed engine does."""
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
    """A database of this engine's, closed in order."""
    database = open_database(path)
    for key in added:
        database.write_now(put(key))
    database.close()


def set_version(path: Path, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


@pytest.mark.row("D6")
def test_database_and_the_files_beside_it_are_private_whatever_the_umask(
    home: Path, path: Path
) -> None:
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
def test_database_that_others_could_read_is_closed_to_them(path: Path) -> None:
    make(path, "k")
    path.chmod(0o644)
    make(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.row("D6")
def test_closed_database_is_one_file_that_opens_again(home: Path, path: Path) -> None:
    make(path, "k")
    assert {file.name for file in home.iterdir()} == {"audit.key", "state.db"}
    database = open_database(path)
    assert database.read_now(keys) == {"k"}
    database.close()


@pytest.mark.row("D6")
def test_path_may_hold_what_means_something_in_an_address(home: Path) -> None:
    directory = home / "a b?mode=ro#x%41"
    directory.mkdir()
    make(directory / "state.db", "k")
    assert (directory / "state.db").stat().st_size > 0
    assert [file.name for file in home.iterdir()] == [directory.name]


def tables_of(inspector: Inspector) -> dict[str, object]:
    """Everything that the schema says of each table."""
    return {
        name: (
            [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(name)],
            inspector.get_pk_constraint(name)["constrained_columns"],
            sorted((index["name"], index["column_names"]) for index in inspector.get_indexes(name)),
            sorted(u["column_names"] for u in inspector.get_unique_constraints(name)),
        )
        for name in inspector.get_table_names()
    }


@pytest.mark.row("D6")
def test_migrations_make_exactly_the_schema_that_the_code_uses(path: Path) -> None:
    make(path)
    migrated = create_engine(f"sqlite:///{path}")
    declared = create_engine("sqlite://")
    METADATA.create_all(declared)
    found, expected = tables_of(inspect(migrated)), tables_of(inspect(declared))
    migrated.dispose()
    declared.dispose()
    assert len(expected) >= 9
    assert found == expected


def test_counts_from_before_budgets_and_rate_limits_shared_a_table_are_kept(path: Path) -> None:
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
    "somebody-else's": (["CREATE TABLE theirs (x)"], ForeignState, "not fumehood's"),
    "somebody-else's-with-a-version": (
        ["CREATE TABLE theirs (x)", "PRAGMA user_version = 1"], ForeignState, "not fumehood's",
    ),
    "named-by-another-application": (
        ["PRAGMA application_id = 7"], ForeignState, "not fumehood's",
    ),
    "newer": (
        [f"PRAGMA application_id = {database_module.APPLICATION_ID}", "PRAGMA user_version = 99"],
        NewerState, "newer engine",
    ),
    "ours-without-its-tables": (
        [f"PRAGMA application_id = {database_module.APPLICATION_ID}",
         f"PRAGMA user_version = {len(STEPS)}"],
        DamagedState, "damaged",
    ),
}  # fmt: skip


@pytest.mark.row("D6")
@pytest.mark.parametrize("how", ["closed", "left-open", "rollback-journal"])
@pytest.mark.parametrize("kind", NOT_OURS)
def test_what_is_not_ours_to_open_is_left_byte_for_byte(
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
def test_control_a_plain_connection_would_have_changed_such_a_file(home: Path, path: Path) -> None:
    left_open(path, "PRAGMA user_version = 99")
    before = contents(home)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA query_only = ON")
    assert connection.execute("PRAGMA user_version").fetchone() == (99,)
    connection.close()
    assert contents(home) != before


@pytest.mark.row("D6")
def test_newer_database_opens_again_with_its_own_engine(path: Path) -> None:
    make(path, "k")
    set_version(path, len(STEPS) + 1)
    with pytest.raises(NewerState, match="Start that one"):
        open_database(path)
    set_version(path, len(STEPS))
    database = open_database(path)
    assert database.read_now(keys) == {"k"}
    database.close()


def spoil(path: Path, where: int, length: int = 200) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        file.write(os.urandom(length))


@pytest.mark.row("D6")
@pytest.mark.parametrize("damage", ["no-database", "header", "schema", "half"])
def test_damaged_database_is_reported_with_the_cure_and_left_alone(
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
def test_damage_deep_inside_is_found_after_a_crash(home: Path, path: Path) -> None:
    make(path, *(f"k{number}" for number in range(2000)))
    left_open(path, "INSERT INTO meta VALUES ('last', '')")
    spoil(path, path.stat().st_size - 4096 * 3, 4096)
    before = contents(home)
    with pytest.raises(DamagedState):
        open_database(path)
    assert contents(home) == before


@pytest.mark.row("D6")
def test_damage_that_shows_later_is_an_error_and_said_once(path: Path) -> None:
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
def test_damage_of_the_audit_chain_is_met_at_the_start(home: Path, path: Path) -> None:
    make(path, "k")
    (page,) = pages_of(path, "audit")
    spoil(path, 4096 * (page - 1), 4096)
    before = contents(home)
    with pytest.raises(DamagedState, match="is damaged"):
        open_database(path)
    assert contents(home) == before


@pytest.mark.row("D6")
@pytest.mark.parametrize("side", ["-wal", "-journal"])
def test_log_without_its_database_is_not_thrown_away(home: Path, path: Path, side: str) -> None:
    path.with_name(f"state.db{side}").write_bytes(b"what was not yet in the database")
    before = contents(home)
    with pytest.raises(DamagedState, match="is missing"):
        open_database(path)
    assert contents(home) == before
    assert not path.exists()


@pytest.mark.row("D6")
@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_no_file_is_refused(home: Path, path: Path, kind: str) -> None:
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
def test_empty_file_is_a_new_database(path: Path) -> None:
    path.touch()
    make(path, "k")
    assert path.stat().st_size > 0


@pytest.mark.row("D6")
def test_directory_that_is_not_there_is_an_error_in_words(home: Path) -> None:
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        open_database(home / "nowhere" / "state.db")


@pytest.mark.row("D6")
def test_file_system_without_a_write_ahead_log_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without shared memory SQLite stays with its rollback journal, and says so."""
    connect = sqlite3.connect

    class Stubborn(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
            return super().execute(sql.replace("= WAL", "= DELETE"), *rest)

    monkeypatch.setattr(
        database_module.sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Stubborn)
    )
    with pytest.raises(StoreError, match="FUMEHOOD_HOME"):
        open_database(path)


# -- The state directory's own name --------------------------------------------------------


def test_name_is_the_same_after_a_restart(tmp_path: Path) -> None:
    assert owner_id(tmp_path) == owner_id(tmp_path)
    assert len(owner_id(tmp_path)) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
    assert (tmp_path / "owner").stat().st_mode & 0o777 == 0o600


def test_other_directories_and_copies_have_other_names(tmp_path: Path) -> None:
    first, second, copy = tmp_path / "1", tmp_path / "2", tmp_path / "3"
    first.mkdir()
    second.mkdir()
    name = owner_id(first)
    shutil.copytree(first, copy)
    assert len({name, owner_id(second), owner_id(copy)}) == 3


def test_damaged_name_is_an_error_and_no_other_name(tmp_path: Path) -> None:
    (tmp_path / "owner").write_bytes(b"short")
    with pytest.raises(OSError, match="damaged"):
        owner_id(tmp_path)


def test_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"0" * 16)
    (tmp_path / "owner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"."):
        owner_id(tmp_path)


def test_draft_that_a_crash_left_behind_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "owner.new").write_bytes(b"half")
    assert len(owner_id(tmp_path)) == 32
