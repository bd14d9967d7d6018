"""A database that a part adds: chosen by the scheme of the URL, or refused with the known ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import ClassVar, Self

import pytest
from sqlalchemy import Connection, Engine, func, insert, select

from fumehood import parts as parts_module
from fumehood.core.part import Part
from fumehood.parts import parts
from fumehood.storage.backend import RemoteBackend
from fumehood.storage.database import open_database, reading
from fumehood.storage.errors import AuditKeyLost, Fenced, Standby, StoreError, WriteFailed
from fumehood.storage.schema import CHANGES
from fumehood.storage.sqlite import SQLite, open_file, open_to_read

pytestmark = pytest.mark.sqlite

AT = "2026-01-01T00:00:00+00:00"
ROW = {
    "at": AT, "principal_id": "uid:1", "action": "a", "subject": "s",
    "details": {},
}  # fmt: skip


class Cupboard(SQLite, RemoteBackend):
    """A state in a file, at `cupboard:///PATH`. `taken` has the paths with an active engine."""

    taken: ClassVar[set[str]] = set()
    path = ""
    is_replaced = False
    """Whether another engine has become active, although this one has not stopped."""

    @classmethod
    def open(cls, url: str) -> Self | None:
        path = url.removeprefix("cupboard://")
        if path in cls.taken:
            return None
        cls.taken.add(path)
        found = open_file(Path(path))
        opened = cls(found.writing, found.reading, has_readers=True)
        opened.path = path
        return opened

    @classmethod
    def open_to_read(cls, url: str) -> Engine:
        return open_to_read(Path(url.removeprefix("cupboard://")))

    @contextmanager
    def transaction(self, connection: Connection, *, flushed: bool) -> Iterator[None]:
        with super().transaction(connection, flushed=flushed):
            if self.is_replaced:
                raise Fenced("another engine is active")
            yield

    def close(self) -> None:
        super().close()
        self.taken.discard(self.path)


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch, home: Path) -> str:
    """The address of a state of a part's kind, whose part is there."""
    part = Part(name="cupboard", states={"cupboard": f"{__name__}:Cupboard"})
    monkeypatch.setattr(parts_module, "parts", lambda: (part,))
    (home / "there").mkdir(mode=0o700)
    return f"cupboard://{home / 'there' / 'rows.db'}"


def test_state_is_opened_by_the_part_that_adds_its_scheme(url: str, home: Path) -> None:
    with closing(open_database(home / "state.db", url=url)) as database:
        database.write_now(lambda connection: connection.execute(insert(CHANGES), ROW))
    assert not (home / "state.db").exists()
    assert (home / "audit.key").exists()
    with reading(home, url) as connection:
        assert count(connection) == 1


def test_second_engine_stands_by_if_it_has_the_audit_key(url: str, home: Path) -> None:
    other = home / "other"
    other.mkdir(mode=0o700)
    with closing(open_database(home / "state.db", url=url)) as database:
        database.write_now(lambda c: database.audit.append(c, "made", AT, {}))
        with pytest.raises(Standby):
            open_database(home / "state.db", url=url)
        with pytest.raises(AuditKeyLost):
            open_database(other / "state.db", url=url)
    open_database(home / "state.db", url=url).close()  # twin


@pytest.mark.anyio
async def test_attack_engine_that_was_replaced_changes_nothing_and_reports_it_once(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    opened = open_database(home / "state.db", lambda event, _: seen.append(event), url=url)
    with closing(opened) as database:
        await database.write(lambda connection: connection.execute(insert(CHANGES), ROW))
        assert not database.is_fenced  # twin
        monkeypatch.setattr(Cupboard, "is_replaced", True)
        for _ in range(2):
            with pytest.raises(WriteFailed):
                await database.write(lambda connection: connection.execute(insert(CHANGES), ROW))
            with pytest.raises(WriteFailed):
                await database.check()
        assert database.is_fenced
        assert seen == ["state.fenced"]
        assert await database.read(count) == 1


def count(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(CHANGES)).scalar_one()


@pytest.mark.parametrize(
    "wrong",
    ["mysql://me:secret@host/db", "secret@host/db", "", "cupboard2:///secret", "CUPBOARD:///x"],
)
def test_unknown_scheme_is_refused_with_the_known_ones_and_without_the_url(
    url: str, home: Path, wrong: str
) -> None:
    for use in (lambda: open_database(home / "state.db", url=wrong), lambda: read(home, wrong)):
        with pytest.raises(StoreError, match=r"unknown scheme\. Known schemes: cupboard\.$"):
            use()
    assert not (home / "audit.key").exists()
    assert not (home / "state.db").exists()


def read(home: Path, url: str) -> None:
    with reading(home, url):
        pass


def test_no_scheme_is_known_without_parts(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(parts_module, "parts", tuple)
    with pytest.raises(StoreError, match="Known schemes: none"):
        open_database(home / "state.db", url="postgresql://me@host/db")


def test_product_has_postgresql() -> None:
    added = {scheme: place for part in parts() for scheme, place in part.states.items()}
    assert added.keys() == {"postgres", "postgresql"}
